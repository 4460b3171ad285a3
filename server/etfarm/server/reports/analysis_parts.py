"""The parts of an analysis: the files that each needs, and what a report lacks without it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from etfarm.server.reports.request import CUT_SHORT, AnalyzeRequest
from etfarm.v1 import compile_pb2

FILE_MISSING: Final = "ANALYSIS_FILE_MISSING"
"""Warning code of parts that were left out because a file is no longer stored."""


@dataclass(frozen=True)
class _Part:
    """A part of an analysis."""

    what: str
    """Its name in warnings."""
    stage: str
    """The child's stage that computes it."""
    needs: tuple[str, ...]
    """Fields of the request. The part is left out if the first is None, or if a file that one of them names is missing."""
    gives_up: tuple[str, ...]
    """Fields to leave out after a child failed in this stage, one more each time."""


_PARTS: Final = (
    _Part("check of the inputs", "INPUTS", ("inputs",), ("inputs",)),
    _Part("latency", "STATISTICS", ("samples",), ()),
    _Part("comparison of the interleaved programs", "COMPARISON", ("base_samples", "samples"), ("base_samples",)),
    _Part("accuracy", "ACCURACY", ("model", "inputs", "outputs"), ("further", "model")),
    _Part(
        "accuracy against the quantized program",
        "QUANTIZED_ACCURACY",
        ("quantized", "inputs", "outputs"),
        ("further", "quantized"),
    ),
    _Part("accuracy over several samples", "ACCURACY", ("further",), ()),
    _Part("comparison of calls", "CALLS", ("calls",), ("calls",)),
    _Part("profile by operator", "JOIN", ("etdump", "etrecord", "pte"), ("etrecord", "etdump")),
    _Part("generation", "GENERATION", ("generation",), ()),
    _Part("profile of prefill by operator", "PREFILL_JOIN", ("prefill", "etrecord", "pte"), ("prefill",)),
    _Part("profile of encoders by operator", "ENCODER_JOIN", ("encoders", "etrecord", "pte"), ("encoders",)),
    _Part("perplexity", "PERPLEXITY", ("scores",), ("scores",)),
    _Part("accuracy of generation", "EAGER_TEXT", ("scores", "model"), ("model", "scores")),
    _Part(
        "accuracy of generation against the quantized program", "QUANTIZED_TEXT", ("scores", "quantized"), ("quantized", "scores")
    ),
    _Part("accuracy of generation against the server", "HOST_TEXT", ("scores", "pte"), ("scores",)),
    _Part("numeric gap", "NUMERICS", ("numerics", "inputs"), ("numerics",)),
)


_TRACES: Final = {"JOIN": "etdump", "PREFILL_JOIN": "prefill", "ENCODER_JOIN": "encoders"}
"""The field with the traced pass that a stage joins."""


LOST_WITHOUT: Final = {
    "inputs": "the accuracy of the outputs",
    "base_samples": "the comparison of the interleaved programs",
    "model": "the comparison with the program before quantization",
    "quantized": "the comparison with the quantized program",
    "further": "the accuracy over further samples",
    "calls": "the comparison of calls that keep state",
    "etrecord": "modules and source lines of the operators",
    "etdump": "the profile by operator",
    "prefill": "the profile of prefill by operator",
    "encoders": "the profile of encoders by operator",
    "scores": "the accuracy of generation",
    "numerics": "the numeric gap",
}
"""The missing part of the report, by the field of the request that is left out."""


def drop_missing_files(request: AnalyzeRequest) -> tuple[AnalyzeRequest, list[compile_pb2.Warning]]:
    """Return the request without files that are no longer stored, and a warning for each part that needs them."""
    without: dict[str, Any] = {}
    warnings = []
    for part in _PARTS:
        missing = {name: [path for path in files_of(getattr(request, name)) if not path.exists()] for name in part.needs}
        digests_of = sorted({path.name[:12] for paths in missing.values() for path in paths})
        if not digests_of or getattr(request, part.needs[0]) is None:
            continue
        without |= {name: None for name, paths in missing.items() if paths}
        if part.stage in _TRACES:
            # Without the other files, the rows would have less than those of the previous report.
            without[_TRACES[part.stage]] = None
        message = f"The {part.what} cannot be computed: the farm no longer stores {', '.join(digests_of)}."
        warnings.append(compile_pb2.Warning(code=FILE_MISSING, message=message))
    return replace(request, **without), warnings


def files_of(value: Any) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [path for field in fields(value) for path in files_of(getattr(value, field.name))]
    return [path for item in value for path in files_of(item)] if isinstance(value, tuple) else []


def choose_fields_to_drop(request: AnalyzeRequest, stage: str) -> tuple[str, ...]:
    """Return the fields to leave out of the next child's request; empty if all are already left out."""
    reported = [part for part in _PARTS if part.stage == stage]
    if reported:
        # The stage that a child reports may be wrong: once that part is left out, leave out all others.
        for name in reported[0].gives_up:
            if getattr(request, name) is not None:
                return (name,)
    return tuple(name for part in _PARTS for name in part.gives_up if getattr(request, name) is not None)


def is_incomplete(warning: compile_pb2.Warning) -> bool:
    """Return whether a child says that it did not compute all: another attempt may."""
    return warning.code.endswith("_FAILED") or warning.code == CUT_SHORT


def is_of_analysis(warning: compile_pb2.Warning) -> bool:
    """Return whether a report's warning comes from its analysis."""
    return warning.code.startswith("ANALYSIS_")
