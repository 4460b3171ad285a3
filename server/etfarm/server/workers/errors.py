"""Errors of children and of the pool, and their JSON on the channel from a child to the daemon.

A child has loaded a user's bytes: its messages are never unpickled, and their size is bounded.
"""

from __future__ import annotations

import errno
import json
import signal
import traceback
from collections.abc import Mapping

from etfarm.server.workers.limits import LOADING_S, LOADING_S_PER_GIB, PARSING_S, PARSING_S_PER_GIB
from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Fault, Kind, UserError, error_for, error_of

MAX_TEXT = 8000
"""Maximum number of characters of each text in a child's error; longer texts are cut."""

MAX_METADATA = 50
"""Maximum number of metadata entries in a child's error; further entries are dropped."""

_TRACEBACK_LINES = 30
"""Number of lines of a traceback that are kept, from its end."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")


class Defect(FarmError):
    """An exception that no code expects, which starting again does not cure.

    Args:
        where: what raised it.
    """

    def __init__(self, where: str, error: BaseException) -> None:
        lines = "".join(traceback.format_exception(error)).splitlines()
        what = (str(error).strip().splitlines() or [""])[0]
        super().__init__(
            f"{where} failed inside of etfarm: {type(error).__name__}: {what}",
            "This is a defect of etfarm: please report it with the logs of the job and of the server.",
            task=where, traceback="\n".join(lines[-_TRACEBACK_LINES:]),
        )  # fmt: skip


class WorkersDown(FarmError):
    """The forkserver ended or could not be warmed up."""

    reason = "WORKERS_DOWN"


class ForkserverEnded(WorkersDown):
    """The forkserver was killed. Another one may live."""


class ChildDied(FarmError):
    """A child ended without an answer because it crashed in native code or was killed."""

    reason = "COMPILER_CRASHED"

    def __init__(self, task: str, status: int, stage: str, log: str) -> None:
        how = signal_name(-status) if status < 0 else f"exit code {status}"
        where = f" in {stage}" if stage else ""
        super().__init__(
            f"The job's process ended with {how}{where}.",
            "Try it again; if it repeats, its last log lines are in the error's metadata, and all of them in the job's log.",
            stage=stage, task=task, signal=how if status < 0 else "", exit=how, log=log,
        )  # fmt: skip


class SupervisorKilled(ChildDied):
    """A child whose supervisor was killed, or the forkserver above it. The child itself cannot do that."""

    def __init__(self, task: str, stage: str, log: str) -> None:
        super().__init__(task, -signal.SIGKILL, stage, log)


class NodeLost(FarmError):
    """The Ray node of a child stopped answering, or the pool's connection to the cluster was lost."""

    reason = "COMPILE_NODE_LOST"
    kind = Kind.UNAVAILABLE

    def __init__(self, task: str, node: str, why: str, stage: str = "") -> None:
        where = f" in {stage}" if stage else ""
        super().__init__(
            f"The compile node {node or 'of the job'} was lost{where}: {why}",
            "Retry the job; `etfarm serve --check` lists the nodes of the cluster and their state.",
            stage=stage, task=task, node=node, why=why,
        )  # fmt: skip


class ChildOutOfMemory(UserError):
    """A child needed more memory than a job may use."""

    reason = "CHILD_OUT_OF_MEMORY"
    kind = Kind.RESOURCE_EXHAUSTED

    def __init__(self, task: str, memory_bytes: int, stage: str = "", detail: str = "") -> None:
        where = f" in {stage}" if stage else ""
        super().__init__(
            f"The job needs more than the {memory_bytes >> 20} MiB of memory that it may use{where}.",
            "Use a smaller model, or raise the server's limit with `etfarm serve --memory-gib`.",
            stage=stage, task=task, memory_bytes=memory_bytes, detail=detail[:MAX_TEXT],
        )  # fmt: skip


def child_too_many_processes(task: str, processes: int, stage: str = "") -> EtfarmError:
    """Return the error that a child and its processes started more processes or threads than a job may have."""
    where = f" in {stage}" if stage else ""
    return error_for(
        "CHILD_TOO_MANY_PROCESSES",
        f"The job started more than the {processes} processes and threads that it may have{where}.",
        "Lower the server's --threads if the job's own work needs so many.",
        stage=stage, task=task, processes=processes,
    )  # fmt: skip


def child_disk_full(task: str, why: str) -> EtfarmError:
    """Return the error that a child could not write its files; the model is not at fault."""
    return error_for("DISK_FULL", f"The job's files cannot be written: {why}.", "Free disk on the server.", task=task, why=why)


class ChildTimedOut(UserError):
    """A child or one of its stages exceeded its deadline, or the child used up its CPU time.

    Args:
        clock: the clock that ran out: `wall`, `stage`, `CPU`, or `loading` for the CPU time of loading a model.
    """

    reason = "CHILD_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, task: str, deadline_s: float, stage: str = "", clock: str = "wall") -> None:
        where = f" in {stage}" if stage else ""
        what = f"The job was not done after {deadline_s:g} s of {clock} time{where}"
        if clock == "stage":
            what = f"{stage or 'What comes before the first stage'} was not done after {deadline_s:g} s, the limit for a stage"
        remedy = "Use a smaller model, or raise the server's limit: `etfarm serve --help` lists its timeouts."
        if clock == "loading":
            what = (
                f"Loading the model took more CPU time than the {LOADING_S:g} s, and {LOADING_S_PER_GIB:g} s for each GiB of its "
                "file, that it may take"
            )
            remedy = (
                "Export it with fewer dynamic dimensions, or with static shapes: expressions of sizes take the most time. "
                "Split a graph of more than ten thousand nodes into methods."
            )
        super().__init__(
            f"{what}.", remedy,
            stage=stage, task=task, deadline_s=deadline_s, clock=clock,
        )  # fmt: skip


class LoadingTimedOut(ChildTimedOut):
    """Loading a model took more CPU time than a model of its size may take."""

    reason = "MODEL_LOADING_TIMED_OUT"

    def __init__(self, task: str, stage: str = "") -> None:
        super().__init__(task, LOADING_S, stage, clock="loading")


class ParsingTimedOut(DeviceError):
    """Parsing a trace took more CPU time than one of its size may take."""

    reason = "TRACE_PARSING_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, task: str, stage: str = "") -> None:
        super().__init__(
            f"Parsing the trace, with the ETRecord and the program that it is joined with, took more CPU time than the "
            f"{PARSING_S:g} s, and {PARSING_S_PER_GIB:g} s for each GiB of these files, that it may take.",
            "Update the agent of the device, which wrote the trace.",
            stage=stage, task=task,
        )  # fmt: skip


class BadAnswer(FarmError):
    """A child sent a message that the pool cannot read."""

    reason = "CHILD_ANSWER_UNREADABLE"


class BadWorkerAnswer(FarmError):
    """The answer of a child, or a file that it names, is not one that its task can have."""

    reason = "BAD_WORKER_ANSWER"


def signal_name(number: int) -> str:
    """Return a signal's name: `SIGSEGV` for 11, `signal 77` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the memory budget is used up; torch raises a RuntimeError with a text for it."""
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in _OUT_OF_MEMORY)


def is_out_of_processes(error: BaseException) -> bool:
    """Return whether an exception means that no further process or thread could be started."""
    return isinstance(error, BlockingIOError) or "can't start new thread" in str(error)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an exception means that a file could not be written for lack of space."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def to_json(error: EtfarmError, *, hide: Mapping[str, str] | None = None) -> bytes:
    """Return an error as JSON with `fault`, `reason`, `kind`, `message`, `remedy`, `stage` and `metadata`.

    Args:
        hide: texts that must not leave the host (paths of temporary folders) with their replacements.
    """

    def clean(text: str) -> str:
        for secret, stand_in in (hide or {}).items():
            text = text.replace(secret, stand_in)
        return text[:MAX_TEXT]

    return json.dumps(
        {
            "fault": error.fault.value,
            "reason": error.reason,
            "kind": error.kind.value,
            "message": clean(error.message),
            "remedy": clean(error.remedy),
            "stage": error.stage,
            "metadata": {key: clean(value) for key, value in error.metadata.items()},
        }
    ).encode()


def from_json(data: bytes) -> EtfarmError:
    """Return the error that `to_json` wrote; for unreadable bytes, return a `BadAnswer`."""
    try:
        message = json.loads(data)
        entries = [(str(k)[:100], str(v)[:MAX_TEXT]) for k, v in message["metadata"].items()]
        metadata = dict([(key, value) for key, value in entries if key not in _RESERVED][:MAX_METADATA])
        error = error_of(
            Fault(message["fault"]), str(message["reason"])[:100], str(message["message"])[:MAX_TEXT],
            str(message["remedy"])[:MAX_TEXT], kind=Kind(message["kind"]), stage=str(message["stage"])[:100],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return BadAnswer("A child's error could not be read.", "This is a defect of etfarm or of the model's bytes.")
    error.metadata.update(metadata)
    return error


_RESERVED = frozenset({"message", "remedy", "stage"})
