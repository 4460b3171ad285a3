"""The preparation of a run on its target: the program, its data files and a runner are fetched."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.errors import runner_does_not_work
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.targets.base import NO_DEADLINE_S, Provisions, Target
from etfarm.v1 import agent_pb2
from etfarm.wire import digest
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import DeviceError, EtfarmError, error_for


def attempt_limit_s(start: agent_pb2.StartRun) -> float:
    """Return how long an attempt may take from its receipt, in seconds."""
    return start.deadline_s if start.deadline_s > 0 else NO_DEADLINE_S


async def fetch_program(
    candidate: agent_pb2.RunCandidate, target: Target, scratch: Path, lease: Lease, on_progress: Progressed
) -> Provisions:
    """Fetch a candidate's files from the cache or the server, verify them, and transfer them to the target.

    A runner that is new to the target passes its self-test there first. Without a bundle the target's own runner is used.

    Args:
        candidate: the program and the runner's bundle.
        target: where the program runs.
        scratch: a folder on this disk, for the self-test.
        lease: keeps the files in the cache.
        on_progress: takes the transferred bytes and the total.

    Raises:
        DIGEST_MISMATCH, NO_RUNNER, DEVICE_BUNDLE_UNUSABLE, DEVICE_RUNNER_UNUSABLE: the server sent something that cannot be run.
        As `Lease.fetch` and `Target.install`.
    """
    program, arch = candidate.program, target.device.arch
    manifest = digest.of_program(program.pte.digest, {name: data.digest for name, data in program.data.items()})
    if manifest != program.digest:
        raise error_for(
            "DIGEST_MISMATCH",
            f"The program {program.digest[:12]} arrived with the files of {manifest[:12]}.",
            digest=program.digest,
            manifest=manifest,
        )
    bundle: Bundle | None = None
    if candidate.HasField("bundle") and not target.own_first:
        bundle = await lease.open_bundle(candidate.bundle.artifact, on_progress)
        if bundle.manifest.arch != arch:
            raise error_for(
                "NO_RUNNER",
                f"The runner that arrived is for {bundle.manifest.arch}, but this device is {arch}.",
                bundle_arch=bundle.manifest.arch,
                arch=arch,
            )
    elif not target.has_own_runner:
        raise error_for(
            "NO_RUNNER", f"The farm has no runner for {arch}.", "Add one with `etfarm bundle build` and `bundle add`.", arch=arch
        )
    pte = await lease.fetch(program.pte, on_progress)
    data = [await lease.fetch(artifact, on_progress) for _, artifact in sorted(program.data.items())]
    provisions = Provisions(pte, data, bundle)
    await target.install(provisions, on_progress)
    if bundle is not None and (sent := candidate.bundle.artifact.digest) not in target.tried:
        await try_out(bundle, sent, target, scratch)
        target.tried.add(sent)
    return provisions


async def try_out(bundle: Bundle, sent: str, target: Target, scratch: Path) -> tuple[str, ...]:
    """Run the runner's own self-test, without any program, and return the kernels and backends that passed it.

    Args:
        bundle: the runner's bundle, which is on the target already.
        sent: the bundle's digest.
        target: where the runner runs.
        scratch: a folder on this disk.

    Raises:
        DEVICE_RUNNER_UNUSABLE: the runner does not start there, or computes wrongly.
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
        raise runner_does_not_work(sent, bundle.manifest.arch, error.message) from error
    except TimeoutError:
        why = f"it does not answer within {target.self_test_s:g} s"
        raise runner_does_not_work(sent, bundle.manifest.arch, why) from None
