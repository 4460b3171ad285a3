"""Checks of the options that library calls take, and calls whose keywords are the fields of an options object."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import job_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.names import RESERVATION_VARIABLE

ItemT = TypeVar("ItemT", str, int)


def require_at_least(name: str, value: int, least: int) -> None:
    """Check an option that is a number.

    Raises:
        BAD_OPTION: it is less than `least`.
    """
    if value < least:
        raise error_for("BAD_OPTION", f"`{name}` must be at least {least}, got {value}.", option=name, value=value)


OptionT = TypeVar("OptionT")


def one_spelling(singular: str, one: OptionT | None, plural: str, several: OptionT | None, default: OptionT) -> OptionT:
    """Return the value of an option that has a singular and a plural keyword, which take the same values.

    Raises:
        BAD_OPTION: both are set.
    """
    if one is not None and several is not None:
        raise error_for(
            "BAD_OPTION", f"`{singular}` and `{plural}` are the same option, and both are set.", "Set one.", option=singular
        )
    return one if one is not None else several if several is not None else default


def only_device(device: str | Sequence[str] | None, devices: str | Sequence[str] | None) -> str:
    """Return the selector of a call that uses one device; empty for any device.

    Raises:
        BAD_OPTION: both spellings are set, or there are several selectors.
    """
    selectors = to_list(one_spelling("device", device, "devices", devices, ""))
    if len(selectors) > 1:
        raise error_for(
            "BAD_OPTION", f"`device` must be one selector, got {len(selectors)}.", "A session uses one device.", option="device"
        )
    return selectors[0] if selectors else ""


def require_some(name: str, values: Sequence[object], example: str) -> None:
    """Check that a list has items.

    Raises:
        BAD_OPTION: it is empty.
    """
    if not values:
        raise error_for(
            "BAD_OPTION", f"`{name}` is empty.", f"Name at least one, such as {example}, or leave it out.", option=name
        )


def to_list(one_or_more: ItemT | Iterable[ItemT]) -> list[ItemT]:
    """Return the items, or a list with the only text or number."""
    if isinstance(one_or_more, str) or not isinstance(one_or_more, Iterable):
        return [one_or_more]
    return list(one_or_more)


def device_choices(devices: str | Iterable[str], *, all_devices: bool) -> list[job_pb2.DeviceChoice]:
    """Return the device choices of one or several selectors; without a selector, the choice of any device."""
    return [job_pb2.DeviceChoice(selector=selector, all=all_devices) for selector in to_list(devices) or [""]]


def chosen_reservation(reservation: str | None) -> str:
    """Return the id of the reservation to use: the given one, else that of ETFARM_RESERVATION; empty for none."""
    return reservation if reservation is not None else os.environ.get(RESERVATION_VARIABLE, "")


def deadline_stamp(deadline: datetime | timedelta | None) -> Timestamp | None:
    """Return the deadline of a job as a message.

    Args:
        deadline: an aware time, or the time from now on.

    Raises:
        BAD_OPTION: the time has no time zone, or is out of range.
    """
    if deadline is None:
        return None
    try:
        at = datetime.now(UTC) + deadline if isinstance(deadline, timedelta) else deadline
        if at.tzinfo is None:
            raise error_for(
                "BAD_OPTION",
                f"`deadline` must have a time zone, got {at}.",
                "Use `datetime.now().astimezone()` or a `timedelta`.",
                option="deadline",
            )
        stamp = Timestamp()
        stamp.FromDatetime(at)
    except (OverflowError, ValueError):
        raise error_for(
            "BAD_OPTION", f"`deadline` is out of range: {deadline}.", "Give a time within a year.", option="deadline"
        ) from None
    return stamp


FarmT = TypeVar("FarmT")
ModelT = TypeVar("ModelT")
OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def takes_keywords_of(
    options_type: Callable[P, OptionsT],
) -> Callable[[Callable[[FarmT, ModelT, OptionsT], ResultT]], Callable[Concatenate[FarmT, ModelT, P], ResultT]]:
    """Return a decorator that replaces a method's options object by the keywords of `options_type`.

    Type checkers and `help` show the keywords, so that they are written down once, as the fields of a frozen dataclass.
    """

    def decorate(method: Callable[[FarmT, ModelT, OptionsT], ResultT]) -> Callable[Concatenate[FarmT, ModelT, P], ResultT]:
        @functools.wraps(method)
        def call(self: FarmT, model: ModelT, *args: P.args, **kwargs: P.kwargs) -> ResultT:
            try:
                signature.bind(self, model, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{method.__name__}() {error}") from None
            return method(self, model, options_type(*args, **kwargs))

        signature = _signature(method, options_type)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]  # mypy: a Concatenate has no parameter names

    return decorate


def _signature(method: Callable[..., Any], options_type: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `method` with the parameters of `options_type` in place of its last one."""
    signature = inspect.signature(method)
    own = list(signature.parameters.values())[:-1]
    return signature.replace(parameters=[*own, *inspect.signature(options_type).parameters.values()])
