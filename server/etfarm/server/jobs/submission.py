"""Validation of submitted jobs: a spec is checked completely at Submit, so invalid jobs are refused at no cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Final

from etfarm.server.artifacts.store import Store, artifact_missing
from etfarm.server.compile.errors import recipe_needs_eager_module
from etfarm.server.compile.parsed_recipes import parse_recipe
from etfarm.server.compile.upload_screening import Screening
from etfarm.server.devices.errors import ReservationEnded, ReservationNotFound
from etfarm.server.devices.reservations import Reservations
from etfarm.server.devices.scheduling.waiting import open_to
from etfarm.server.devices.selection import select_devices
from etfarm.server.jobs import generation
from etfarm.server.jobs.candidates import validate_methods, validate_program, validate_stages_done
from etfarm.server.jobs.cells import groups
from etfarm.server.jobs.cells.limits import check_waiting
from etfarm.server.jobs.cells.requirements import DeviceLacks
from etfarm.server.jobs.model import BadJob as BadJob
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.pacing import Pace
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import common_pb2, job_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import digest as digests
from etfarm.wire import recipes, selectors, stages
from etfarm.wire.cores import CoresUnknown, choose_cpus, require_cpus
from etfarm.wire.errors import EtfarmError, Fault, error_for, error_of
from etfarm.wire.measurement import RANGES
from etfarm.wire.options import Range
from etfarm.wire.recipes import Recipe

_LARGE_SPEC = 64 << 10
_LARGE_AT_ONCE = 1
"""Number of specs above that size, in bytes, that are checked at a time: more would only delay other callers."""

_NAMED_DEVICES = 3
"""Number of devices that the refusal of a recipe names."""
_SMALL_RECIPE = 4096
_LABEL = 100
_LABELS = "Give at most 100 printable characters."
MAX_CELLS = 1000
"""Maximum number of cells of a job; a larger matrix is better submitted as several jobs."""
_MAX_REQUESTED: Final = 10_000_000
"""Maximum number of timed iterations of all runs."""
_RANGES: Final = {
    **RANGES,
    "iterations": Range(1, _MAX_REQUESTED),
    "max_time_s": Range(0, _MAX_REQUESTED),
    "max_samples": Range(1, _MAX_REQUESTED),
}
"""The ranges of numbers; `iterations` is also limited by the samples that are kept."""


class Submission:
    """Validation of job specs, and creation of the jobs with their cells.

    Args:
        check_recipe: returns a recipe completed with what is known of its plug-ins; raises if this server cannot use it.
        new_id: returns a unique id.
        screening: inspects the uploads.
        require_runner: raises if none of the devices that match a selector has a runner.
        known_backends: returns the backends of a device's runner; None if they are unknown.
        reservations: the farm's reservations; None if it has none.
        require_urls: raises if the server would not send notices to one of these addresses.
    """

    def __init__(
        self,
        store: Store,
        devices: Callable[[], Sequence[Device]],
        check_recipe: Callable[[Recipe], Awaitable[Recipe]],
        new_id: Callable[[], str],
        screening: Screening,
        readers: Readers | None = None,
        require_runner: Callable[[Sequence[Device]], None] = lambda _: None,
        known_backends: Callable[[Device], Collection[str] | None] = lambda _: None,
        reservations: Reservations | None = None,
        require_urls: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self._reservations = reservations
        self._require_urls = require_urls
        self._readers = readers or Readers()
        self._store = store
        self._check_recipe = check_recipe
        self._devices = devices
        self._new_id = new_id
        self._screening = screening
        self._require_runner = require_runner
        self._known_backends = known_backends
        self._large = FairSlots(_LARGE_AT_ONCE)

    async def require_quota(self, project: str) -> None:
        """Refuse jobs of a project that has reached its storage limit, since their results would take more.

        Raises:
            QUOTA_EXCEEDED: the limit is reached; the error has the limit and the use.
        """
        await self._store.quotas.require(project)

    async def make(
        self,
        spec: job_pb2.JobSpec,
        *,
        owner: str,
        project: str,
        at: datetime,
        validate_only: bool = False,
        cells: Sequence[job_pb2.Cell] = (),
    ) -> job_pb2.Job:
        """Return the job of a spec with all of its cells queued.

        Args:
            cells: the job's cells if they are only some of the spec's; all of them when empty.
            validate_only: as SubmitJobRequest.validate_only: candidates may lack their sources.
            project: project of the job. Artifacts that it does not hold count as missing, and devices that are restricted to
                others do not exist.

        Raises:
            UserError: the spec is invalid; see JobService.Submit for the reasons.
        """
        if not spec.candidates:
            raise error_for("NO_CANDIDATE", "The job has no candidate.", "Name at least one model.")
        validate_measurement(spec)
        self._require_urls(spec.notify_urls)
        check_waiting(spec, at)
        is_large = spec.ByteSize() > _LARGE_SPEC
        async with self._large.take(owner) if is_large else nullcontext():
            wanted = await self._readers.run(_digests, spec)
            await self._store.require(wanted, project)
            # There may be tens of thousands of calibration samples.
            await self._readers.run(_check_stored, spec, await self._store.sizes(wanted))
            names, pace = [], Pace()
            for candidate in spec.candidates:
                names.append(await self._check_candidate(candidate, spec, source_required=not validate_only))
                await pace.pause()  # with 1,000 small candidates nothing else yields to the event loop
            devices: Sequence[Device] = open_to(project, self._devices()) if spec.devices else ()
            if spec.reservation_id:
                devices = await self._reserved(spec, project, devices, cells)
            choices = await self._readers.run(self._choices, spec, devices)
            if cells:
                await self._readers.run(_require_devices, cells, devices)
            if validate_only:
                # Not of a job that has its exports: it may turn out that a recipe delegates nothing of a model.
                await self._require_backends(spec, devices)
        names_differ = len({candidate.name for candidate in spec.candidates}) > 1
        for candidate in spec.candidates:
            try:
                await self._screen(candidate, project, pace)
            except EtfarmError as error:
                if not names_differ or error.fault is not Fault.USER:
                    raise
                # The error may be another submission's, too, which waits for the same file.
                raise error_of(
                    error.fault, error.reason, f"{candidate.name}: {error.message}", error.remedy, kind=error.kind,
                    stage=error.stage, metadata=error.metadata,
                ) from error  # fmt: skip
        async with self._large.take(owner) if is_large else nullcontext():
            job = job_pb2.Job(id=self._new_id(), owner=owner, project=project)
            job.create_time.FromDatetime(at)
            return await self._readers.run(self._fill, job, spec, cells or build_cells(spec, names, choices))

    async def _reserved(
        self, spec: job_pb2.JobSpec, project: str, devices: Sequence[Device], cells: Sequence[job_pb2.Cell]
    ) -> Sequence[Device]:
        """Return those of the devices that the spec's reservation has. Cells that run again do without one that has ended.

        Raises:
            ReservationNotFound, ReservationEnded, DEVICE_NOT_RESERVED: see JobService.Submit.
        """
        if self._reservations is None:
            raise ReservationNotFound(spec.reservation_id)
        chosen = {choice.selector for choice in spec.devices}
        try:
            return await self._reservations.require_device(spec.reservation_id, project, chosen, devices)
        except (ReservationEnded, ReservationNotFound):
            if not cells:
                raise
            spec.ClearField("reservation_id")
            return devices

    def _fill(self, job: job_pb2.Job, spec: job_pb2.JobSpec, cells: Iterable[job_pb2.Cell]) -> job_pb2.Job:
        """Fill in a job's spec and cells, and return the job."""
        job.name = spec.name
        job.labels.update(spec.labels)
        job.spec.CopyFrom(spec)
        for cell in cells:
            cell.id, cell.job_id, cell.index = self._new_id(), job.id, len(job.cells)
            cell.state, cell.version = common_pb2.CellState.CELL_STATE_QUEUED, 1
            cell.update_time.CopyFrom(job.create_time)
            job.cells.append(cell)
            if len(job.cells) > MAX_CELLS:
                raise too_many_cells()
        require_partners(job)
        job.state = job_pb2.JobState.JOB_STATE_QUEUED
        return job

    async def _check_candidate(self, candidate: job_pb2.Candidate, spec: job_pb2.JobSpec, *, source_required: bool) -> str:
        """Validate a candidate; return its recipe's name for people, empty for a program."""
        source = candidate.WhichOneof("source")
        is_sourceless = source is None and not source_required
        if source == "program" or (is_sourceless and not candidate.recipe):
            validate_program(candidate, spec)
            return ""
        if not is_sourceless:
            if not candidate.model.methods:
                raise error_for(
                    "NO_CANDIDATE", f"The candidate {candidate.name!r} has neither a model nor a program.", "Give one of them."
                )
            validate_methods(candidate, spec)
        recipe = await self._recipe(candidate.recipe)
        if recipe.json != candidate.recipe:
            raise BadJob(f"The recipe of {candidate.name} is not in canonical form.", f"Send {recipe.json}.")
        label = candidate.recipe_label
        if len(label) > _LABEL or not label.isprintable():
            raise BadJob(f"The recipe label of {candidate.name} is not valid: {label[:_LABEL]!r}.", _LABELS)
        recipe = replace(recipe, label=label)
        done = validate_stages_done(candidate)
        if not is_sourceless:
            recipes.check_methods(recipe, sorted(candidate.model.methods))
        recipe = await self._check_recipe(recipe)
        if not is_sourceless and recipe.quantization is recipes.Quantization.TORCHAO_SOURCE and "SOURCE_TRANSFORM" not in done:
            raise recipe_needs_eager_module(recipe.name, candidate.name)
        if spec.stop_after:
            stages.check_stop_after(recipe, spec.stop_after)
        return recipe.text

    async def _recipe(self, text: str) -> Recipe:
        """Return the recipe of a JSON text; large ones are parsed in a thread."""
        return parse_recipe(text) if len(text) < _SMALL_RECIPE else await self._readers.run(parse_recipe, text)

    def _choices(self, spec: job_pb2.JobSpec, devices: Sequence[Device]) -> list[tuple[int | None, str]]:
        """Return (index of the device choice, selector of the cell) for each cell on the device axis."""
        if spec.stop_after not in ("", "TO_EXECUTORCH") and (spec.devices or spec.HasField("measurement")):
            raise BadJob(
                f"A compilation that stops after {spec.stop_after} produces no program, so nothing can run or be measured.",
                "Leave the devices and the measurement out, or do not stop.", stop_after=spec.stop_after,
            )  # fmt: skip
        if not spec.devices:
            if spec.HasField("measurement"):
                raise BadJob("A measurement needs a device.", "Choose one, or leave the measurement out.")
            return [(None, "")]
        choices: list[tuple[int | None, str]] = []
        matching: dict[str, list[Device]] = {}
        most_threads = max(spec.threads, default=0)
        for index, choice in enumerate(spec.devices):
            matches = matching.get(choice.selector)
            if matches is None:
                matches = select_devices(selectors.parse(choice.selector), choice.selector, devices)
                matching[choice.selector] = matches
                _require_cores(spec.measurement.cores, matches)
                # A device with a cpu for each of the most threads has one for each of fewer.
                require_cpus(matches, most_threads, spec.measurement.cores)
                self._require_runner(matches)
            choices += [(index, f"id={device.id}") for device in matches] if choice.all else [(index, choice.selector)]
            if len(choices) > MAX_CELLS:
                raise too_many_cells()
        return choices

    async def _require_backends(self, spec: job_pb2.JobSpec, devices: Sequence[Device]) -> None:
        """Check that for each recipe some device that the job chooses has its backends, as far as they are known.

        Raises:
            DeviceLacks: no device has them, so that no program of the recipe that is delegated would run.
        """
        # In a thread, since there may be thousands of both.
        matching = await self._readers.run(_matching, spec, devices)
        backends = [self._known_backends(device) for device in matching]
        if not backends or None in backends:
            return
        known = {frozenset(each or ()) for each in backends}
        for text in dict.fromkeys(candidate.recipe for candidate in spec.candidates if candidate.recipe):
            recipe = await self._recipe(text)
            needed = {backend for part in recipe.parts if (backend := recipes.runtime_backend(part.name))}
            if not any(needed.issubset(each) for each in known):
                shown = ", ".join(sorted(needed))
                names = ", ".join(device.name for device in matching[:_NAMED_DEVICES])
                raise DeviceLacks(
                    f"The recipe {recipe.text} is for {shown}, which no device of the job has: {names}"
                    f"{' and others' if len(matching) > _NAMED_DEVICES else ''}.",
                    "`etfarm recipes list` shows which recipes run where; `etfarm compile` compiles without a device.",
                    missing=",".join(sorted(needed)),
                )

    async def _screen(self, candidate: job_pb2.Candidate, project: str, pace: Pace) -> None:
        if candidate.WhichOneof("source") == "program":
            program = candidate.program
            data = {name: artifact.digest for name, artifact in program.data.items()}
            program.digest = digests.of_program(program.pte.digest, data)
            await self._store.require_whole([program.pte.digest])
            await self._screening.screen_pte(program.pte.digest)
            return
        for method in candidate.model.methods.values():
            await pace.pause()  # with 10,000 methods whose files are known nothing else yields to the event loop
            references = [method.reference.digest] if method.HasField("reference") else []
            await self._store.require_whole([method.exported_program.digest, *references])
            await self._screening.screen_pt2(method.exported_program.digest, project)
            if method.HasField("reference"):
                await self._screening.screen_pt2(method.reference.digest, project)


def _require_devices(cells: Sequence[job_pb2.Cell], devices: Sequence[Device]) -> None:
    """Check that the cells of an earlier job still have devices, also where its spec has chosen all that matched.

    Raises:
        NO_SUCH_DEVICE: a cell's device is no longer known, or restricted to other projects.
    """
    for selector in sorted({cell.selector for cell in cells if cell.HasField("device_index")}):
        select_devices(selectors.parse(selector), selector, devices)


def _matching(spec: job_pb2.JobSpec, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that a spec's selectors match."""
    chosen = [selectors.parse(text) for text in dict.fromkeys(choice.selector for choice in spec.devices)]
    return [device for device in devices if any(selector.matches(device) for selector in chosen)]


def _require_cores(wanted: str, devices: Sequence[Device]) -> None:
    """Raise the error of the last device if no device has the wanted cores."""
    unknown: CoresUnknown | None = None
    for device in devices:
        try:
            choose_cpus(device, wanted, restricted=False)
        except CoresUnknown as error:
            unknown = error
        else:
            return
    if unknown is not None:
        raise unknown


def _artifacts(spec: job_pb2.JobSpec) -> Iterator[common_pb2.Artifact]:
    for candidate in spec.candidates:
        if candidate.WhichOneof("source") == "program":
            yield candidate.program.pte
            yield from candidate.program.data.values()
        for method in candidate.model.methods.values():
            yield method.exported_program
            yield from method.calibration
            yield from method.samples
            if method.HasField("reference"):
                yield method.reference
        yield from candidate.model.constant_methods.values()
        yield from (call.inputs for call in candidate.model.calls if call.HasField("inputs"))
    yield from spec.inputs.values()
    for further in spec.further_inputs.values():
        yield from further.samples


def _check_stored(spec: job_pb2.JobSpec, stored: Mapping[str, int]) -> None:
    """Set the sizes of all artifacts of a spec, and check those that it states.

    Args:
        stored: sizes of the stored artifacts by digest.
    """
    for artifact in _artifacts(spec):
        size_bytes = stored.get(artifact.digest)
        if size_bytes is None:
            raise artifact_missing(artifact.digest)
        if artifact.size_bytes not in (0, size_bytes):
            raise BadJob(
                f"Artifact {artifact.digest[:12]} has {size_bytes} bytes, not {artifact.size_bytes}.", "Send its size, or 0."
            )
        artifact.size_bytes = size_bytes


def _digests(spec: job_pb2.JobSpec) -> list[str]:
    """Return the distinct digests of a spec; there may be a hundred thousand."""
    return list(dict.fromkeys(artifact.digest for artifact in _artifacts(spec)))


def too_many_cells() -> EtfarmError:
    """Return the error of a matrix that is too large for one job."""
    return error_for(
        "TOO_MANY_CELLS", f"The job would have more than {MAX_CELLS} cells.", "Send it as several jobs.", limit=MAX_CELLS
    )


def require_partners(job: job_pb2.Job) -> None:
    """Raise an error if a job is interleaved and a cell has no other, or too many others, to be interleaved with."""
    if not job.spec.measurement.interleave:
        return
    if len(job.spec.candidates) < 2:
        raise BadJob(
            "Interleaving compares candidates, but the job has only one.",
            "Give a second model or recipe, or leave --interleave out.",
        )
    for cells in groups.together(job, job.cells):
        if len(cells) < 2:
            alone = cells[0]
            raise BadJob(
                f"Only {alone.candidate_name} runs the method {alone.method!r}, so that there is nothing to interleave it with.",
                "Choose methods that all candidates have with --method.", method=alone.method,
            )  # fmt: skip
        if len(cells) > groups.MAX_TOGETHER:
            raise BadJob(
                f"{len(cells)} candidates cannot be interleaved: all are in the device's memory at once.",
                f"Give at most {groups.MAX_TOGETHER}.", limit=groups.MAX_TOGETHER,
            )  # fmt: skip


def build_cells(
    spec: job_pb2.JobSpec, recipe_names: Sequence[str], choices: Sequence[tuple[int | None, str]]
) -> Iterator[job_pb2.Cell]:
    """Yield the cells of a spec without ids.

    Args:
        recipe_names: the name of each candidate's recipe.
        choices: index of the device choice and selector, for each cell on the device axis.
    """
    for index, candidate in enumerate(spec.candidates):
        methods = list(spec.methods) or _own_methods(candidate.model)
        for device_index, selector in choices:
            compiles_only = device_index is None
            # A compilation includes all methods, and has no threads; generation measures its methods as one.
            is_one = compiles_only or spec.measurement.HasField("generation")
            for method in methods[:1] if is_one else methods:
                for threads in [None] if compiles_only else spec.threads or [None]:
                    yield job_pb2.Cell(
                        candidate_index=index, device_index=device_index, selector=selector, method=method, threads=threads,
                        candidate_name=candidate.name, recipe_name=recipe_names[index],
                    )  # fmt: skip


def _own_methods(model: job_pb2.Model) -> list[str]:
    """Return the methods to run if a job names none; those of a ready program are known after its inspection."""
    return ["forward"] if "forward" in model.methods or not model.methods else sorted(model.methods)


def validate_measurement(spec: job_pb2.JobSpec) -> None:
    """Validate the thread counts, the deadline and the numbers of a job's measurement.

    Raises:
        BadJob: a value is out of range.
    """
    if any(count < 1 for count in spec.threads):
        raise BadJob(f"`threads` must be at least 1, got {min(spec.threads)}.", "Give --threads 1 or more.")
    if spec.HasField("timeout_s") and not 0 < spec.timeout_s <= 86_400:
        raise BadJob(
            f"`timeout_s` must be above 0 and at most 86,400 (a day), got {spec.timeout_s:g}.",
            "Give --timeout within this range.",
        )
    measurement = spec.measurement
    for field, value in measurement.ListFields():
        if (within := _RANGES.get(field.name)) is not None and not within.min <= value <= within.max:
            raise BadJob(
                f"`{field.name}` must be {within.min} to {within.max:,}, got {value:g}.",
                "Choose a value in this range, or leave it out.", field=field.name,
            )  # fmt: skip
    if measurement.repeat > 1:
        _check_repeat(measurement)
    generation.check_request(spec)
    repeat = max(1, measurement.repeat)
    most = measurement.max_samples if measurement.HasField("max_samples") else RANGES["iterations"].max // repeat
    if measurement.iterations > most:
        what = f"`iterations` must be at most {most:,}, the samples that a timed pass keeps, got {measurement.iterations:,}."
        raise BadJob(what, "Choose a lower number, or leave it out.", field="iterations")


def _check_repeat(measurement: job_pb2.Measurement) -> None:
    repeat = measurement.repeat
    if measurement.interleave:
        raise BadJob(
            "`repeat` cannot be combined with `interleave`, which starts each program several times itself.",
            "Leave one of them out.", field="repeat",
        )  # fmt: skip
    if repeat * measurement.max_samples > _MAX_REQUESTED:
        raise BadJob(
            f"`max_samples` must be at most {_MAX_REQUESTED // repeat:,} with {repeat} runs, got {measurement.max_samples:,}.",
            "Choose a lower number, or leave it out.", field="max_samples",
        )  # fmt: skip
