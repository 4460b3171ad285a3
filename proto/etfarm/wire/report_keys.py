"""The keys of the documents etfarm.report/1: their types, and how each is read from a message.

A message's keys are its fields in the order of the .proto, except where a table below says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import common_pb2, compile_pb2, report_pb2
from etfarm.wire.messages import KEYS, from_scalar
from etfarm.wire.words import word_of

Json = dict[str, Any]


class Type(Enum):
    """The JSON type of a key's non-null values."""

    TEXT = "a text"
    INTEGER = "a whole number"
    NUMBER = "a number"
    TRUTH = "true or false"
    OBJECT = "an object"


class Shape(Enum):
    """Whether a key holds one value, a list of values, or an object of values by name."""

    ONE = 0
    LIST = 1
    MAP = 2


@dataclass(frozen=True)
class Key:
    """One key of an object."""

    name: str
    type: Type
    shape: Shape
    read: Callable[[Any], Any]
    """Returns the key's JSON value of a message."""
    field: FieldDescriptor
    """The field that the values come from, whose comment describes them."""
    message: Descriptor | None = None
    """The message of the values, if they are objects."""
    about: str = ""
    """Describes the key where the comment of `field` does not."""


LEFT_OUT: Final = {
    "etfarm.v1.Report": {"outputs", "samples", "etdump", "trace_times", "numerics_etdump", "numerics_debug", "create_time"},
    "etfarm.v1.Generation": {"token_times", "tokens", "prefill_etdump", "prefill_trace_times"},
    "etfarm.v1.TracedEncoder": {"etdump"},
    "etfarm.v1.GenerationAccuracy": {"values"},
    # Of the compilation, what only the server uses, and the error, which is the cell's.
    "etfarm.v1.ReportCompile": {
        "compilation", "key", "error", "facts", "example_inputs", "located_operators", "shared_buffers", "stateful_methods",
    },
}  # fmt: skip
"""Fields that the JSON omits: mostly references to files in a server's store."""

_RENAMED: Final = {"etfarm.v1.OutputDifference": {"first": "one", "second": "other"}}
"""Keys that are not the names of their fields."""

NULL_WHEN_EMPTY: Final = {
    "etfarm.v1.Report": {"accuracy", "operators", "numeric_gap"},
    "etfarm.v1.ReportModel": {"sources"},
    "etfarm.v1.Memory": {"planned_bytes"},
    "etfarm.v1.Compilation": {"modules"},
    "etfarm.v1.ReportInputs": {"tensors"},
    "etfarm.v1.ComparedPair": {"delegation"},
    "etfarm.v1.Generation": {"prefill_operators"},
    "etfarm.v1.TracedEncoder": {"operators"},
    "etfarm.v1.GenerationPointReport": {"token_ns"},
}
"""Lists and maps of measurements that are null if not measured, as intervals are. Other empty lists are [], other maps {}."""


@cache
def keys_of(message: Descriptor) -> tuple[Key, ...]:
    """Return the keys of a message's object, in order."""
    if message.full_name in _COMPOSED:
        return tuple(_COMPOSED[message.full_name](message))
    left_out = LEFT_OUT.get(message.full_name, set())
    names = {**KEYS.get(message.full_name, {}), **_RENAMED.get(message.full_name, {})}
    own = [_field_key(field, names.get(field.name, "")) for field in message.fields if field.name not in left_out]
    for before, key in _ADDED.get(message.full_name, ()):
        present = [existing.name for existing in own]
        own.insert(present.index(before) if before else len(own), key)
    return tuple(own)


def project(message: Message) -> Json:
    """Return the object of a message, with every key. Lists of series are empty."""
    return {key.name: key.read(message) for key in keys_of(message.DESCRIPTOR)}


def is_interval(field: FieldDescriptor) -> bool:
    """Whether a list holds the lower and the upper bound of an interval, or is empty."""
    return field.is_repeated and "ci95" in field.name


def _field_key(field: FieldDescriptor, name: str = "") -> Key:
    def read(message: Message) -> Any:
        return _read(message, field)

    shape = Shape.LIST if field.is_repeated else Shape.ONE
    values = _map_values(field)
    if values is not None:
        shape = Shape.MAP
    else:
        values = field
    kind = _type_of(values)
    return Key(name or field.name, kind, shape, read, field, values.message_type if kind is Type.OBJECT else None)


def _type_of(field: FieldDescriptor) -> Type:
    if field.message_type is not None:
        return Type.TEXT if field.message_type.full_name == Timestamp.DESCRIPTOR.full_name else Type.OBJECT
    by_type = {
        field.TYPE_BOOL: Type.TRUTH, field.TYPE_DOUBLE: Type.NUMBER, field.TYPE_STRING: Type.TEXT, field.TYPE_ENUM: Type.TEXT,
    }  # fmt: skip
    return by_type.get(field.type, Type.INTEGER)


def _map_values(field: FieldDescriptor) -> FieldDescriptor | None:
    """Return the field of a map's values; None for a field that is no map."""
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return None
    return field.message_type.fields_by_name["value"]


def _read(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        if not value and (is_interval(field) or field.name in NULL_WHEN_EMPTY.get(message.DESCRIPTOR.full_name, ())):
            return None
        if (values := _map_values(field)) is not None:
            return {key: _single(values, value[key]) for key in sorted(value)}
        return [_single(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    # A string field that is not `optional` is empty if absent.
    if value == "" and not field.has_presence:
        return None
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, compile_pb2.Scalar):
        value = from_scalar(value)
    if isinstance(value, Message):
        return project(value)
    if field.enum_type is not None:
        return word_of(field, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_COMPILE_ORDER: Final = (
    "cached", "stages", "program", "etrecord", "delegation", "toolchain", "warnings", "sizes", "checks", "stayed_fp32",
    "selected", "data", "exported_programs", "stopped_after", "stage_files", "modules",
)  # fmt: skip
"""The first keys of REPORT.compile. Further ones follow in the order of the .proto."""


def _compile(message: Descriptor) -> Iterable[Key]:
    """Return the keys of REPORT.compile, which are those of the compilation beside those of the run."""
    compilation = message.fields_by_name["compilation"].message_type
    assert compilation is not None
    own, inner = message.fields_by_name, compilation.fields_by_name

    def of_compilation(key: Key) -> Key:
        return replace(key, read=lambda run: key.read(run.compilation))

    def joined(name: str) -> Key:
        of_run, compiled = _field_key(own[name]), of_compilation(_field_key(inner[name]))
        first, second = (of_run, compiled) if name == "stages" else (compiled, of_run)
        about = "In order; empty for a ready program." if name == "stages" else "Those of the compiler first."
        return replace(of_run, read=lambda run: [*first.read(run), *second.read(run)], about=about)

    artifact = common_pb2.Artifact.DESCRIPTOR
    data = _field_key(compile_pb2.Program.DESCRIPTOR.fields_by_name["data"])
    left_out = LEFT_OUT[message.full_name]
    keys = {name: _field_key(field) for name, field in own.items() if name not in left_out}
    keys |= {name: of_compilation(_field_key(field)) for name, field in inner.items() if name not in left_out}
    keys |= {name: joined(name) for name in own if name in inner}
    program = Key("program", Type.OBJECT, Shape.ONE, program_json, inner["program"], artifact, "The .pte.")
    files = Key("data", Type.OBJECT, Shape.MAP, lambda compiled: data.read(compiled.program), data.field, artifact)
    keys |= {key.name: of_compilation(key) for key in (program, files)}
    return [keys.pop(name) for name in _COMPILE_ORDER] + [*keys.values()]


def program_json(holder: compile_pb2.Compilation | report_pb2.Numerics) -> Json | None:
    """Return the digest of a holder's program, and the size of its .pte and data files; None if it has no program."""
    if not holder.HasField("program"):
        return None
    program = holder.program
    data_bytes = sum(data.size_bytes for data in program.data.values())
    return {"digest": program.digest or None, "size_bytes": program.pte.size_bytes + data_bytes}


def _numerics(message: Descriptor) -> Iterable[Key]:
    artifact = common_pb2.Artifact.DESCRIPTOR
    for field in message.fields:
        if field.name == "program":
            yield Key("program", Type.OBJECT, Shape.ONE, program_json, field, artifact, "The program of the numerics pass.")
        else:
            yield _field_key(field)


_COMPOSED: Final[Mapping[str, Callable[[Descriptor], Iterable[Key]]]] = {
    "etfarm.v1.ReportCompile": _compile,
    "etfarm.v1.Numerics": _numerics,
}
"""Messages whose objects are not their fields."""

_FILES: Final = report_pb2.Report.DESCRIPTOR.fields_by_name


def _series(name: str, file: str, empty: list[int] | None, about: str) -> Key:
    return Key(name, Type.INTEGER, Shape.LIST, lambda _: empty, _FILES[file], about=about)


_ADDED: Final[Mapping[str, tuple[tuple[str, Key], ...]]] = {
    "etfarm.v1.Latency": ((
        "min_ns",
        _series(
            "samples_ns", "samples", [],
            "Latency of each timed iteration in nanoseconds, int64, in the order measured; of the shape (iterations,). Empty if "
            "the farm no longer stores the samples.",
        ),
    ),),
    "etfarm.v1.Profile": ((
        "shown",
        _series(
            "times_ns", "trace_times", None,
            "Time of each traced execution in nanoseconds, in order; of the shape (iterations,).",
        ),
    ),),
    "etfarm.v1.OperatorRow": ((
        "p10_ns",
        _series(
            "times_ns", "trace_times", None,
            "Time of each traced execution in nanoseconds, in order, in whole multiples of `resolution_ns`; of the shape "
            "(iterations,), as `Profile.times_ns`; absent for a row without times.",
        ),
    ),),
}  # fmt: skip
"""Keys without a field, each with the key that follows it: the series, which `etfarm.wire.series` reads from files."""
