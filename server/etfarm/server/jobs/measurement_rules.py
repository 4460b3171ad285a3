"""Validation of what a job asks to be measured."""

from __future__ import annotations

from etfarm.server.jobs import generation
from etfarm.server.jobs.model import BadJob
from etfarm.v1 import job_pb2
from etfarm.wire.measurement import RANGES

_MAX_REQUESTED = 10_000_000
"""Maximum number of timed iterations of all runs."""


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
        least = {"warmup": 0, "iterations": 1, "min_time_s": 0, "max_time_s": 0, "max_samples": 1}.get(field.name)
        if least is not None and not least <= value <= _MAX_REQUESTED:
            raise BadJob(
                f"`{field.name}` must be {least} to 10,000,000, got {value:g}.",
                "Choose a value in this range, or leave it out.",
                field=field.name,
            )
    if measurement.HasField("repeat"):
        _check_repeat(measurement)
    if measurement.HasField("trace_iterations"):
        _require_within("trace_iterations", measurement.trace_iterations)
    generation.check_request(spec)
    repeat = max(1, measurement.repeat)
    most = measurement.max_samples if measurement.HasField("max_samples") else RANGES["iterations"].max // repeat
    if measurement.iterations > most:
        what = f"`iterations` must be at most {most:,}, the samples that a timed pass keeps, got {measurement.iterations:,}."
        raise BadJob(what, "Choose a lower number, or leave it out.", field="iterations")


def _require_within(field: str, value: int) -> None:
    least, most = RANGES[field]
    if not least <= value <= most:
        raise BadJob(
            f"`{field}` must be {least} to {most:,}, got {value}.", "Choose a value in this range, or leave it out.", field=field
        )


def _check_repeat(measurement: job_pb2.Measurement) -> None:
    repeat = measurement.repeat
    _require_within("repeat", repeat)
    if repeat > 1 and measurement.interleave:
        raise BadJob(
            "`repeat` cannot be combined with `interleave`, which starts each program several times itself.",
            "Leave one of them out.", field="repeat",
        )  # fmt: skip
    if repeat * measurement.max_samples > _MAX_REQUESTED:
        raise BadJob(
            f"`max_samples` must be at most {_MAX_REQUESTED // repeat:,} with {repeat} runs, got {measurement.max_samples:,}.",
            "Choose a lower number, or leave it out.", field="max_samples",
        )  # fmt: skip
