"""A user's metric over a data set: a function of one sample's inputs, outputs and labels.

    def distance(inputs, outputs, index, labels):
        return float(abs(outputs["0"] - labels["wanted"]).mean())

`inputs`, `outputs` and `labels` are dicts of arrays by name (by position as text if the program has no names);
labels are the other arrays in the sample's file. A metric returns a number, or a dict of numbers by name.
A metric is named `file.py:function`, `package.module:function`, or by the name of an entry point in the group
`etfarm.metrics`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.errors import EtfarmError
from etfarm.client.export import usercode
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GROUP: Final = "etfarm.metrics"

Function = Callable[..., Any]
"""Function of (inputs, outputs, index, labels), with these parameter names."""


@dataclass(frozen=True)
class Metric:
    """A loaded metric."""

    name: str
    """Name of its number if it returns one without a name."""
    function: Function = field(repr=False)
    scope: usercode.ModuleScope | None = field(default=None, repr=False)
    """The modules of the user's own file or module, which the function may import when it is called."""

    def __call__(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], index: int, labels: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the metric's numbers for one sample.

        Raises:
            METRIC_FAILED: it raised, or returned something else.
        """
        try:
            with self.scope or nullcontext():
                returned = self.function(inputs=inputs, outputs=outputs, index=index, labels=labels)
        except EtfarmError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise error_for(
                "METRIC_FAILED",
                f"The metric {self.name} failed with {reason}",
                "Labels are the keys of the .npz other than the inputs.",
                metric=self.name,
            ) from error
        named = returned if isinstance(returned, Mapping) else {self.name: returned}
        return {str(name): self._number(name, value) for name, value in named.items()}

    def _number(self, name: object, value: Any) -> float:
        try:
            # This includes numpy and torch values without dims.
            return float(value)
        except (TypeError, ValueError):
            raise error_for(
                "METRIC_FAILED",
                f"The metric {self.name} returned {type(value).__name__} for {name}.",
                "Return a number, or a dict of numbers by name.",
                metric=self.name,
            ) from None


@dataclass
class Mean:
    """The running mean of a metric's numbers."""

    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.total += value

    @property
    def value(self) -> float:
        """The mean; nan without numbers."""
        return self.total / self.count if self.count else math.nan


def top1(inputs: Mapping[str, Any], outputs: Mapping[str, Any], index: int, labels: Mapping[str, Any]) -> float:
    """Return the fraction of a sample's classifications that are right: argmax over the first output's last axis, and `label`.

    Raises:
        METRIC_FAILED: `label` is missing, or has another number of entries.
    """
    import numpy as np

    if "label" not in labels:
        there = f"Keys other than the inputs: {', '.join(labels)}." if labels else "There are no keys other than the inputs."
        raise error_for("METRIC_FAILED", "top1 needs a key label in the sample's .npz.", there, metric="top1")
    first: NDArray[np.generic] = np.asarray(next(iter(outputs.values())))
    wanted = np.asarray(labels["label"]).reshape(-1)
    argmax = np.argmax(first, axis=-1).reshape(-1)
    if argmax.shape != wanted.shape:
        raise error_for(
            "METRIC_FAILED",
            f"top1 has {argmax.size} classifications, of an output of the shape {list(first.shape)}, and {wanted.size} labels.",
            "Give one label for each.",
            metric="top1",
        )
    return float((argmax == wanted).mean())


BUILT_IN: Final[Mapping[str, Function]] = {"top1": top1}


def find(text: str) -> Metric:
    """Return the metric that `text` names.

    A user's own metric is imported, with its folder or the working folder on sys.path.

    Raises:
        METRIC_NOT_FOUND: the file, module, function or entry point does not exist.
        METRIC_FAILED: importing it raised.
    """
    where, colon, name = text.rpartition(":")
    if colon and where and name.isidentifier():
        return _of_user(where, name)
    if text in BUILT_IN:
        return Metric(text, BUILT_IN[text])
    points = {point.name: point for point in entry_points(group=GROUP)}
    if text not in points:
        known = ", ".join(sorted({*BUILT_IN, *points}))
        raise error_for(
            "METRIC_NOT_FOUND",
            f"There is no metric {text!r}.",
            f"Metrics: {known}; for your own give file.py:function or module:function.",
            metric=text,
        )
    with _users_code(text):
        return Metric(text, _callable(text, points[text].load()))


def _of_user(where: str, name: str) -> Metric:
    is_file = where.lower().endswith(".py")
    path = Path(where)
    if is_file and not path.is_file():
        raise error_for(
            "METRIC_NOT_FOUND", f"There is no file {where}.", f"Paths start at the working folder, {Path.cwd()}.", path=where
        )
    with _users_code(where), usercode.scope_of_file(path) if is_file else usercode.scope_of_module(where) as scope:
        module = scope.import_file(path, "etfarm_metric") if is_file else importlib.import_module(where)
    if not hasattr(module, name):
        raise error_for("METRIC_NOT_FOUND", f"{where} has no {name}.", "Name a function of it.", metric=f"{where}:{name}")
    return Metric(name, _callable(f"{where}:{name}", getattr(module, name)), scope)


def _callable(text: str, candidate: Any) -> Function:
    if not callable(candidate):
        raise error_for(
            "METRIC_NOT_FOUND", f"{text} is {type(candidate).__name__}, not a function.", "Name a function.", metric=text
        )
    return candidate  # type: ignore[no-any-return]


@contextmanager
def _users_code(where: str) -> Iterator[None]:
    """Convert any exception of a user's import to one sentence."""
    try:
        yield
    except EtfarmError:
        raise
    except ModuleNotFoundError as error:
        raise error_for(
            "METRIC_NOT_FOUND",
            f"{where} cannot be imported: there is no module {error.name!r}.",
            "Python searches the working folder and the installed packages.",
            metric=where,
        ) from error
    except (Exception, SystemExit) as error:
        raise error_for(
            "METRIC_FAILED", f"Importing {where} failed with {type(error).__name__}: {error}", metric=where
        ) from error
