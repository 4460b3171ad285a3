"""The methods of the generated classes, which inherit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from etfarm.client.reports.json_object import JsonObject
from etfarm.wire.errors import EtfarmError, Fault, error_of

if TYPE_CHECKING:
    import pandas as pd

    from etfarm.client.reports.enums import CellState


class SourceLineMethods(JsonObject):
    """A line of the user's model."""

    if TYPE_CHECKING:
        file: str
        line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class ErrorMethods(JsonObject):
    """The error of a cell, of a command, or of a part of a measurement."""

    if TYPE_CHECKING:
        fault: str | None
        reason: str
        message: str
        remedy: str
        stage: str
        metadata: Mapping[str, str]

    def exception(self) -> EtfarmError:
        """Return the exception for this error."""
        fault = Fault(self.fault) if self.fault and self.fault in Fault.__members__ else Fault.FARM
        return error_of(fault, self.reason, self.message, self.remedy, stage=self.stage, metadata=dict(self.metadata))


class OperatorTable:
    """A sequence of operators."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas DataFrame with a row for each operator.

        The columns are the fields of `Operator`, times in nanoseconds, with the source as `file`, `line` and `code`.
        `op_types`, `debug_handles` and `times_ns` have a list in each row.

        Raises:
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import operators_frame

        return operators_frame([row.to_dict() for row in self])

    def _repr_html_(self) -> str:
        from etfarm.client.formats import notebook

        return notebook.operators([row.to_dict() for row in self])


class ReportMethods(JsonObject):
    """The result of one cell."""

    if TYPE_CHECKING:
        id: str
        state: CellState
        error: Any
        model: Any

    def __repr__(self) -> str:
        name = self.model.name if self.model else None
        return f"Report({self.id!r}, {name!r}, {self.state})"

    @property
    def failure(self) -> EtfarmError | None:
        """`error` as an exception; None if the cell has no error."""
        if self.error is None:
            return None
        failure: EtfarmError = self.error.exception()
        return failure

    def to_pandas(self, table: Literal["operators", "samples", "generation", "tokens"] = "operators") -> pd.DataFrame:
        """Return one table of the report as a pandas DataFrame.

        Each row identifies its report, so that the tables of several reports can be concatenated. `samples` has the columns
        `iteration` and `latency_ns`; `operators` has those of `Operators.to_pandas`; `generation` has a row for each prompt
        length and depth, and `tokens` one for each generated token.

        Raises:
            ValueError: there is no such table.
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import document_frame

        return document_frame({"job": None, "reports": [self.to_dict()]}, table)

    def _repr_html_(self) -> str:
        from etfarm.client.formats import notebook

        return notebook.report(self.to_dict())


class ComparisonMethods(JsonObject):
    """A candidate compared with a base."""

    if TYPE_CHECKING:
        pairs: tuple[Any, ...]
        gate: Any

    def __repr__(self) -> str:
        return f"Comparison({len(self.pairs)} pairs, passed={self.passed})"

    @property
    def passed(self) -> bool:
        """Whether the gate passed; True if no gate was set."""
        return self.gate is None or bool(self.gate.passed)
