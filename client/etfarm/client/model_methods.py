"""The methods of the generated values, which inherit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etfarm.client.formats import phases, units
from etfarm.client.reports.enums import CellState


class CellMethods:
    """One candidate on one device choice."""

    if TYPE_CHECKING:
        model: str
        recipe: str | None
        method: str
        threads: int | None
        on_device: bool
        state: CellState
        phase: str
        p50_ns: float | None
        p50_ci95_ns: tuple[float, ...]
        verdict: str | None

    @property
    def is_waiting(self) -> bool:
        """Whether the cell waits: for a device, or for its turn at the server."""
        return self.state in (CellState.QUEUED, CellState.WAITING_FOR_DEVICE) or (
            not self.state.is_terminal and phases.is_wait(self.phase)
        )

    @property
    def traits(self) -> tuple[str, str, str, str]:
        """Model, recipe, method and threads, which distinguish cells; each is empty if it does not apply."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        method = self.method if self.on_device and self.method != "forward" else ""
        return self.model, self.recipe or "", method, threads

    @property
    def label(self) -> str:
        """Label that distinguishes a job's cells: `resnet8 · xnnpack_fp32 · encode · 4 threads`."""
        return " · ".join(filter(None, self.traits))

    @property
    def latency(self) -> str:
        """The measured latency: `p50 1.84 ms [1.82, 1.86] VALID`; empty without one."""
        if self.p50_ns is None:
            return ""
        p50, interval = units.median(self.p50_ns, self.p50_ci95_ns)
        return " ".join(filter(None, ("p50", p50, interval, (self.verdict or "").replace("_", " "))))


class ProgressMethods:
    """The current step of a live cell."""

    if TYPE_CHECKING:
        cell_id: str
        actor: str
        phase: str
        duration_ms: float | None
        done: int | None
        total: int | None
        message: str
        p50_ns: float | None

    def __str__(self) -> str:
        took = f" {self.duration_ms:.0f} ms" if self.duration_ms is not None else ""
        far = f" {100 * self.done / self.total:.0f} %" if self.done is not None and self.total else ""
        detail = f": {self.message}" if self.message else ""
        actor = f" ({self.actor})" if self.actor else ""
        p50 = f", p50 {units.time(self.p50_ns)}" if self.p50_ns is not None else ""
        return f"cell {self.cell_id}: {phases.describe(self.phase)}{took}{far}{actor}{p50}{detail}"


class LogLineMethods:
    """A line that a compiler or runner printed."""

    if TYPE_CHECKING:
        source: str
        text: str

    def __str__(self) -> str:
        return f"{self.source.lower()}: {self.text}"
