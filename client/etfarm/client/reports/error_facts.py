"""The error of a cell, of a command, or of a part of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etfarm.client.reports.json_object import JsonObject
from etfarm.wire.errors import EtfarmError, Fault, error_of


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ErrorFacts(JsonObject):
    """Why a cell or a command failed."""

    fault: str | None = None
    """USER, DEVICE or FARM: the party that has to act."""
    reason: str = ""
    """UPPER_SNAKE word that programs may rely on."""
    message: str
    """One sentence: what is wrong."""
    remedy: str = ""
    """One sentence: what to do."""
    stage: str = ""
    """The stage or phase that failed, such as `TORCH_EXPORT`; empty without one."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The values of the message, for programs."""

    def exception(self) -> EtfarmError:
        """Return the exception for this error."""
        fault = Fault(self.fault) if self.fault and self.fault in Fault.__members__ else Fault.FARM
        return error_of(fault, self.reason, self.message, self.remedy, stage=self.stage, metadata=dict(self.metadata))
