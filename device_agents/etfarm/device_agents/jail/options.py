"""The settings of the runners' jail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_USERS: Final = range(64000, 65000)
"""User ids of runners, if the agent is root. They differ from those of the server's compile children."""


@dataclass(frozen=True)
class JailOptions:
    """Settings of the confinement of runners."""

    users: range = DEFAULT_USERS
    """User ids, and equal group ids, of runners; used if the agent is root."""
    required: bool = False
    """Whether to refuse to start runners that cannot be confined."""
    enabled: bool = True
    """Whether to confine runners at all."""
