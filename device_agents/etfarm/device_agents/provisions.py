"""What a run needs before it begins, on this disk: the program, its data files, and a runner for it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from etfarm.device_agents.cache import Lease
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import NoRunner, ProgramMismatch, RunnerDoesNotWork
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import Limits, OnLog
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.v1 import agent_pb2
from etfarm.wire import digest
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import EtfarmError

ProgressTold = Callable[[agent_pb2.RunProgress], None]
"""Takes what the server is told of an attempt; never blocks."""

DEFAULT_INPUTS_SEED: Final = 0
"""Of the inputs that the runner makes where none came."""
KEPT_LOG_LINES: Final = 200
"""Of a runner, between two messages that carry them; of more, the last ones."""
_NO_DEADLINE_S: Final = 7 * 86_400.0


@dataclass(frozen=True)
class Provisions:
    """A program's files and the runner that it runs in."""

    program: Path
    data: list[Path]
    bundle: Bundle | None
    """None where none came, and ExecuTorch's Python binding is here."""


def limit_s(start: agent_pb2.StartRun) -> float:
    """Of an attempt, from its receipt."""
    return start.deadline_s if start.deadline_s > 0 else _NO_DEADLINE_S


async def fetch_program(
    candidate: agent_pb2.RunCandidate, arch: str, config: AgentConfig, lease: Lease, on_progress: Progressed
) -> Provisions:
    """Everything from the cache or the server, verified; a runner that is used first has passed its self-test.

    Without a bundle it is for ExecuTorch's Python binding, if that is here.

    Raises:
        ProgramMismatch, NoRunner, BundleUnusable, RunnerDoesNotWork: the server sent what cannot be run.
        As `Lease.fetch`.
    """
    program = candidate.program
    manifest = digest.of_program(program.pte.digest, {name: data.digest for name, data in program.data.items()})
    if manifest != program.digest:
        raise ProgramMismatch(
            f"The program {program.digest[:12]} came with the files of {manifest[:12]}.",
            digest=program.digest,
            manifest=manifest,
        )
    bundle: Bundle | None = None
    if candidate.HasField("bundle"):
        bundle = await lease.open_bundle(candidate.bundle.artifact, on_progress)
        if bundle.manifest.arch != arch:
            raise NoRunner(
                f"The runner that came is for {bundle.manifest.arch}, and this device is {arch}.",
                bundle_arch=bundle.manifest.arch,
                arch=arch,
            )
        if (sent := candidate.bundle.artifact.digest) not in lease.tried:
            await try_out(bundle, sent, config)
            lease.tried.add(sent)
    elif config.emulator is not None or not PythonRunner.available():
        raise NoRunner(f"The farm has no runner for {arch}.", "Add one with `etfarm bundle build` and `bundle add`.", arch=arch)
    pte = await lease.fetch(program.pte, on_progress)
    data = [await lease.fetch(artifact, on_progress) for _, artifact in sorted(program.data.items())]
    return Provisions(pte, data, bundle)


async def try_out(bundle: Bundle, sent: str, config: AgentConfig) -> None:
    """The runner's own self-test, without any program.

    Args:
        sent: the bundle's digest.

    Raises:
        RunnerDoesNotWork: it does not start here, or computes wrongly.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="try-", dir=config.data) as folder:
            async with asyncio.timeout(config.self_test_s), start_runner(bundle, Path(folder), config, None) as runner:
                await runner.hello()
                await runner.self_test()
    except EtfarmError as error:
        raise RunnerDoesNotWork(sent, bundle.manifest.arch, error.message) from error
    except TimeoutError:
        why = f"it does not answer within {config.self_test_s:g} s"
        raise RunnerDoesNotWork(sent, bundle.manifest.arch, why) from None


def start_runner(
    bundle: Bundle | None, folder: Path, config: AgentConfig, on_log: OnLog | None
) -> AbstractAsyncContextManager[RemoteRunner]:
    """A fresh runner process in `folder`, under the agent's limits. Deadlines are the caller's."""
    data_bytes, emulator = int(psutil.virtual_memory().available * config.memory_share), config.emulator
    limits = Limits(data_bytes, _NO_DEADLINE_S)
    if bundle is None:
        return PythonRunner.start(folder, limits=limits, on_log=on_log)
    command = bundle.command(() if emulator is None else emulator.within(data_bytes))
    return NativeRunner.start(command, folder, limits=limits, on_log=on_log)
