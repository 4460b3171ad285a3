"""Validation of a job's candidates: what a program, a model's methods, and the stages that a client has done must be."""

from __future__ import annotations

import math

from etfarm.server.jobs.cells.requirements import method_missing
from etfarm.server.jobs.model import BadJob
from etfarm.v1 import common_pb2, job_pb2
from etfarm.wire import digest, stages
from etfarm.wire.errors import error_for
from etfarm.wire.model_limits import MAX_CALLS, MAX_SOURCE_PATH, MAX_SOURCES

MAX_SAMPLES = 10_000
"""Maximum number of calibration samples of one method: all of ImageNet would calibrate no better, and take a day."""
_METHOD_BYTES = 100
_CLIENT_STAGES = ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT")


def validate_program(candidate: job_pb2.Candidate, spec: job_pb2.JobSpec) -> None:
    """Refuse what a job asks for that only a model has: a recipe, stages to stop after, or a graph.

    Raises:
        BadJob: a compiled program lacks it.
    """
    if candidate.recipe:
        raise BadJob(f"{candidate.name} is a compiled program; recipes are for models.", "Leave --recipe out.")
    if spec.stop_after not in ("", "TO_EXECUTORCH"):
        raise BadJob(f"{candidate.name} is a compiled program; it has no stages to stop after.", "Leave --stop-after out.")
    if spec.measurement.numerics:
        raise BadJob(
            f"{candidate.name} is a compiled program without a graph, so its operators cannot be compared.",
            "Give the .pt2 or the model itself, or leave --numerics out.",
        )  # fmt: skip


def validate_methods(candidate: job_pb2.Candidate, spec: job_pb2.JobSpec) -> None:
    """Validate the names and the calibration of a model's methods, and that the model has those of the job.

    Raises:
        BadJob: a name or the number of calibration samples is not valid.
        METHOD_MISSING: the job names a method that the model lacks.
    """
    model = candidate.model
    for name in (*model.methods, *model.constant_methods):
        # In bytes, since child processes name files after methods.
        if not name.isidentifier() or len(name.encode()) > _METHOD_BYTES:
            remedy = f"Use a Python identifier of at most {_METHOD_BYTES} bytes."
            raise BadJob(f"{name[:200]!r} of {candidate.name} is not a valid method name.", remedy, method=name[:200])
    if both := sorted(set(model.methods) & set(model.constant_methods)):
        raise BadJob(
            f"{both[0]} of {candidate.name} is both a method and a constant method.",
            "Give one of them another name.",
            method=both[0],
        )
    for name, method in model.methods.items():
        if len(method.calibration) > MAX_SAMPLES:
            raise BadJob(
                f"{name} of {candidate.name} has {len(method.calibration)} calibration samples, above {MAX_SAMPLES}.",
                "Give fewer: some hundreds calibrate as well.", method=name, limit=MAX_SAMPLES,
            )  # fmt: skip
    if len(model.sources) > MAX_SOURCES or any(not _is_source(file) for file in model.sources):
        raise BadJob(
            f"{candidate.name} must have at most {MAX_SOURCES} source files, each with a path of 1 to {MAX_SOURCE_PATH} "
            "characters and a SHA-256.",
            "Leave out the others.", limit=MAX_SOURCES,
        )  # fmt: skip
    if len(model.calls) > MAX_CALLS:
        message = f"{candidate.name} has {len(model.calls)} calls, above {MAX_CALLS}."
        raise BadJob(message, "Give fewer calls.", limit=MAX_CALLS)
    for call in model.calls:
        if (name := call.method[:200]) not in model.methods:
            raise method_missing(f"{candidate.name} has no method {name!r}.", name, sorted(model.methods))
    known = sorted({*model.methods, *model.constant_methods})
    for name in (*spec.methods, *sorted(spec.inputs), *sorted(spec.further_inputs)):
        if name not in known:
            raise method_missing(f"{candidate.name} has no method {name!r}.", name, known)


def _is_source(file: common_pb2.SourceFile) -> bool:
    is_shown = 0 < len(file.path) <= MAX_SOURCE_PATH and not any(ord(character) < 0x20 for character in file.path)
    return is_shown and digest.is_digest(file.sha256)


def validate_stages_done(candidate: job_pb2.Candidate) -> list[str]:
    """Validate the stages that the client has done, mark them as done there, and return their names.

    Raises:
        BadJob, BAD_STAGES: a stage is not valid, or its duration.
    """
    done = [stage.stage for stage in candidate.stages_done]
    if not done:
        return done
    stages.check_order(done)
    for stage in candidate.stages_done:
        if stage.stage not in _CLIENT_STAGES:
            raise error_for(
                "BAD_STAGES",
                f"{stage.stage} of {candidate.name} cannot be done by the client.",
                f"Stages of a client: {', '.join(_CLIENT_STAGES)}.", stages=",".join(done), stage_name=stage.stage,
            )  # fmt: skip
        if not 0 <= stage.duration_ms < math.inf:
            raise BadJob(
                f"{stage.stage} of {candidate.name} must have a duration of 0 ms or more, got {stage.duration_ms:g}.",
                "Send its duration.",
            )
        stage.where, stage.cached = common_pb2.ACTOR_CLIENT, False
    if done[-1] != "TORCH_EXPORT":
        raise error_for(
            "BAD_STAGES",
            f"The stages of {candidate.name} that are done end with {done[-1]}, but an exported program was sent.",
            "Send the output of TORCH_EXPORT, and include it in the stages that are done.", stages=",".join(done),
        )  # fmt: skip
    return done
