"""One health run: an attempt with a health program on one device, and what its result says about the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.runners import Runner
from etfarm.server.devices.runs import AttemptLost, Runs
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.plausibility import ImplausibleResult, Plan, artifacts_of, check_attempt, check_candidate
from etfarm.server.jobs.cells.results import AttemptOverdue
from etfarm.server.jobs.health import program
from etfarm.server.jobs.health.program import HealthProgram, StoredProgram
from etfarm.server.reports.verdict import Thresholds, judge
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, job_pb2, report_pb2
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.device_pb2 import Device, HealthRun, HealthRunTrigger
from etfarm.wire import digest as digests
from etfarm.wire import tensors
from etfarm.wire.errors import DeviceError, EtfarmError, Fault, Kind, error_for
from etfarm.wire.shielding import end_tasks
from etfarm.wire.status import from_proto

DEADLINE_S: Final = 180.0
"""Time limit of a health run on the device, most of which it may wait to cool down."""
GRACE_S: Final = 60.0
"""Time after the deadline in which the result may still arrive."""
POLL_S: Final = 0.5
"""Interval at which a health run asks whether somebody wants the device: the most that it delays a user's job."""
_MAX_OUTPUTS_BYTES: Final = 1 << 20
"""Maximum size of an outputs file that is read."""
_VALID: Final = report_pb2.VERDICT_STATUS_VALID

_MEASUREMENT: Final = job_pb2.Measurement(iterations=200, min_time_s=0.3, max_time_s=10.0, max_warmup_s=3.0, no_profile=True)

_INCONCLUSIVE: Final = frozenset(
    {"CANCELLED", "ATTEMPT_TIMED_OUT", "TRANSFER_TIMED_OUT", "DEVICE_BUSY", "DEVICE_UNKNOWN"}
    # The server refused a transfer.
    | {"ARTIFACT_DAMAGED", "ARTIFACT_MISSING", "ARTIFACT_NOT_FOUND", "ARTIFACT_NOT_OF_ATTEMPT", "ATTEMPT_NOT_RESUMED"}
    | {"DISK_FULL", "QUOTA_EXCEEDED", "SERVER_UNREACHABLE"}
)
"""Reasons of an agent's error that say nothing about whether the device computes correctly."""


class HealthRunAborted(DeviceError):
    """A health run that came to no result."""

    reason = "HEALTH_RUN_ABORTED"
    kind = Kind.ABORTED


@dataclass(frozen=True)
class Outcome:
    """The result of a health run."""

    run: HealthRun
    error: EtfarmError | None
    """What is wrong with the device; None if the run passed."""
    series: str = ""
    """What its median depends on; empty if it has no VALID median."""


class HealthRuns:
    """Health runs, each an attempt that already occupies its device."""

    def __init__(
        self,
        attempts: DeviceAttempts,
        runs: Runs,
        store: Store,
        readers: Readers,
        measurement_lock: MeasurementLock,
        thresholds: Thresholds,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._poll_s = poll_s
        self._attempts = attempts
        self._runs = runs
        self._store = store
        self._readers = readers
        self._measurement_lock = measurement_lock
        self._thresholds = thresholds
        self._storing = asyncio.Lock()
        self._stored: dict[str, StoredProgram] = {}

    async def run(
        self,
        device: Device,
        attempt_id: str,
        trigger: HealthRunTrigger.ValueType,
        *,
        is_measured: bool,
        is_wanted: Callable[[], bool],
        wait_s: float,
    ) -> Outcome:
        """Lead one health run to its result. The caller ends the attempt, whatever happens.

        Args:
            is_measured: whether to measure the program, which takes seconds; emulated devices are never measured.
            is_wanted: whether to give the device to somebody else.
            wait_s: maximum time to wait for what the device runs, for its runner, and for the server's own compilations.

        Raises:
            HealthRunAborted: it came to no result; the device may be healthy.
            AttemptLost: the agent or the link was lost meanwhile.
        """
        loop = asyncio.get_running_loop()
        measurement = _MEASUREMENT if is_measured and not device.emulated else None
        async with AsyncExitStack() as quiet:
            needs_quiet = measurement is not None and self._attempts.is_on_this_machine(device.id)
            runner, chosen, stored = await self._begin(device, attempt_id, wait_s, quiet if needs_quiet else None)
            report = HealthRun(trigger=trigger, program=chosen.name, runner=_name_of(runner, device))
            began_s = loop.time()
            try:
                self._attempts.send(_start_run(device, attempt_id, runner, stored, measurement), stored.artifacts)
                answer = await self._result(attempt_id, device, is_wanted)
            except AttemptLost:
                raise
            except AttemptOverdue as error:
                return Outcome(report, error)
            except EtfarmError as error:
                raise HealthRunAborted(error.message, error.remedy, device=device.id) from error
        report.duration_s = loop.time() - began_s
        uploaded = [artifact.digest for candidate in answer.candidates for artifact in artifacts_of(candidate)]
        try:
            return await self._judge(device, answer, attempt_id, measurement, report)
        finally:
            # An agent may name what others have uploaded.
            holder = self._runs.holder_of(attempt_id)
            own = await self._store.holdings.held(uploaded, [holder]) if holder else filter(digests.is_digest, uploaded)
            await self._store.discard(own)

    async def _begin(
        self, device: Device, attempt_id: str, wait_s: float, quiet: AsyncExitStack | None
    ) -> tuple[Runner, HealthProgram, StoredProgram]:
        """Wait until a health run can begin, and return what it runs.

        Args:
            quiet: keeps the server quiet until it is closed; None if it need not be.
        """
        waits = f"{device.name} was busy"
        try:
            async with asyncio.timeout(wait_s):
                await self._runs.wait_alone(attempt_id)
                waits = f"The runner of {device.name} was being built"
                runner = await self._attempts.runner_of(device)
                chosen = program.choose(runner)
                if chosen is None:
                    raise HealthRunAborted(f"The runner of {device.name} cannot run the health program.", device=device.id)
                stored = await self._store_program(chosen)
                if quiet is not None:
                    waits = f"The server, on the same machine as {device.name}, compiled or measured"
                    await quiet.enter_async_context(self._measurement_lock.measure())
                return runner, chosen, stored
        except TimeoutError:
            raise HealthRunAborted(f"{waits} for {wait_s:g} s.", "Try again later.", device=device.id) from None
        except EtfarmError as error:
            raise HealthRunAborted(error.message, error.remedy, device=device.id) from error

    async def _result(self, attempt_id: str, device: Device, is_wanted: Callable[[], bool]) -> agent_pb2.RunResult:
        """Wait for the agent's result, as long as nobody else wants the device."""
        result = asyncio.ensure_future(self._attempts.result(attempt_id))
        try:
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                while not (await asyncio.wait({result}, timeout=self._poll_s))[0]:
                    if is_wanted():
                        raise HealthRunAborted("A job wants the device.", "It is repeated later.", device=device.id)
        except TimeoutError:
            raise AttemptOverdue(device.id, DEADLINE_S + GRACE_S) from None
        finally:
            # The future is the attempt's, so only stop waiting for it.
            await end_tasks(result)
        return result.result()

    async def _judge(
        self,
        device: Device,
        answer: agent_pb2.RunResult,
        attempt_id: str,
        measurement: job_pb2.Measurement | None,
        report: HealthRun,
    ) -> Outcome:
        """Return what an agent's result says about its device."""
        candidate = next((each for each in answer.candidates if each.cell_id == attempt_id), None)
        message = answer.error if answer.HasField("error") else None
        if message is None and candidate is not None and candidate.HasField("error"):
            message = candidate.error
        if message is not None:
            error = from_proto(message)
            if error.reason in _INCONCLUSIVE:
                raise HealthRunAborted(error.message, error.remedy, device=device.id) from error
            # The program is known to be good, so even a crash is the device's fault.
            return Outcome(report, error)
        plan = Plan(frozenset({attempt_id}), self._runs.elapsed_s(attempt_id) or 0.0, measurement)
        try:
            check_attempt(answer, plan)
            if candidate is None:
                raise ImplausibleResult("it lacks the health program")
            own = await self._require_own(candidate, attempt_id)
            await self._readers.run(check_candidate, candidate, plan, own)
            outputs = await self._readers.run(_read_outputs, own(candidate.outputs.digest))
            if (difference := program.describe_difference(outputs)) is not None:
                raise error_for("WRONG_OUTPUTS", f"{difference}.", "Check the device's memory, power supply and clocks.")
        except EtfarmError as error:
            if error.fault is Fault.FARM or error.reason in _INCONCLUSIVE:
                # The server itself could not read the files.
                raise HealthRunAborted(error.message, error.remedy, device=device.id) from error
            return Outcome(report, error)
        report.threads = candidate.threads
        report.load_ns = candidate.load.load_ns + candidate.load.load_method_ns
        if measurement is None:
            return Outcome(report, None)
        doubts = await self._readers.run(_fill_median, report, candidate, own(candidate.samples.digest), device, self._thresholds)
        report.doubts.extend(doubts)
        return Outcome(report, None, "" if doubts else _series(report, candidate, device))

    async def _require_own(self, candidate: agent_pb2.CandidateResult, attempt_id: str) -> Callable[[str], Path]:
        """Return how to find the files of a result, all of which its agent has uploaded.

        Raises:
            ImplausibleResult: it names an artifact that its agent did not upload.
        """
        holder = self._runs.holder_of(attempt_id)
        for artifact in artifacts_of(candidate):
            is_own = digests.is_digest(artifact.digest) and await self._store.has_for_now(artifact.digest)
            if not is_own or (holder and not await self._store.is_held(artifact.digest, (holder,))):
                raise ImplausibleResult(f"it names the artifact {artifact.digest[:12]!r}, which its agent did not upload")
        if not candidate.HasField("outputs"):
            raise ImplausibleResult("it has no outputs")

        await self._store.require_whole(artifact.digest for artifact in artifacts_of(candidate))
        return self._store.path

    async def _store_program(self, chosen: HealthProgram) -> StoredProgram:
        async with self._storing:
            stored = self._stored.get(chosen.name)
            # An artifact that was damaged on the disk is no longer there.
            if stored is None or await self._store.absent(artifact.digest for artifact in stored.artifacts):
                stored = self._stored[chosen.name] = await program.store(chosen, self._store)
            return stored


def _start_run(
    device: Device, attempt_id: str, runner: Runner, stored: StoredProgram, measurement: job_pb2.Measurement | None
) -> agent_pb2.StartRun:
    candidate = agent_pb2.RunCandidate(
        cell_id=attempt_id,
        program=stored.program,
        method=program.METHOD,
        bundle=runner.bundle,
        inputs=stored.inputs,
        threads=program.THREADS,
    )
    return agent_pb2.StartRun(
        attempt_id=attempt_id,
        device_id=device.id,
        candidates=[candidate],
        measurement=measurement,
        deadline_s=DEADLINE_S,
    )


def _name_of(runner: Runner, device: Device) -> str:
    """Return what identifies a runner: a bundle's digest, or the kind and version of one of the device's own."""
    if runner.bundle is not None:
        return runner.bundle.artifact.digest
    own = next((each for each in device.own_runners if each.kind == runner.kind), None)
    kind = RunnerKind.Name(runner.kind).removeprefix("RUNNER_KIND_").lower()
    return f"{kind} {own.executorch if own is not None else ''}".strip()


def _read_outputs(path: Path) -> list[tensors.Value]:
    if (size_bytes := path.stat().st_size) > _MAX_OUTPUTS_BYTES:
        raise error_for("WRONG_OUTPUTS", f"The health program's outputs have {size_bytes:,} bytes.")
    try:
        return tensors.decode(path.read_bytes())
    except tensors.BadTensorFile as error:
        raise error_for("WRONG_OUTPUTS", f"The health program's outputs cannot be read: {error.message}") from None


def _fill_median(
    report: HealthRun, candidate: agent_pb2.CandidateResult, path: Path, device: Device, thresholds: Thresholds
) -> list[str]:
    """Set the median of a run's samples; return the codes of why it is not VALID."""
    # Imported at the first run, and not at every start of a server: they load numpy.
    from etfarm.server.reports.latency import slow_group, statistics

    samples = statistics.read_samples(path)
    summary = statistics.summarize(samples)
    if summary is None:
        return ["TOO_FEW_SAMPLES"]
    report.p50_ns = summary.p50
    latency = report_pb2.Latency(p50_ns=summary.p50, p50_ci95_ns=summary.p50_ci95 or (), drift=summary.drift)
    if (group := slow_group.find(samples, ())) is not None:
        latency.slow_share, latency.slow_ratio = group.share, group.ratio
    clusters = [list(cluster.cpus) for cluster in device.clusters]
    verdict = judge(candidate, latency, emulated=False, thresholds=thresholds, cores=device.cores, clusters=clusters)
    return [] if verdict.status == _VALID else [reason.code for reason in verdict.reasons]


def _series(report: HealthRun, candidate: agent_pb2.CandidateResult, device: Device) -> str:
    """Return what a median depends on besides the device: runs that differ in any of it are not compared."""
    governors = {f"{cluster.part}={cluster.governor}" for cluster in device.clusters}
    settings = {
        f"{setting.name}@{setting.cpus}={setting.wanted if setting.applied else setting.found}"
        for setting in candidate.telemetry.settings
    }
    cores = candidate.runner.cores or candidate.telemetry.affinity
    pte = digests.of_bytes(next(each for each in program.PROGRAMS if each.name == report.program).path.read_bytes())
    return "|".join([pte, report.runner, str(report.threads), cores, *sorted(governors), *sorted(settings)])
