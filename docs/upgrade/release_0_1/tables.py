"""The fields of etfarm 0.1 that the current messages have elsewhere, with another type, or not at all.

A field that is not listed has a counterpart of the same name. If that is an enum and the field was a string, the words of
`etfarm.wire.words` apply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from etfarm.v1 import common_pb2, compile_pb2, report_pb2
from etfarm.wire.messages import to_scalar
from etfarm.wire.words import value_of

RENAMED: Final[Mapping[str, str]] = {"OutputDifference.one": "first", "OutputDifference.other": "second"}
"""The new names of fields that have a new number as well, by "Message.field"."""

LEFT_OUT: Final[Mapping[str, str]] = {
    "Latency.samples_ns": "Report.samples has them",
    "Profile.times_ns": "Report.trace_times has them",
    "OperatorRow.times_ns": "Report.trace_times has them",
}
"""Fields without a counterpart, with the reason. `reports.series_of` returns the values of the series."""

Move = Callable[[Any, Any, Callable[[Any, Any], None]], None]
"""Called with the old message, the new one, and a function that converts one message into another."""


def _compile(old: Any, new: report_pb2.ReportCompile, convert: Callable[[Any, Any], None]) -> None:
    """Fill `stages` and `compilation` of a ReportCompile, which had the compilation's parts itself."""
    for stage in old.stages:
        convert(stage, (new if stage.where == "CLIENT" else new.compilation).stages.add())
    compilation = new.compilation
    if old.HasField("program"):
        _program(old.program, compilation.program)
    for name, data in old.data.items():
        _artifact(data, compilation.program.data[name])
        # The size of the program included its data.
        compilation.program.pte.size_bytes -= data.size_bytes
    if old.HasField("etrecord"):
        _artifact(old.etrecord, compilation.etrecord)
    for name in ("toolchain", "sizes"):
        if old.HasField(name):
            convert(getattr(old, name), getattr(compilation, name))
    for name in ("checks", "modules"):
        for item in getattr(old, name):
            convert(item, getattr(compilation, name).add())
    for name in ("delegation", "stayed_fp32"):
        for key, item in getattr(old, name).items():
            convert(item, getattr(compilation, name)[key])
    for name in ("exported_programs", "stage_files"):
        for key, item in getattr(old, name).items():
            _artifact(item, getattr(compilation, name)[key])
    compilation.stopped_after = old.stopped_after


def _numerics_program(old: Any, new: report_pb2.Numerics, _: Callable[[Any, Any], None]) -> None:
    if old.HasField("program"):
        _program(old.program, new.program)


def _value_spec(old: Any, new: compile_pb2.ValueSpec, _: Callable[[Any, Any], None]) -> None:
    """Fill `kind` and `value` of a ValueSpec, whose value was JSON."""
    kind = {"float": "double"}.get(old.kind, old.kind)
    new.kind = value_of(common_pb2.ValueKind, kind)
    if not old.HasField("value"):
        return
    try:
        value = json.loads(old.value)
    except (ValueError, RecursionError):
        value = old.value
    new.value.CopyFrom(to_scalar(value if isinstance(value, bool | int | float | str | None) else old.value))


def _program(old: Any, new: compile_pb2.Program) -> None:
    """Fill a Program from a ProgramSize: its digest is that of the program, and its size that of all its files."""
    new.digest = old.digest
    new.pte.size_bytes = old.size_bytes


def _artifact(old: Any, new: common_pb2.Artifact) -> None:
    new.digest, new.size_bytes = old.digest, old.size_bytes


_COMPILE: Final = (
    "stages", "program", "etrecord", "delegation", "toolchain", "sizes", "checks", "stayed_fp32", "data", "exported_programs",
    "stopped_after", "stage_files", "modules",
)  # fmt: skip

MOVED: Final[Mapping[tuple[str, tuple[str, ...]], Move]] = {
    ("ReportCompile", _COMPILE): _compile,
    ("Numerics", ("program",)): _numerics_program,
    ("ValueSpec", ("kind", "value")): _value_spec,
}
"""Functions that convert several fields of a message together, by the message and the fields."""
