"""The matrix of a job's cells: candidates by methods, devices and thread counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etfarm.server.jobs.cells import groups
from etfarm.server.jobs.model import BadJob
from etfarm.v1 import job_pb2
from etfarm.wire.errors import EtfarmError, error_for

MAX_CELLS = 1000
"""Maximum number of cells of a job; a larger matrix is better submitted as several jobs."""


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
