"""A sink of the phases that passes report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RecordedPhases:
    """The phases of passes in the order in which they ended."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.now = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter_phase(name)
        yield
        self.end_phase(name, 0, 0)

    def enter_phase(self, name: str) -> None:
        self.now = name

    def end_phase(self, name: str, began_s: float, ended_s: float, *, p50_ns: float | None = None) -> None:
        assert began_s <= ended_s
        self.phases.append(name)

    def report_steps(self, done: int, total: int) -> None:
        assert done >= 0 and total >= 0
