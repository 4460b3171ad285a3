"""What a job must be to be accepted: checked whole at Submit, so that what cannot work is refused before anything costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from etfarm.server.artifacts.store import ArtifactMissing, Store
from etfarm.server.compile.refusals import RecipeNeedsEagerModule
from etfarm.server.compile.screen import screen_pte, screen_upload
from etfarm.server.devices import schedule
from etfarm.v1 import common_pb2, job_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import digest as digests
from etfarm.wire import recipes, selectors
from etfarm.wire.errors import Kind, UserError

MAX_CELLS = 1000
"""Cells of one job; a larger matrix is better sent as several jobs."""


class BadJob(UserError):
    """The spec contradicts itself or lacks something."""

    reason = "BAD_JOB"


class NoCandidate(BadJob):
    """There is nothing to do."""

    reason = "NO_CANDIDATE"


class TooManyCells(BadJob):
    """The matrix is too large for one job."""

    reason = "TOO_MANY_CELLS"


class NotYet(UserError):
    """A later version does this."""

    reason = "NOT_IMPLEMENTED"
    kind = Kind.UNIMPLEMENTED


class Submission:
    """Checks specs and makes their cells.

    Args:
        check_available: raises for a recipe that this server is known to lack something for.
        new_id: gives ids that nobody has.
    """

    def __init__(
        self,
        store: Store,
        devices: Callable[[], Sequence[Device]],
        check_available: Callable[[str], None],
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._check_available = check_available
        self._devices = devices
        self._new_id = new_id
        self._screened: set[str] = set()

    async def make(self, spec: job_pb2.JobSpec, *, owner: str, at: datetime) -> job_pb2.Job:
        """The job of a spec, all of its cells queued.

        Raises:
            UserError: as JobService.Submit says; the reason names what is wrong.
        """
        if not spec.candidates:
            raise NoCandidate("The job has no candidate.", "Name at least one model.")
        self._refuse_later_work(spec)
        for artifact in _artifacts(spec):
            if not self._store.has(artifact.digest):
                raise ArtifactMissing(
                    f"Artifact {artifact.digest[:12]} is not stored.", "Upload it first.", digest=artifact.digest
                )
            size_bytes = self._store.path(artifact.digest).stat().st_size
            if artifact.size_bytes not in (0, size_bytes):
                raise BadJob(
                    f"Artifact {artifact.digest[:12]} has {size_bytes} bytes, not {artifact.size_bytes}.", "Say its size, or 0."
                )
            artifact.size_bytes = size_bytes
        names = [self._check_recipe(candidate) for candidate in spec.candidates]
        choices = self._choices(spec)
        for candidate in spec.candidates:
            await self._screen(candidate)
        job = job_pb2.Job(id=self._new_id(), name=spec.name, labels=spec.labels, owner=owner, spec=spec)
        job.submitted_at.FromDatetime(at)
        for cell in _cells(spec, names, choices):
            cell.id, cell.job_id, cell.index = self._new_id(), job.id, len(job.cells)
            cell.state, cell.version = job_pb2.CellState.CELL_STATE_QUEUED, 1
            cell.updated_at.FromDatetime(at)
            job.cells.append(cell)
            if len(job.cells) > MAX_CELLS:
                what = f"The job would have more than {MAX_CELLS} cells."
                raise TooManyCells(what, "Send it as several jobs.", limit=MAX_CELLS)
        job.state = job_pb2.JobState.JOB_STATE_QUEUED
        return job

    def _refuse_later_work(self, spec: job_pb2.JobSpec) -> None:
        if spec.stop_after not in ("", "TO_EXECUTORCH"):
            raise NotYet(f"This server cannot stop after {spec.stop_after} yet.", "Leave --stop-after out.")
        if spec.measurement.interleave:
            raise NotYet("This server cannot interleave candidates yet.", "Leave --interleave out.")
        if spec.measurement.numerics:
            raise NotYet("This server cannot compare operators numerically yet.", "Leave --numerics out.")
        if any(count < 1 for count in spec.threads):
            raise BadJob("A thread count is less than 1.", "Give --threads 1 or more.")
        if spec.HasField("timeout_s") and not 0 < spec.timeout_s <= 86_400:
            raise BadJob(f"A timeout of {spec.timeout_s:g} s is none.", "Give one above 0 s and at most a day.")
        measurement = spec.measurement
        for field, value in measurement.ListFields():
            least = {"warmup": 0, "iterations": 1, "min_time_s": 0, "max_time_s": 0, "max_samples": 1}.get(field.name)
            if least is not None and not least <= value <= 10_000_000:
                raise BadJob(f"{field.name} cannot be {value:g}.", f"Give {least} to 10,000,000.", field=field.name)

    def _check_recipe(self, candidate: job_pb2.Candidate) -> str:
        source = candidate.WhichOneof("source")
        if source == "program":
            if candidate.recipe:
                raise BadJob(f"{candidate.name} is a compiled program; recipes are for models.", "Leave --recipe out.")
            return ""
        if source is None or not candidate.model.methods:
            raise NoCandidate(f"The candidate {candidate.name!r} has neither a model nor a program.", "Give one of them.")
        if len(candidate.model.methods) > 1:
            raise NotYet(f"{candidate.name} must have exactly one method.", "Send its methods as several models.")
        recipe = recipes.from_json(candidate.recipe)
        if recipe.json != candidate.recipe:
            raise BadJob(f"The recipe of {candidate.name} is not in canonical form.", f"Send {recipe.json}.")
        done = {stage.stage for stage in candidate.stages_done}
        if recipe.quantization is recipes.Quantization.TORCHAO_SOURCE and "SOURCE_TRANSFORM" not in done:
            raise RecipeNeedsEagerModule(recipe.name, candidate.name)
        self._check_available(recipe.name)
        return recipe.text

    def _choices(self, spec: job_pb2.JobSpec) -> list[tuple[int | None, str]]:
        """(index of the choice, selector of the cell) for each cell on the device axis."""
        if not spec.devices:
            if spec.HasField("measurement"):
                raise BadJob("A measurement needs a device.", "Choose one, or leave the measurement out.")
            return [(None, "")]
        devices = self._devices()
        choices: list[tuple[int | None, str]] = []
        for index, choice in enumerate(spec.devices):
            found = schedule.matching(selectors.parse(choice.selector), choice.selector, devices)
            choices += [(index, f"id={device.id}") for device in found] if choice.all else [(index, choice.selector)]
        return choices

    async def _screen(self, candidate: job_pb2.Candidate) -> None:
        if candidate.WhichOneof("source") == "program":
            program = candidate.program
            data = {name: artifact.digest for name, artifact in program.data.items()}
            program.digest = digests.of_program(program.pte.digest, data)
            await self._once(program.pte.digest, screen_pte)
            return
        for method in candidate.model.methods.values():
            await self._once(method.exported_program.digest, screen_upload)

    async def _once(self, digest: str, screen: Callable[..., None]) -> None:
        if digest not in self._screened:
            await asyncio.to_thread(screen, self._store.path(digest))
            self._screened.add(digest)


def _artifacts(spec: job_pb2.JobSpec) -> Iterator[common_pb2.Artifact]:
    for candidate in spec.candidates:
        if candidate.WhichOneof("source") == "program":
            yield candidate.program.pte
            yield from candidate.program.data.values()
        for method in candidate.model.methods.values():
            yield method.exported_program
            yield from method.calibration
    yield from spec.inputs.values()


def _cells(
    spec: job_pb2.JobSpec, recipe_names: Sequence[str], choices: Sequence[tuple[int | None, str]]
) -> Iterator[job_pb2.Cell]:
    for index, candidate in enumerate(spec.candidates):
        own = next(iter(candidate.model.methods), "forward")
        for device_index, selector in choices:
            for method in spec.methods or [own]:
                for threads in spec.threads or [None]:
                    yield job_pb2.Cell(
                        candidate_index=index, device_index=device_index, selector=selector, method=method, threads=threads,
                        candidate_name=candidate.name, recipe_name=recipe_names[index],
                    )  # fmt: skip
