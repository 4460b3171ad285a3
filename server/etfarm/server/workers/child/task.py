"""The child process of one task, which enters its jail, reads the request, runs the task and sends the answer."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from etfarm.server.workers import errors, request_files
from etfarm.server.workers.channel import frames
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.file_view import Step
from etfarm.server.workers.jail.isolation import Jail
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, FarmError
from etfarm.wire.sandbox import cgroups, syscalls


@dataclass(frozen=True)
class Order:
    """The daemon's order for one child, sent as JSON; the request follows on the channel."""

    task: str
    """The task as `module:function`, called as function(request, folder, emit) -> bytes."""
    folder: str
    """The child's own folder, which exists and is empty."""
    limits: Limits
    jail: Jail


def run(
    order: Order, shared: Sequence[Step], channel: socket.socket, log: int, supervisor: int, group: cgroups.Group | None
) -> NoReturn:
    """Run the child after its fork: enter the jail, read the request, run the task, send the answer, and exit."""
    folder = Path(order.folder)
    answers = frames.FrameWriter(channel)
    code = 1
    try:
        kind, data = frames.receive(channel)
        if kind != frames.FILES:
            raise FarmError(f"The child was sent a frame of kind {kind!r} first.")
        files = [Path(path) for path in json.loads(data)]
        report = isolation.enter(
            folder, order.limits, order.jail, log=log, channel=channel.fileno(), shared=shared, files=files, group=group,
            is_first_process=supervisor == 1, watches_memory=True,
        )  # fmt: skip
        described.append(report)
        syscalls.die_with_parent(supervisor)
        os.close(log)
        _prepare(order.limits)
        kind, data = frames.receive(channel)
        if kind != frames.REQUEST:
            raise FarmError(f"The child was sent a frame of kind {kind!r} as its request.")
        task = _load_task(order.task)
        result = task(request_files.decode(data, files), folder, lambda event: answers.send(frames.EVENT, event))
        sys.stdout.flush()
        sys.stderr.flush()
        answers.send(frames.RESULT, result)
        code = 0
    except BaseException as error:  # noqa: BLE001 - every error becomes an answer
        code = _report(error, order, answers)
    finally:
        # Skips atexit handlers and destructors of native libraries, which may crash after a correct answer.
        os._exit(code)


described: Final[list[JailReport]] = []
"""The report of this child's jail; empty outside of children."""


def describe_jail(request: object, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: return this child's `JailReport` as JSON."""
    return described[0].to_json()


def _prepare(limits: Limits) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
    for noisy in ("matplotlib", "urllib3", "torch.fx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if "torch" in sys.modules:
        # Not before the last fork, because a forked process whose torch already had threads hangs.
        sys.modules["torch"].set_num_threads(limits.threads)


def _load_task(name: str) -> Callable[[object, Path, Callable[[bytes], None]], bytes]:
    module, _, function = name.partition(":")
    task: Callable[[object, Path, Callable[[bytes], None]], bytes] = getattr(importlib.import_module(module), function)
    return task


def _report(error: BaseException, order: Order, answers: frames.FrameWriter) -> int:
    reported: EtfarmError
    # The traceback refers to the frames that hold the memory, so it is freed before anything is formatted.
    if errors.is_out_of_memory(error):
        error.__traceback__ = None
        error.__context__ = None
        reported = errors.ChildOutOfMemory(order.task, order.limits.memory_bytes, detail=str(error)[:500])
    elif errors.is_out_of_processes(error):
        reported = errors.child_too_many_processes(order.task, order.limits.processes)
    elif isinstance(error, OSError) and errors.is_disk_full(error):
        reported = errors.child_disk_full(order.task, error.strerror or str(error))
    elif isinstance(error, EtfarmError):
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        reported = error
    else:
        traceback.print_exception(error)
        reported = errors.Defect(order.task, error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        answers.send(frames.ERROR, errors.to_json(reported, hide={f"{order.folder}/": "", order.folder: "."}))
    except OSError:
        return 1
    return 0
