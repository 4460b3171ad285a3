"""Validation of what a job asks to be measured."""

from __future__ import annotations

from typing import Final

from etfarm.server.jobs import generation
from etfarm.server.jobs.model import BadJob
from etfarm.v1 import job_pb2
from etfarm.wire.measurement import RANGES
from etfarm.wire.options import Range

_MAX_REQUESTED: Final = 10_000_000
"""Maximum number of timed iterations of all runs."""
_RANGES: Final = {
    **RANGES,
    "iterations": Range(1, _MAX_REQUESTED),
    "max_time_s": Range(0, _MAX_REQUESTED),
    "max_samples": Range(1, _MAX_REQUESTED),
}
"""The ranges of numbers; `iterations` is also limited by the samples that are kept."""


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
