"""Checks of the options that library calls take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from etfarm.client.errors import UserError

ItemT = TypeVar("ItemT", str, int)


class BadOption(UserError):
    """An option of a library call has a value that is not allowed."""

    reason = "BAD_OPTION"


def require_at_least(name: str, value: int, least: int) -> None:
    """Check an option that is a number.

    Raises:
        BadOption: it is less than `least`.
    """
    if value < least:
        raise BadOption(f"`{name}` must be at least {least}, got {value}.", option=name, value=value)


OptionT = TypeVar("OptionT")


def one_spelling(singular: str, one: OptionT | None, plural: str, several: OptionT | None, default: OptionT) -> OptionT:
    """Return the value of an option that has a singular and a plural keyword, which take the same values.

    Raises:
        BadOption: both are set.
    """
    if one is not None and several is not None:
        raise BadOption(f"`{singular}` and `{plural}` are the same option, and both are set.", "Set one.", option=singular)
    return one if one is not None else several if several is not None else default


def require_some(name: str, values: Sequence[object], example: str) -> None:
    """Check that a list has items.

    Raises:
        BadOption: it is empty.
    """
    if not values:
        raise BadOption(f"`{name}` is empty.", f"Name at least one, such as {example}, or leave it out.", option=name)


def to_list(one_or_more: ItemT | Iterable[ItemT]) -> list[ItemT]:
    """Return the items, or a list with the only text or number."""
    if isinstance(one_or_more, str) or not isinstance(one_or_more, Iterable):
        return [one_or_more]
    return list(one_or_more)
