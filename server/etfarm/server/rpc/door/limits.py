"""Limits of requests: one table for all messages of the contract, checked by the interceptor before any servicer sees them.

Every string, bytes, repeated and map field has a default limit by its kind, so that new fields are limited, too; LIMITS has
exceptions. Floats must be finite and enum values known. The interceptor calls `admission`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from etfarm.server.state import cut
from etfarm.wire import digest, selectors
from etfarm.wire.errors import UserError
from etfarm.wire.samples import MAX_SAMPLES


class LimitExceeded(UserError):
    """A request that exceeds a limit."""

    reason = "LIMIT_EXCEEDED"

    refused: Message | None = None
    """The decoded message that was refused; None if it was refused before decoding."""

    def __init__(self, message: str, remedy: str = "", *, reason: str = "LIMIT_EXCEEDED", **metadata: Any) -> None:
        super().__init__(message, remedy, **metadata)
        self.reason = reason


@dataclass(frozen=True)
class Limit:
    """The limit of one field: characters of a text, number of bytes, or entries of a list or map."""

    most: int
    reason: str = LimitExceeded.reason
    """Reason of the error; a specific one if the contract names it."""
    remedy: str = ""


TEXT: Final = Limit(1_000)
BYTES: Final = Limit(1 << 20)
ENTRIES: Final = Limit(1_000)
"""Default limits of fields that LIMITS does not name. A map counts as a list of entries, whose key and value are fields."""

_NAME = Limit(256)
_SELECTOR = Limit(selectors.MAX_CHARACTERS, "BAD_SELECTOR", "Select by `id` or a label.")
_LABELS = Limit(64)
_KEY = Limit(100)
_VALUE = Limit(200)
_RANK = Limit(64)
_URL = Limit(2_000, "BAD_WEBHOOK")
_LINE = Limit(64 << 10)
_PHASE = Limit(40)
_VALUES = Limit(10_000)
_SAMPLES = Limit(MAX_SAMPLES, "BAD_JOB", f"Give at most {MAX_SAMPLES}.")
_CELLS = Limit(1_000, "TOO_MANY_CELLS", "Send it as several jobs.")

LIMITS: Final[dict[str, Limit]] = {
    # Jobs.
    "JobSpec.name": _NAME,
    "JobSpec.labels": _LABELS,
    "JobSpec.LabelsEntry.key": _KEY,
    "JobSpec.LabelsEntry.value": _VALUE,
    "JobSpec.candidates": _CELLS,
    "JobSpec.devices": _CELLS,
    "Candidate.name": _NAME,
    "Candidate.recipe": Limit(256 << 10),
    "Candidate.stages_done": Limit(32),
    "Model.name": _NAME,
    "MethodSource.calibration": Limit(10_000, "BAD_JOB", "Give fewer: some hundreds calibrate as well."),
    "MethodSource.samples": _SAMPLES,
    "MethodSource.forgotten_buffers": Limit(64),
    "MethodSource.forgotten_buffers[]": Limit(500),
    "MethodSource.small_sizes": Limit(64),
    "MethodSource.small_sizes[]": Limit(500),
    "MethodSource.differs": Limit(500),
    "FurtherInputs.samples": _SAMPLES,
    "DeviceChoice.selector": _SELECTOR,
    "JobSpec.notify_urls": Limit(5, "BAD_WEBHOOK", "Add a webhook of the farm instead."),
    "JobSpec.notify_urls[]": _URL,
    # Notices.
    "CreateWebhookRequest.url": _URL,
    "CreateWebhookRequest.events": Limit(16, "BAD_WEBHOOK"),
    "ReportGateRequest.gate": Limit(500),
    "ReportGateRequest.failures": Limit(20),
    "ReportGateRequest.failures[]": Limit(500),
    # Sessions. Inline data have a lower limit, and its refusal suggests a remedy.
    "OpenSessionRequest.selector": _SELECTOR,
    "SessionTensors.inline": Limit(4 << 20),
    "SessionMethod.inputs": _VALUES,
    "SessionMethod.outputs": _VALUES,
    "SessionValue.shape": _RANK,
    "SessionValue.dim_order": _RANK,
    "SessionReply.log_line": _LINE,
    # Artifacts. The store takes chunks of 1 MiB.
    "FindMissingArtifactsRequest.digests": Limit(10_000, "DIGEST_MALFORMED", "Ask for 10,000 at a time."),
    "Chunk.data": Limit(2 << 20, "TOO_MANY_BYTES", "Send chunks of at most 1 MiB."),
    # Devices and reports.
    "ListDevicesRequest.selector": _SELECTOR,
    "WatchDevicesRequest.selector": _SELECTOR,
    "ReserveDeviceRequest.selector": _SELECTOR,
    "ReserveDeviceRequest.reason": _VALUE,
    "ReserveDeviceRequest.request_id": _KEY,
    "RenewReservationRequest.reservation_id": _KEY,
    "ReleaseReservationRequest.reservation_id": _KEY,
    "JobSpec.reservation_id": _KEY,
    "OpenSessionRequest.reservation_id": _KEY,
    "ListJobsRequest.model": _NAME,
    "ListHistoryRequest.device": _SELECTOR,
    "LabelDeviceRequest.set": _LABELS,
    "LabelDeviceRequest.remove": _LABELS,
    "DrainDeviceRequest.reason": _VALUE,
    "LabelDeviceRequest.remove[]": _KEY,
    "LabelDeviceRequest.SetEntry.key": _KEY,
    "LabelDeviceRequest.SetEntry.value": _VALUE,
    # Descriptions that agents send of themselves and of their devices.
    "Hello.agent_id": _KEY,
    "EnrollAgentRequest.device_ids": Limit(1_000),
    "EnrollAgentRequest.device_ids[]": _VALUE,
    "Hello.devices": Limit(1_000, remedy="Serve them with several agents."),
    "Hello.active_attempts[]": _KEY,
    "Hello.unacknowledged_attempts": Limit(10_000),
    "Hello.unacknowledged_attempts[]": _KEY,
    "Device.id": _VALUE,
    "Device.name": _VALUE,
    "Device.labels": _LABELS,
    "Device.LabelsEntry.key": _KEY,
    "Device.LabelsEntry.value": _VALUE,
    "Device.features": Limit(500),
    "Device.clusters": Limit(256),
    "Device.own_runners": Limit(16),
    "Cluster.cpus": Limit(4_096),
    "DeviceRunner.operators": Limit(5_000),
    # Reports that agents send of a run.
    "RunProgress.attempt_id": _KEY,
    "RunResult.attempt_id": _KEY,
    "RunProgress.phase": _PHASE,
    "RunProgress.log_lines": Limit(1_000),
    "RunProgress.log_lines[]": _LINE,
    "RunProgress.message": Limit(8 << 10),
    "RunResult.candidates": Limit(64),
    "Phase.phase": _PHASE,
    "CandidateResult.traced_ns": Limit(1_000_000),
    "CandidateResult.blocks": Limit(100_000),
    "SystemReading.cpus": Limit(4_096),
    "Repeatability.differences": _VALUES,
    "OutputDifference.at": _RANK,
    "Error.message": Limit(32 << 10),
    "Error.remedy": Limit(8 << 10),
    "Error.metadata": Limit(100),
    "Error.MetadataEntry.key": _KEY,
    "Error.MetadataEntry.value": Limit(32 << 10),
}  # fmt: skip
"""Limits by field name without the package; `[]` stands for the texts of a list."""


@dataclass(frozen=True)
class Size:
    """Limits of a whole message."""

    most_bytes: int = 256 << 10
    most_entries: int = 20_000
    """Maximum total number of submessages, and of texts in lists."""


SIZES: Final[dict[str, Size]] = {
    # 10,000 calibration samples for each of several recipes and methods.
    "etfarm.v1.SubmitJobRequest": Size(8 << 20, 150_000),
    "etfarm.v1.FindMissingArtifactsRequest": Size(1 << 20),
    "etfarm.v1.UploadArtifactRequest": Size(4 << 20),
    "etfarm.v1.CallSessionRequest": Size(8 << 20),
    # 1,000 devices; or eight interleaved programs, each with its samples.
    "etfarm.v1.AgentMessage": Size(32 << 20, 300_000),
    "etfarm.v1.SessionReply": Size(8 << 20, 50_000),
}
"""Limits by request type; all other types have the default."""


class Check:
    """A check of every field of a message, in slices."""

    def __init__(self, message: Message) -> None:
        self._waiting = [message]
        self._entries = 0
        self._most = SIZES.get(message.DESCRIPTOR.full_name, Size()).most_entries
        self._name = message.DESCRIPTOR.name

    def slices(self, steps: int) -> Iterator[None]:
        """Check all fields, about `steps` of them between two yields.

        Raises:
            LimitExceeded: as `run`.
        """
        while not self.run(steps):
            yield

    def run(self, steps: int) -> bool:
        """Check about `steps` fields; return whether all are checked.

        Raises:
            LimitExceeded: a field exceeds its limit; the message names it.
        """
        while self._waiting and steps > 0:
            message = self._waiting.pop()
            rules = _rules(message.DESCRIPTOR)
            for field, value in message.ListFields():
                steps -= 1
                below = rules[field.number](value)
                if below:
                    self._entries += len(below)
                    self._waiting += below if isinstance(below[0], Message) else ()
            if self._entries > self._most:
                raise exceeded(self._name, Limit(self._most), "entries", self._entries)
        return not self._waiting


def check(message: Message) -> None:
    """Raise an error if a message exceeds a limit.

    Raises:
        LimitExceeded: a field exceeds its limit; the message names it.
    """
    Check(message).run(1 << 62)


def shorten(message: Message) -> None:
    """Shorten every text that exceeds its limit. For agents' reports of programs, which may print anything."""
    for field, value in message.ListFields():
        name = _name(field)
        if cut.is_map(field):
            _shorten_map(field, value)
        elif field.message_type is not None:
            for below in value if field.is_repeated else (value,):
                shorten(below)
        elif field.type == FieldDescriptor.TYPE_STRING:
            most = limit_of(field, item=field.is_repeated).most
            if field.is_repeated:
                value[:] = [cut.shorten(text, most) for text in value]
            elif name.rpartition(".")[2] != "digest":
                setattr(message, field.name, cut.shorten(value, most))


def _shorten_map(field: FieldDescriptor, entries: Any) -> None:
    value_field = _entry_of(field).fields_by_name["value"]
    for key in list(entries):
        if value_field.type == FieldDescriptor.TYPE_STRING:
            entries[key] = cut.shorten(entries[key], limit_of(value_field).most)
        elif value_field.message_type is not None:
            shorten(entries[key])


def limit_of(field: FieldDescriptor, *, item: bool = False) -> Limit:
    """Return the limit of a string, bytes, repeated or map field.

    Args:
        item: return the limit of each text or bytes of a list instead.
    """
    if field.is_repeated and not item:
        return LIMITS.get(_name(field), ENTRIES)
    default = BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXT
    return LIMITS.get(f"{_name(field)}[]" if item else _name(field), default)


def _name(field: FieldDescriptor) -> str:
    full: str = field.full_name
    return full.removeprefix("etfarm.v1.")


def _entry_of(field: FieldDescriptor) -> Descriptor:
    assert field.message_type is not None
    return field.message_type


_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)

Rule = Callable[[Any], list[Any]]
"""Function that raises if a value exceeds a limit, and returns the messages and texts in the value."""


@cache
def _rules(descriptor: Descriptor) -> dict[int, Rule]:
    return {field.number: _rule(field) for field in descriptor.fields}


def _rule(field: FieldDescriptor) -> Rule:
    if field.is_repeated:
        return _rule_of_map(field) if cut.is_map(field) else _rule_of_list(field)
    if field.message_type is not None:
        return lambda value: [value]
    single = _rule_of_scalar(field)

    def rule(value: Any) -> list[Any]:
        single(value)
        return []

    return rule


def _rule_of_list(field: FieldDescriptor) -> Rule:
    limit, name = limit_of(field), _name(field)
    is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    is_checked = is_text or field.enum_type is not None or field.type in _FLOATS
    item = _rule_of_scalar(field) if is_checked else None

    def rule(values: Any) -> list[Any]:
        if len(values) > limit.most:
            raise exceeded(name, limit, "entries", len(values))
        if field.message_type is not None:
            return list(values)
        if item is not None:
            for value in values:
                item(value)
        return list(values) if is_text else []

    return rule


def _rule_of_map(field: FieldDescriptor) -> Rule:
    limit, name = limit_of(field), _name(field)
    key_rule = _rule_of_scalar(_entry_of(field).fields_by_name["key"])
    value_field = _entry_of(field).fields_by_name["value"]
    value_rule = _rule_of_scalar(value_field) if value_field.message_type is None else None

    def rule(entries: Any) -> list[Any]:
        if len(entries) > limit.most:
            raise exceeded(name, limit, "entries", len(entries))
        for key in entries:
            key_rule(key)
        values = list(entries.values())
        if value_rule is not None:
            for value in values:
                value_rule(value)
        return values

    return rule


def _rule_of_scalar(field: FieldDescriptor) -> Callable[[Any], None]:
    name, limit = _name(field), limit_of(field, item=field.is_repeated)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _text_rule(name, limit, "characters" if field.type == FieldDescriptor.TYPE_STRING else "bytes")
    if field.type in _FLOATS:
        return _finite_rule(name)
    if field.enum_type is not None:
        return _enum_rule(name, frozenset(field.enum_type.values_by_number))
    return lambda value: None


def _text_rule(name: str, limit: Limit, unit: str) -> Callable[[Any], None]:
    is_digest = name == "Artifact.digest"

    def rule(value: Any) -> None:
        if len(value) > limit.most:
            raise exceeded(name, limit, unit, len(value))
        if is_digest and not digest.is_digest(value):
            what = f"A digest must be a sha256 in lower-case hex, got {value!r}."
            raise LimitExceeded(what, reason="DIGEST_MALFORMED", field=name)

    return rule


def _finite_rule(name: str) -> Callable[[Any], None]:
    def rule(value: float) -> None:
        if not math.isfinite(value):
            raise LimitExceeded(f"`{name}` must be a finite number, got {value}.", "Leave it out.", field=name, got=value)

    return rule


def _enum_rule(name: str, known: frozenset[int]) -> Callable[[Any], None]:
    def rule(value: int) -> None:
        if value not in known:
            raise LimitExceeded(f"`{name}` has no value {value}.", "Install the same etfarm on both.", field=name, got=value)

    return rule


_ENTRY: Final = re.compile(r"(\w+)\.(\w+)Entry\.(key|value)")
"""A field of a map's entries, which no user knows by this name."""


def exceeded(name: str, limit: Limit, unit: str, got: int) -> LimitExceeded:
    """Return the error for a field or message that exceeds `limit`."""
    entry = _ENTRY.fullmatch(name)
    what = f"`{name}`" if entry is None else f"A {entry[3]} of `{entry[1]}.{re.sub(r'(?<!^)(?=[A-Z])', '_', entry[2]).lower()}`"
    message = f"{what} must have at most {limit.most:,} {unit}, got {got:,}."
    return LimitExceeded(message, limit.remedy or "Send less.", reason=limit.reason, field=name, limit=limit.most, got=got)
