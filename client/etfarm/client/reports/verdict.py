"""The verdict on whether measured times can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.enums import VerdictStatus
from etfarm.client.reports.json_object import JsonObject


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerdictReason(JsonObject):
    """One reason why a latency cannot be trusted."""

    code: str = ""
    """UPPER_SNAKE word that programs may rely on."""
    message: str = ""
    """One sentence."""
    measured: float | None = None
    """The measured value, in the unit that `message` names; None without a number."""
    threshold: float | None = None
    """The limit of `measured`, in the same unit."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Verdict(JsonObject):
    """Whether the latency can be trusted."""

    status: VerdictStatus | None = None
    reasons: tuple[VerdictReason, ...] = ()
    """Empty for VALID."""
