"""What a run needs before it begins, where it runs: the program, its data files, and a runner for it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.errors import NoRunner, ProgramMismatch, RunnerDoesNotWork
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.targets.base import NO_DEADLINE_S, Provisions, Target
from etfarm.v1 import agent_pb2
from etfarm.wire import digest
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import DeviceError, EtfarmError

ProgressTold = Callable[[agent_pb2.RunProgress], None]
"""Takes what the server is told of an attempt; never blocks."""

DEFAULT_INPUTS_SEED: Final = 0
"""Of the inputs that the runner makes where none came."""
KEPT_LOG_LINES: Final = 200
"""Of a runner, between two messages that carry them; of more, the last ones."""


def limit_s(start: agent_pb2.StartRun) -> float:
    """Of an attempt, from its receipt."""
    return start.deadline_s if start.deadline_s > 0 else NO_DEADLINE_S


async def fetch_program(
    candidate: agent_pb2.RunCandidate, target: Target, scratch: Path, lease: Lease, on_progress: Progressed
) -> Provisions:
    """Everything from the cache or the server, verified, and carried to the target; a runner that is used first has passed its
    self-test there.

    Without a bundle it is for the target's own runner.

    Args:
        scratch: a folder for the self-test.

    Raises:
        ProgramMismatch, NoRunner, BundleUnusable, RunnerDoesNotWork: the server sent what cannot be run.
        As `Lease.fetch` and `Target.install`.
    """
    program, arch = candidate.program, target.device.arch
    manifest = digest.of_program(program.pte.digest, {name: data.digest for name, data in program.data.items()})
    if manifest != program.digest:
        raise ProgramMismatch(
            f"The program {program.digest[:12]} came with the files of {manifest[:12]}.",
            digest=program.digest,
            manifest=manifest,
        )
    bundle: Bundle | None = None
    if candidate.HasField("bundle") and not target.own_first:
        bundle = await lease.open_bundle(candidate.bundle.artifact, on_progress)
        if bundle.manifest.arch != arch:
            raise NoRunner(
                f"The runner that came is for {bundle.manifest.arch}, and this device is {arch}.",
                bundle_arch=bundle.manifest.arch,
                arch=arch,
            )
    elif not target.has_own_runner:
        raise NoRunner(f"The farm has no runner for {arch}.", "Add one with `etfarm bundle build` and `bundle add`.", arch=arch)
    pte = await lease.fetch(program.pte, on_progress)
    data = [await lease.fetch(artifact, on_progress) for _, artifact in sorted(program.data.items())]
    provisions = Provisions(pte, data, bundle)
    await target.install(provisions, on_progress)
    if bundle is not None and (sent := candidate.bundle.artifact.digest) not in target.tried:
        await try_out(bundle, sent, target, scratch)
        target.tried.add(sent)
    return provisions


async def try_out(bundle: Bundle, sent: str, target: Target, scratch: Path) -> tuple[str, ...]:
    """The runner's own self-test, without any program: the kernels and backends that passed it.

    Args:
        bundle: was carried to the target.
        sent: the bundle's digest.
        scratch: a folder of this disk.

    Raises:
        RunnerDoesNotWork: it does not start there, or computes wrongly.
        DeviceError: the target is gone.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="try-", dir=scratch) as folder:
            async with asyncio.timeout(target.self_test_s), target.start_runner(bundle, Path(folder), None) as runner:
                await runner.hello()
                return await runner.self_test()
    except DeviceError:
        raise  # the device is gone
    except EtfarmError as error:
        raise RunnerDoesNotWork(sent, bundle.manifest.arch, error.message) from error
    except TimeoutError:
        why = f"it does not answer within {target.self_test_s:g} s"
        raise RunnerDoesNotWork(sent, bundle.manifest.arch, why) from None
