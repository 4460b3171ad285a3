"""The validation of children's answers, which are messages of etfarm.v1.

A child has loaded a user's files, so its answer may hold anything. Its size, its fields and all their values are validated here;
what the values mean together is validated by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from etfarm.server.workers.errors import BadWorkerAnswer

MAX_BYTES: Final = 16 << 20
"""Maximum size of an answer, if the caller sets no other; 20 places of each of 150 operators take half a MiB per method.
Large data is sent as files."""

MAX_ENTRIES: Final = 2_000_000
"""Maximum total number of submessages, texts, floats and map entries."""

MAX_TEXT: Final = 1 << 20
"""Maximum number of characters of a text: a line of a user's code, or a warning with many names."""

M = TypeVar("M", bound=Message)

_Rule = Callable[[Message, Any], Collection[Message]]
"""Function that raises if a field's value is not allowed, and returns the messages in it. It may clear the field."""


def decode(data: bytes, kind: type[M], fields: Iterable[str], *, most_bytes: int = MAX_BYTES) -> M:
    """Return a child's answer.

    Optional numbers that are not finite are cleared, as in `etfarm.wire.report`, and unknown fields are dropped. Depth needs no
    limit of its own: no message of the contract contains itself.

    Args:
        fields: the fields that the answer may set, such as `latency` (and all in it) or `compile.warnings`.
        most_bytes: maximum size of the answer.

    Raises:
        BadWorkerAnswer: the answer is too large, is no message, sets other fields, or has a value that is not allowed: a text
            with NUL or of more than MAX_TEXT characters, an unknown enum value, a number that is not finite, too many entries.
    """
    if len(data) > most_bytes:
        raise BadWorkerAnswer(f"A child's answer must have at most {most_bytes:,} bytes, got {len(data):,}.")
    try:
        answer = kind.FromString(data)
    except DecodeError as error:
        raise BadWorkerAnswer(f"A child's answer is no {kind.DESCRIPTOR.name}: {str(error)[:200]}.") from None
    answer.DiscardUnknownFields()
    _require_fields(answer, frozenset(fields), "")
    _validate_values(answer)
    return answer


def _require_fields(message: Message, allowed: frozenset[str], prefix: str) -> None:
    for field, value in message.ListFields():
        name = f"{prefix}{field.name}"
        if name in allowed:
            continue
        if not any(other.startswith(f"{name}.") for other in allowed):
            raise BadWorkerAnswer(f"A child's answer must not set `{name}`.")
        _require_fields(value, allowed, f"{name}.")


def _validate_values(answer: Message) -> None:
    waiting, entries = [answer], 0
    while waiting:
        message = waiting.pop()
        rules = _rules(message.DESCRIPTOR)
        for field, value in message.ListFields():
            if field.number in rules:
                entries += len(value) if field.is_repeated else 1
            if entries > MAX_ENTRIES:
                raise BadWorkerAnswer(f"A child's answer must have at most {MAX_ENTRIES:,} entries.")
            if field.number in rules:
                waiting += rules[field.number](message, value)


@cache
def _rules(message: Descriptor) -> dict[int, _Rule]:
    """Return the rules by field number; integers and truth values need none."""
    return {field.number: rule for field in message.fields if (rule := _rule(field)) is not None}


def _rule(field: Any) -> _Rule | None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _rule_of_map(field)
    if field.message_type is not None:
        return (lambda _, values: values) if field.is_repeated else (lambda _, value: (value,))
    validate = _validator(field)
    if validate is None:
        return None
    if field.is_repeated:
        return lambda _, values: _each(validate, values)
    if field.type == field.TYPE_DOUBLE:
        return _rule_of_number(field, validate)
    return lambda _, value: _each(validate, (value,))


def _rule_of_map(field: Any) -> _Rule:
    keys, values = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    validate_key, validate_value = _validator(keys), _validator(values)
    of_messages = values.message_type is not None

    def rule(message: Message, entries: Any) -> Collection[Message]:
        if validate_key is not None:
            _each(validate_key, entries)
        if of_messages:
            return [entries[key] for key in entries]
        return () if validate_value is None else _each(validate_value, entries.values())

    return rule


def _rule_of_number(field: Any, validate: Callable[[Any], None]) -> _Rule:
    is_choice = field.containing_oneof is not None and len(field.containing_oneof.fields) > 1

    def rule(message: Message, value: float) -> Collection[Message]:
        if is_choice or math.isfinite(value):
            return ()  # the value of a Scalar may be any float
        if not field.has_presence:
            validate(value)
        message.ClearField(field.name)
        return ()

    return rule


def _each(validate: Callable[[Any], None], values: Iterable[Any]) -> Collection[Message]:
    for value in values:
        validate(value)
    return ()


def _validator(field: Any) -> Callable[[Any], None] | None:
    """Return a function that raises if a single value is not allowed; None if every value is."""
    name = f"{field.containing_type.name}.{field.name}"

    def validate_text(value: str) -> None:
        if len(value) > MAX_TEXT or "\0" in value:
            what = "NUL" if "\0" in value else f"{len(value):,} characters, above {MAX_TEXT:,}"
            raise BadWorkerAnswer(f"A child's answer has a text with {what} in `{name}`.")

    def validate_number(value: float) -> None:
        if not math.isfinite(value):
            raise BadWorkerAnswer(f"A child's answer must have finite numbers in `{name}`, got {value}.")

    if field.type == field.TYPE_STRING:
        return validate_text
    if field.type == field.TYPE_DOUBLE:
        return validate_number
    if field.enum_type is None:
        return None
    known = frozenset(field.enum_type.values_by_number)

    def validate_enum(value: int) -> None:
        if value not in known:
            raise BadWorkerAnswer(f"A child's answer has an unknown value {value} in `{name}`.")

    return validate_enum
