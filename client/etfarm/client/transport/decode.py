"""Conversion of the contract's messages to the library's values; the only place that uses both.

A value's attribute is the message's field of the same name, or that which its metadata names.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from etfarm.client import models
from etfarm.client.transport.timestamps import from_timestamp
from etfarm.v1 import common_pb2, device_pb2, job_pb2
from etfarm.wire import status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.words import word_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", bound="DataclassInstance")
Convert = Callable[[Any], Any]

_UNKNOWN: Final[dict[type[StrEnum], StrEnum]] = {
    models.JobState: models.JobState.QUEUED,
    models.CellState: models.CellState("UNSPECIFIED"),
    models.DeviceState: models.DeviceState.OFFLINE,
    models.HealthState: models.HealthState.UNKNOWN,
}
"""What an enum has for UNSPECIFIED and for a value that this version does not know."""


def decoded(kind: type[Value], message: Message, **others: Any) -> Value:
    """Return the value of a class for a message; `others` are the attributes that the message does not have."""
    readers = _readers(kind, message.DESCRIPTOR, tuple(others))
    return kind(**{name: read(message) for name, read in readers}, **others)


def job_state(number: job_pb2.JobState.ValueType) -> models.JobState:
    """Return a JobState; QUEUED if it is unspecified."""
    return models.JobState(word_of(job_pb2.JobState.DESCRIPTOR, number) or models.JobState.QUEUED)


def event(message: job_pb2.JobEvent) -> models.Event | None:
    """Return a JobEvent; None for a kind that this version does not know."""
    match message.WhichOneof("event"):
        case "job":
            return decoded(models.JobChanged, message)
        case "cell":
            return decoded(models.CellChanged, message)
        case "progress":
            return decoded(models.Progress, message.progress, at=from_timestamp(message.time))
        case "log":
            return decoded(models.LogLine, message.log)
    return None


def _readings(message: device_pb2.DeviceTelemetry) -> dict[str, float | bool]:
    return {field.name: value for field, value in message.ListFields() if field.name != "time"}


def _actor(progress: job_pb2.Progress) -> str:
    return progress.device_name or word_of(common_pb2.Actor.DESCRIPTOR, progress.actor) or ""


def _runner_kinds(device: device_pb2.Device) -> tuple[str, ...]:
    return tuple(word_of(common_pb2.RunnerKind.DESCRIPTOR, runner.kind) or "" for runner in device.own_runners)


def _reserved_devices(reservation: device_pb2.Reservation) -> tuple[str, ...]:
    return tuple(reservation.device_ids) or ((reservation.device_id,) if reservation.device_id else ())


_COMPUTED: Final[dict[type, dict[str, Convert]]] = {
    models.Cell: {
        "device": lambda cell: cell.attempts[-1].device_id if cell.attempts else None,
        "attempts": lambda cell: len(cell.attempts),
        "on_device": lambda cell: cell.HasField("device_index"),
        "started_at": lambda cell: from_timestamp(cell.attempts[-1].start_time) if cell.attempts else None,
    },
    models.Device: {
        "concurrent_runs": lambda device: max(1, device.concurrent_runs),
        "own_runners": _runner_kinds,
        "telemetry": lambda device: _readings(device.telemetry),
    },
    models.JobChanged: {"at": lambda event: from_timestamp(event.time)},
    models.CellChanged: {"at": lambda event: from_timestamp(event.time)},
    models.Progress: {"actor": _actor},
    models.ReservationInfo: {"device_ids": _reserved_devices},
    models.ServerInfo: {"role": lambda server: word_of(common_pb2.Role.DESCRIPTOR, server.principal.role) or "UNSPECIFIED"},
    models.Telemetry: {"at": lambda telemetry: from_timestamp(telemetry.time), "values": _readings},
}
"""Attributes that are computed from the message."""


@cache
def _readers(kind: type[DataclassInstance], message: Descriptor, others: tuple[str, ...]) -> tuple[tuple[str, Convert], ...]:
    """Return the attributes of a class with the functions that read them from a message."""
    hints, computed = typing.get_type_hints(kind), _COMPUTED.get(kind, {})
    return tuple(
        (each.name, computed.get(each.name) or _reader(each.metadata.get("field", each.name), hints[each.name], message))
        for each in fields(kind)
        if each.name not in others and hints[each.name] is not types.NoneType
    )


def _reader(path: str, hint: Any, message: Descriptor) -> Convert:
    """Return the function that reads a value of a type from a field, or from a field of a nested message."""
    name, _, rest = path.partition(".")
    field = message.fields_by_name[name]
    inner = field.message_type
    is_optional = types.NoneType in typing.get_args(hint)
    only = next(part for part in typing.get_args(hint) if part is not types.NoneType) if is_optional else hint
    convert = _reader(rest, hint, inner) if rest and inner is not None else _conversion(only, field)
    if is_optional and only is str:
        return lambda message: convert(getattr(message, name)) or None
    if is_optional and field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _conversion(hint: Any, field: FieldDescriptor) -> Convert:
    """Return the function that converts a field's value to a type; an optional text is empty where it is None."""
    if typing.get_origin(hint) is tuple:
        convert = _conversion(typing.get_args(hint)[0], field)
        return tuple if convert is _same else lambda values: tuple(map(convert, values))
    if typing.get_origin(hint) in (Mapping, dict):
        return dict
    if field.enum_type is not None:
        word = partial(word_of, field.enum_type)
        return (lambda number: word(number) or "") if hint is str else lambda number: hint(word(number) or _UNKNOWN[hint])
    if field.message_type is None:
        return _same
    return _MESSAGES.get(hint) or partial(decoded, hint)


def _same(value: Any) -> Any:
    return value


_MESSAGES: Final[dict[Any, Convert]] = {datetime: from_timestamp, EtfarmError: status.from_proto}
"""How messages become values that are no dataclasses."""
