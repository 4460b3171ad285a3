"""Scopes: the projects whose jobs, artifacts, tags and reports a caller sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import ColumnElement, true

DEFAULT_PROJECT: Final = "default"
"""The project of principals without other memberships, and of everything stored before projects existed."""

FARM_HOLDER: Final = "farm"
"""Holder of the server's own artifacts, such as the runner bundles that it builds."""


def agent_holder(principal: str) -> str:
    """Return the holder of the artifacts that an agent's principal uploads. Project names cannot contain its colon."""
    return f"agent:{principal}"


@dataclass(frozen=True)
class Scope:
    """The projects that a caller sees."""

    projects: frozenset[str] | None
    """Names of projects; None for all projects."""
    active: str = field(default="", compare=False)
    """The project that is searched first for `latest` and tags; empty if the call has none."""

    def allows(self, project: str) -> bool:
        """Return whether the caller sees resources of `project`."""
        return self.projects is None or project in self.projects

    def clause(self, column: ColumnElement[str]) -> ColumnElement[bool]:
        """Return the SQL condition that `column`, which has project names, is in the scope."""
        return true() if self.projects is None else column.in_(sorted(self.projects))


EVERYTHING: Final = Scope(None)
"""The scope of admins and of the server itself."""
