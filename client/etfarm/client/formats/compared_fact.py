"""One fact about both sides of a comparison, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etfarm.client.formats import sentences

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Fact:
    """One fact about both sides."""

    name: str
    base: str
    candidate: str
    change: str
    """`+2.1 %`; empty if nothing changed or a side lacks the fact."""


def number_fact(name: str, values: Json | None, shown: Callable[[Any], str]) -> Iterator[Fact]:
    """Yield the fact of a NUMBER; nothing for None."""
    if values is None:
        return
    change = ""
    if values["change"] and values["ratio"] is not None:
        change = sentences.change(values["ratio"] - 1)
        change = "" if change == "0.0 %" else change
    yield Fact(name, shown(values["base"]), shown(values["candidate"]), change)
