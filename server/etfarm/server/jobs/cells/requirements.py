"""Requirements of programs: the inputs of a cell's method, and the devices that can run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.runners import Runner, known_runner
from etfarm.server.devices.scheduling.waiting import own_scope, scopes_of
from etfarm.server.jobs import generation
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import common_pb2, compile_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import selectors, tensors
from etfarm.wire.cores import TooManyThreads, has_cpus, require_cpus
from etfarm.wire.errors import EtfarmError, UserError, error_for


def method_missing(what: str, method: str, known: Iterable[str]) -> EtfarmError:
    """Return the error of a method that the program does not have."""
    remedy = f"It has: {', '.join(sorted(known))}. Choose with --method (methods=)."
    return error_for("METHOD_MISSING", what, remedy, method=method)


class DeviceLacks(UserError):
    """A device whose runner lacks a backend or kernel."""

    reason = "BACKEND_MISSING"

    def __init__(self, message: str, remedy: str, *, reason: str = "", **metadata: str) -> None:
        super().__init__(message, remedy, **metadata)
        self.reason = reason or self.reason


DevicesFor = Callable[[selectors.Selector, str], Sequence[Device]]
"""Function that returns the known devices that a selector matches and a project may use."""


class Requirements:
    """Checks of cells against the requirements of their programs on inputs and devices."""

    def __init__(self, devices: DevicesFor, bundles: Bundles, store: Store, readers: Readers) -> None:
        self._devices = devices
        self._bundles = bundles
        self._store = store
        self._readers = readers

    async def check_inputs(self, run: CellRun) -> None:
        """Determine the cell's method and refuse inputs that do not fit it, before a device receives them.

        Raises:
            METHOD_MISSING: the program has no such method.
            InputMismatch: a count, dtype, shape or dim order is not what the method takes.
            NotALanguageModel, CONTEXT_TOO_SHORT: the job requests generation that the program cannot do.
            GENERATION_NOT_REQUESTED: a language model would be measured on made-up inputs.
        """
        assert run.compilation is not None
        job, cell, methods = run.job, run.cell, run.compilation.facts.methods
        if (plan := run.generation) is not None:
            cell.method = plan.model.decode_method
            for encoder in plan.model.flow.encoders:
                if encoder.HasField("inputs"):
                    await self._check_artifact(encoder.inputs, encoder.method, methods[encoder.method])
            return
        if cell.method not in methods and not job.spec.methods and len(methods) == 1:
            cell.method = next(iter(methods))
        if cell.method not in methods:
            raise method_missing(f"{cell.candidate_name} has no method {cell.method!r}.", cell.method, methods)
        if unknown := sorted(set(job.spec.inputs) - set(methods)):
            what = f"The inputs are for the method {unknown[0]!r}, which {cell.candidate_name} does not have."
            raise method_missing(what, unknown[0], methods)
        inputs = job.spec.inputs.get(cell.method)
        if inputs is not None:
            await self._check_artifact(inputs, cell.method, methods[cell.method])
        elif run.inputs is None and job.spec.HasField("measurement"):
            generation.require_request(cell.candidate_name, cell.method, run.compilation.facts)

    async def _check_artifact(self, inputs: common_pb2.Artifact, method: str, facts: compile_pb2.MethodFacts) -> None:
        await self._store.require_whole([inputs.digest])
        await self._readers.run(_check_file, self._store.path(inputs.digest), method, facts)

    async def find_lost(self, digests: Iterable[str]) -> list[str]:
        """Return the artifacts that the store has lost; see `Store.find_lost`."""
        return await self._store.find_lost(digests)

    def find_unsupported(self, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Return the errors, by cell id, of programs that no matching device can run, as far as runners are known."""
        unsupported: dict[str, EtfarmError] = {}
        for run in cell_runs:
            try:
                selector = selectors.parse(run.cell.selector)
                self.require_cpus(selector, run.cell.threads, run.job.spec.measurement.cores, run.job.project)
                self.find_unfit(selector, run.facts, run.job.project)
            except (DeviceLacks, TooManyThreads) as error:
                unsupported[run.cell.id] = error
        return unsupported

    def require_cpus(self, selector: selectors.Selector, threads: int, cores: str, project: str) -> None:
        """Check that a matching device has a cpu for each thread; passes if no device matches.

        Args:
            selector: the selector of a cell or session.
            threads: number of threads; 0 for the device's default.
            cores: Measurement.cores.
            project: devices that are restricted to other projects are ignored.

        Raises:
            TooManyThreads: each matching device has fewer cpus.
        """
        if threads > 1:
            require_cpus(self._devices(selector, project), threads, cores)

    def find_unfit_for_all(self, selector: selectors.Selector, cell_runs: Sequence[CellRun]) -> frozenset[str]:
        """Return the scopes, as `find_unfit` does, of devices that cannot run the programs of all cells.

        Raises:
            DeviceLacks: no matching device can run all of them.
        """
        project = cell_runs[0].job.project
        unfit = frozenset[str]().union(*(self.find_unfit(selector, run.facts, project) for run in cell_runs))
        if not unfit:
            return unfit  # which spares a look at every device for nearly every cell
        threads, cores = cell_runs[0].cell.threads, cell_runs[0].job.spec.measurement.cores
        matching = [device for device in self._devices(selector, project) if has_cpus(device, threads, cores)]
        if matching and all(not unfit.isdisjoint(scopes_of(device)) for device in matching):
            raise DeviceLacks(
                "No device that matches can run all of the candidates, though each runs somewhere.",
                "Measure them without --interleave, or choose other devices or recipes.",
            )
        return unfit

    def find_unfit(self, selector: selectors.Selector, facts: compile_pb2.MethodFacts, project: str) -> frozenset[str]:
        """Return the scopes of matching devices whose runner, as far as it is known, cannot run a method.

        A scope is an architecture, or a device with its own runner. Devices without a runner are included if another device can
        run the method and no runner is being built for them. Devices that are restricted to other projects are ignored.

        Raises:
            DeviceLacks: no matching device can run the method.
        """
        unsupported: dict[str, DeviceLacks] = {}
        supported: set[str] = set()
        unknown: list[Device] = []
        for device in self._devices(selector, project):
            runner = known_runner(self._bundles, device)
            if runner is None:
                unknown.append(device)
            elif runner.scope not in supported and runner.scope not in unsupported:
                try:
                    require_support(facts, runner, device)
                    supported.add(runner.scope)
                except DeviceLacks as error:
                    unsupported[runner.scope] = error
        if unsupported and not supported and not unknown:
            raise next(iter(unsupported.values()))
        without_runner = {own_scope(device.id) for device in unknown if supported and not self._bundles.is_coming(device.arch)}
        return frozenset(unsupported) | without_runner


def _check_file(path: Path, method: str, facts: compile_pb2.MethodFacts) -> None:
    check_inputs(method, facts, tensors.read_header(path))


def require_support(facts: compile_pb2.MethodFacts, runner: Runner, device: Device) -> None:
    """Raise an error unless a device's runner has the backends and kernels of a method.

    Raises:
        DeviceLacks: a backend (BACKEND_MISSING) or a kernel (OPERATOR_MISSING) is missing.
    """
    missing = sorted(set(facts.backends) - set(runner.backends))
    if missing:
        raise DeviceLacks(
            f"The program needs the backend {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            f"It has {', '.join(sorted(runner.backends)) or 'none'}: compile for one of them.",
            missing=",".join(missing),
            device=device.name,
        )
    missing = sorted(set(facts.operators) - set(runner.operators))
    if missing and runner.operators:
        raise DeviceLacks(
            f"The program needs the kernel {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            "Change the model, or offer a runner that has it with `etfarm bundle add`.",
            missing=",".join(missing),
            device=device.name,
            reason="OPERATOR_MISSING",
        )
