"""The settings of the runners' jail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_USERS: Final = range(64000, 65000)
"""Of runners, where the agent is root. The server's compile children have others."""


@dataclass(frozen=True)
class JailOptions:
    """How runners are confined."""

    users: range = DEFAULT_USERS
    """Users, and groups of the same numbers, that runners get; used where the agent is root."""
    required: bool = False
    """Start no runner that is not confined."""
    enabled: bool = True
    """False starts runners as the agent's own processes."""
