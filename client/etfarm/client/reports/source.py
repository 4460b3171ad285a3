"""`SourceLine`, a line of the user's model."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.json_object import JsonObject


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SourceLine(JsonObject):
    """A line of the user's model that an operator comes from.

    It is the innermost frame outside of torch, torchao and executorch.
    """

    file: str
    line: int = 0
    """The number of the line, from 1."""
    code: str = ""
    """The line's text."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"
