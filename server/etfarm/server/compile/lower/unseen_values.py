"""What the operators of a model may get that calibration did not show: a mask that never applied, a state that was zero.

Where all inputs of calibration have one value in common, such as a mask of ones for texts without padding, the model runs again
with another value in half of it. The same is done to conditions that were never true, or never false. That way any arithmetic
between a mask and what it is added to is followed, as it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch

from etfarm.server.compile.program.descriptions import first_line
from etfarm.wire.shared_state import PREFIX

log = structlog.get_logger()

Visit = Callable[[Any, torch.Tensor], torch.Tensor]

_FIRST_SAMPLES: Final = 8
_MAX_SAMPLES: Final = 16
"""Numbers of samples that the model runs on again, before and after the change of what all have in common."""
_MAX_ATTEMPTS: Final = 32
"""Number of times that the samples are run with something changed: more than one if the model refuses some of it."""
_SEED: Final = 20_261_129
_SHAPED: Final = frozenset({
    "full", "full_like", "new_full", "scalar_tensor", "zeros", "ones", "empty", "arange", "zeros_like", "ones_like", "empty_like",
    "new_zeros", "new_ones", "new_empty",
})  # fmt: skip
"""Names of operators whose outputs do not depend on the values of tensors."""


@dataclass(frozen=True)
class State:
    """The buffers that do not keep their values."""

    own: Collection[str]
    """Names of those that the method itself changes: successive calls of calibration have shown their values."""
    foreign: Collection[str]
    """Names of those that only other methods change."""
    restore: Callable[[], None]
    """Gives the method's own ones their initial values."""


class Common:
    """What the inputs of all samples of calibration have in common, and the samples that show what they have not."""

    def __init__(self) -> None:
        self.chosen: list[int] = []
        """Indices of the first samples, and of those in which an input is the first time not what it was in all before."""
        self._same = _Same()
        self._count = 0

    @property
    def values(self) -> Mapping[int, Any]:
        """The numbers that inputs consist of in all samples, by the inputs' positions."""
        return self._same.values

    def note(self, leaves: Iterable[Any]) -> None:
        """Take in the next sample's flattened inputs."""
        before = set(self.values)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._same.note(position, leaf)
        if self._count < _FIRST_SAMPLES or (before - self.values.keys() and len(self.chosen) < _MAX_SAMPLES):
            self.chosen.append(self._count)
        self._count += 1


class Ranges:
    """The least and the greatest values of the tensors that observers get, by the observers' nodes."""

    def __init__(self) -> None:
        self._limits: dict[Any, tuple[float, float]] = {}

    def note(self, node: Any, value: torch.Tensor) -> None:
        """Take in a tensor; NaN does not count."""
        low, high = self._limits.get(node, (0.0, 0.0))
        if value.numel():
            least, greatest = torch.aminmax(value.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
            self._limits[node] = min(low, float(least)), max(high, float(greatest))

    def add(self, others: Ranges) -> None:
        """Take in what other tensors had."""
        for node, (low, high) in others._limits.items():
            least, greatest = self[node]
            self._limits[node] = min(least, low), max(greatest, high)

    def __getitem__(self, node: Any) -> tuple[float, float]:
        """Return the least and the greatest value, zero included."""
        return self._limits.get(node, (0.0, 0.0))


class Exploration:
    """The values that a model's operators have on samples, and those that they have with what the samples have in common changed.

    Args:
        prepared: the model with observers, which see none of this.
        observers: the class of the observers.
        state: the buffers that this method or another one changes.
    """

    def __init__(self, prepared: torch.fx.GraphModule, observers: type[Any], state: State) -> None:
        self._prepared = prepared
        self._observers = observers
        self._restore = state.restore
        varying = _find_varying(prepared.graph, {*state.own, *state.foreign})
        self._states = [node for node in varying if node.op == "get_attr" and node.target in state.foreign]
        self._conditions = [node for node in varying if _is_condition(node)]
        self._attempts = 0
        self.seen, self.unseen = Ranges(), Ranges()
        self.inputs: list[str] = []
        """Names of the inputs, and of buffers that other methods write, that were the same in all samples, and can be others."""

    def run(self, samples: Iterable[Sequence[Any]], common: Mapping[int, Any]) -> None:
        """Execute the model on samples of calibration as successive calls, and then again.

        Args:
            samples: flattened inputs.
            common: the numbers that inputs consist of in all of calibration, by the inputs' positions.
        """
        samples, same = list(samples), _Same()
        placeholders = [node for node in self._prepared.graph.nodes if node.op == "placeholder"]
        inputs = {placeholders[position]: value for position, value in common.items()}
        if not inputs and not self._states and not self._conditions:
            return
        self._restore()
        for sample in samples:
            if why := self._execute(sample, self.seen, dict.fromkeys((*self._states, *self._conditions), same.note)):
                log.warning("the model does not run on calibration inputs again, so that unseen values are unknown", error=why)
                return
        values = inputs | same.values
        changed = self._explore(samples, values, [node for node in self._prepared.graph.nodes if node in values])
        self.inputs = [str(node.target).removeprefix(PREFIX) for node in changed if node in inputs or node in self._states]

    def _explore(self, samples: Sequence[Sequence[Any]], same: Mapping[Any, Any], nodes: Sequence[Any]) -> list[Any]:
        """Run the model with nodes changed, or else with each half of them, and so on; return those that could be changed.

        An index into a table of one row, for instance, cannot, and does not keep a mask beside it from being followed.
        """
        if not nodes:
            return []
        if self._attempts == _MAX_ATTEMPTS:
            log.warning("the model refuses other values of too many inputs to follow these", nodes=[node.name for node in nodes])
            return []
        self._attempts += 1
        ranges, changes = Ranges(), _Changes(same)
        self._restore()
        why = next(filter(None, (self._execute(sample, ranges, dict.fromkeys(nodes, changes.change)) for sample in samples)), "")
        if not why:
            self.unseen.add(ranges)
            return list(nodes)
        log.info("the model does not run on changed inputs", error=why, nodes=[node.name for node in nodes])
        if len(nodes) == 1:
            return []
        half = len(nodes) // 2
        return self._explore(samples, same, nodes[:half]) + self._explore(samples, same, nodes[half:])

    def _execute(self, sample: Sequence[Any], ranges: Ranges, visits: Mapping[Any, Visit]) -> str:
        """Return why the model runs on a sample neither after those before nor from its initial state; empty if it does."""
        why = ""
        for _ in range(2):
            run = _Run(self._prepared, self._observers, visits)
            leaves = (leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in sample)
            try:
                with torch.no_grad():
                    run.run(*leaves, enable_io_processing=False)
            except Exception as error:  # noqa: BLE001 - a model may refuse values that its users never give it
                why = first_line(error)
                self._restore()
            else:
                ranges.add(run.ranges)
                return ""
        return why


class _Run(torch.fx.Interpreter):  # type: ignore[misc]
    """One execution without observers.

    Args:
        visits: called with nodes and their values; return the values to go on with.
    """

    def __init__(self, prepared: torch.fx.GraphModule, observers: type[Any], visits: Mapping[Any, Visit]) -> None:
        super().__init__(prepared)
        self._observer_class = observers
        self._visits = visits
        self.ranges = Ranges()
        """Those of the tensors that observers would see."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Execute a node of the graph."""
        if n.op == "call_module" and isinstance(self.fetch_attr(str(n.target)), self._observer_class):
            (value,), _ = self.fetch_args_kwargs_from_env(n)
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self.ranges.note(n, value)
            return value
        value = super().run_node(n)
        return self._visits[n](n, value) if n in self._visits and isinstance(value, torch.Tensor) else value


class _Same:
    """The values of the nodes that have had one value only."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self._others: set[Any] = set()

    def note(self, node: Any, value: torch.Tensor) -> torch.Tensor:
        """Take in a tensor, and return it."""
        if node not in self._others and value.numel():
            first = value.flatten()[0]
            if bool((value == first).all()) and self.values.setdefault(node, first.item()) == first.item():
                return value
            self.values.pop(node, None)
            self._others.add(node)
        return value


class _Changes:
    """Other values for nodes that have had one value only."""

    def __init__(self, same: Mapping[Any, Any]) -> None:
        self._same = same
        self._generator = torch.Generator().manual_seed(_SEED)

    def change(self, node: Any, value: torch.Tensor) -> torch.Tensor:
        """Return a node's tensor with another value in about half of its elements, at least in one."""
        if not value.numel():
            return value
        chosen = torch.rand(value.shape, generator=self._generator) < 0.5
        chosen.view(-1)[:1] = True
        if value.dtype == torch.bool:
            return value ^ chosen
        if self._same[node] == 0 and value.is_floating_point():
            other = torch.randn(value.shape, generator=self._generator).to(value.dtype)
        else:
            other = torch.full_like(value, 0 if self._same[node] else 1)
        return torch.where(chosen, other, value)


def _is_condition(node: Any) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _find_varying(graph: torch.fx.Graph, changed_buffers: Collection[str]) -> set[Any]:
    """Return the nodes of a graph whose values other inputs may change."""
    varying: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            varies = isinstance(value, torch.Tensor)
        elif node.op == "get_attr":
            varies = node.target in changed_buffers
        elif isinstance(value, torch.SymInt):
            varies = True
        else:
            near = node.all_input_nodes
            if name_of(node) in _SHAPED:
                near = [each for each in near if isinstance(each.meta.get("val"), torch.SymInt) or _has_symbols(each)]
            varies = any(each in varying for each in near)
        if varies:
            varying.add(node)
    return varying


def _has_symbols(node: Any) -> bool:
    """Return whether the size of a tensor depends on inputs."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def name_of(node: Any) -> str:
    """Return the name of a node's operator without overload, such as `add`; empty if it calls none."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "overloadpacket", node.target).__name__)
