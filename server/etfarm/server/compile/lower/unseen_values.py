"""What the operators of a model may get that calibration did not show: a mask that never applied, a state that was zero.

Where all inputs of calibration have one value in common, such as a mask of ones for texts without padding, the model runs again
with another value in half of it. The same is done to conditions that were never true, or never false. That way any arithmetic
between a mask and what it is added to is followed, as it is executed.

Zeros that are added to the inputs of a softmax become an additive mask, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
import torch
from torch.utils import _pytree as pytree

from etfarm.server.compile.program.descriptions import first_line
from etfarm.server.compile.program.special_values import PASSING
from etfarm.wire.shared_state import PREFIX

log = structlog.get_logger()

Visit = Callable[[Any, torch.Tensor], torch.Tensor]

_INDICES_AT: Final = {
    "embedding": 1, "gather": 2, "index": 1, "index_add": 2, "index_copy": 2, "index_fill": 2, "index_put": 1, "index_select": 2,
    "scatter": 2, "scatter_add": 2, "scatter_reduce": 2, "take": 1, "take_along_dim": 1,
}  # fmt: skip
"""The argument of operators that says where values are read or written, on which the values do not depend."""
_FIRST_SAMPLES: Final = 8
_MAX_SAMPLES: Final = 16
"""Numbers of samples that the model runs on again, before and after the change of what all have in common."""
_MIN_CALLS: Final = 16
_MAX_CALLS: Final = 64
"""Numbers of calls after calibration: as many as it had, within these."""
_MAX_ATTEMPTS: Final = 32
"""Number of times that the samples are run with something changed: more than one if the model refuses some of it."""
SHARES: Final = (0.5, 0.125, 0.0)
"""Shares of a tensor's elements that are changed, the next one where the model does not run; one element at least."""
_OTHER: Final = 0.75
"""The factor that gives a constant, such as a temperature, another value that it may have."""
STATE_SCALE: Final = 4.0
"""The standard deviation of what zeros of other methods become, which is large since no calibration can show more of it.

Inputs of zeros that the model does not return are tried with it, too.
"""
_MASKED: Final = -1e4
"""What zeros become in part that are added to the inputs of a softmax."""
SEED: Final = 20_261_129
_SHAPED: Final = frozenset({
    "full", "full_like", "new_full", "scalar_tensor", "zeros", "ones", "empty", "arange", "zeros_like", "ones_like", "empty_like",
    "new_zeros", "new_ones", "new_empty",
})  # fmt: skip
"""Names of operators whose outputs do not depend on the values of tensors."""
_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"})
_ATTENTION: Final = frozenset(
    {"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "scaled_dot_product_attention"}
)
"""Names of operators that turn a number far below others into nothing."""
_ALIKE: Final = frozenset({"abs", "clone", "detach", "alias", "to", "_to_copy"})
"""Names of operators whose outputs a condition compares in place of their input."""


@dataclass(frozen=True)
class State:
    """The buffers that do not keep their values."""

    own: Collection[str]
    """Names of those that the method itself changes: successive calls of calibration have shown their values."""
    foreign: Collection[str]
    """Names of those that only other methods change."""
    restore: Callable[[], None]
    """Gives the method's own ones their initial values."""
    go_on: Callable[[], int] = lambda: 0
    """Gives them those at the end of calibration, and returns the number of its calls."""


class Common:
    """What the inputs of all samples of calibration have in common, and the samples that show what they have not."""

    def __init__(self) -> None:
        self.chosen: list[int] = []
        """Indices of the first samples, and of those in which an input is the first time not what it was in all before."""
        self._same = _Same()
        self._tensors: dict[int, torch.Tensor] = {}
        self.count = 0
        """Number of samples."""
        self._varies = False

    @property
    def is_blank(self) -> bool:
        """Whether no input shows any range: all are floats, each of one number in all samples, such as an image of zeros."""
        return bool(self.values) and not self._varies

    @property
    def values(self) -> Mapping[int, Any]:
        """The numbers that inputs consist of in all samples, by the inputs' positions."""
        return self._same.values

    @property
    def same(self) -> Mapping[int, Any]:
        """These, and the tensors of inputs that were the same tensor in at least two samples, and in all."""
        return {**self._tensors, **self.values} if self.count > 1 else self.values

    def note(self, leaves: Iterable[Any]) -> None:
        """Take in the next sample's flattened inputs."""
        before = set(self.values)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._same.note(position, leaf)
                if not self.count and leaf.numel():
                    self._tensors[position] = leaf
                elif position in self._tensors and not torch.equal(self._tensors[position], leaf):
                    del self._tensors[position]
                # Whole numbers may be tokens, whose embeddings are not alike.
                self._varies |= position not in self.values or not leaf.is_floating_point()
        if self.count < _FIRST_SAMPLES or (before - self.values.keys() and len(self.chosen) < _MAX_SAMPLES):
            self.chosen.append(self.count)
        self.count += 1


class Ranges:
    """The least and the greatest values of the tensors that observers get, by the observers' nodes."""

    def __init__(self) -> None:
        self._limits: dict[Any, tuple[float, float]] = {}
        self.is_possible = True
        """Whether neither these tensors have infinity nor the model's results that or NaN. -inf does not count: masks make it."""

    def note_results(self, results: Any) -> None:
        """Take in what the model returns."""
        for value in pytree.tree_leaves(results):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.is_possible &= not bool((value.isnan() | value.isposinf()).any())

    def note(self, node: Any, value: torch.Tensor) -> None:
        """Take in a tensor; NaN does not count."""
        low, high = self._limits.get(node, (0.0, 0.0))
        if value.numel():
            least, greatest = torch.aminmax(value.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
            self._limits[node] = min(low, float(least)), max(high, float(greatest))
            self.is_possible &= float(greatest) < torch.inf

    def add(self, others: Ranges) -> None:
        """Take in what other tensors had."""
        self.is_possible &= others.is_possible
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
        self._state = state
        self.restore = state.restore
        """Gives the method's own buffers their initial values."""
        varying = _find_varying(prepared.graph, {*state.own, *state.foreign})
        self._states = [node for node in varying if node.op == "get_attr" and node.target in state.foreign]
        self._conditions = [node for node in varying if _is_condition(node) and not _is_guard(node)]
        self._attempts = 0
        self.seen, self.unseen = Ranges(), Ranges()
        self.samples: list[Sequence[Any]] = []
        self.first: dict[Any, Any] = {}
        """The first sample, by the inputs' nodes."""
        self.same: dict[Any, Any] = {}
        """What the inputs were that were the same in all samples: numbers or tensors, by nodes."""
        self.changed: Collection[Any] = ()
        """The nodes that could be changed."""
        self.masks: Collection[Any] = ()
        """The inputs among them that a softmax makes nothing of where they are far below others."""
        self.results: list[Any] = []
        """What the model returned last, flattened."""
        self.returned = [each for node in prepared.graph.find_nodes(op="output") for each in pytree.tree_leaves(node.args)]
        """The nodes of what the model returns, flattened."""
        self.inputs: list[str] = []
        """Names of the inputs that were the same in all samples, and can be others."""
        self.buffers: list[str] = []
        """Names of such buffers, which other methods write."""

    def run(self, samples: Iterable[Sequence[Any]], common: Mapping[int, Any]) -> None:
        """Execute the model on samples of calibration as successive calls, and then again.

        Args:
            samples: flattened inputs.
            common: the numbers that inputs consist of in all of calibration, or the tensors that they are, by the inputs'
                positions.
        """
        samples, same = list(samples), _Same()
        placeholders = [node for node in self._prepared.graph.nodes if node.op == "placeholder"]
        self.samples = samples
        self.first = dict(zip(placeholders, samples[0], strict=False)) if samples else {}
        self.same = {placeholders[position]: value for position, value in common.items()}
        inputs = {node: value for node, value in self.same.items() if not isinstance(value, torch.Tensor)}
        if not inputs and not self._states and not self._conditions:
            return
        visits = dict.fromkeys((*self._states, *self._conditions), same.note)
        self.restore()
        for sample in samples:
            if why := self.execute(sample, [visits, visits], self.seen, accepts_all=True):
                log.warning("the model does not run on calibration inputs again, so that unseen values are unknown", error=why)
                return
        values = inputs | same.values
        changed = self._explore(samples, values, [node for node in self._prepared.graph.nodes if node in values])
        self.changed = frozenset(changed)
        self._explore_masks(samples, [node for node in changed if node in inputs and self.is_zero(node) and _is_mask(node)])
        self.inputs = [str(node.target) for node in changed if node in inputs]
        self.buffers = [str(node.target).removeprefix(PREFIX) for node in changed if node in self._states]

    def go_on(self) -> tuple[Ranges, list[str]]:
        """Return the values of calls after those of calibration, and the names of the own buffers whose values become larger."""
        ranges = Ranges()
        calls = self._state.go_on()
        buffers = {name: buffer for name, buffer in self._prepared.named_buffers() if name in self._state.own and buffer.numel()}
        before = {name: magnitude(buffer) for name, buffer in buffers.items()}
        grown: dict[str, None] = {}
        for call in range(min(max(calls, _MIN_CALLS), _MAX_CALLS) if self.samples and buffers else 0):
            if self.execute(self.samples[call % len(self.samples)], [{}], ranges):
                break
            grown |= {name: None for name, buffer in buffers.items() if magnitude(buffer) > before[name]}
        return ranges, list(grown)

    def find_sources(self, nodes: Collection[Any], grown: Sequence[str]) -> list[str]:
        """Return the names of the method's own buffers that values of nodes come from.

        Those that have grown if there are any. Of others, the sign or the order of values may be what changed; else they are
        an index or a condition.
        """
        own = [name for name, buffer in self._prepared.named_buffers() if name in self._state.own and buffer.numel()]
        for names, takes in ((grown, _takes_values), (own, _takes_values), (own, lambda user, node: True)):
            if sources := [name for name in names if self._reaches(name, nodes, takes)]:
                return sources
        return []

    def _reaches(self, buffer: str, nodes: Collection[Any], takes: Callable[[Any, Any], bool]) -> bool:
        """Return whether nodes come from a buffer, in later calls too, by users that take something of their inputs."""
        pending = [node for node in self._prepared.graph.find_nodes(op="get_attr") if node.target == buffer]
        reached = set(pending)
        while pending:
            node = pending.pop()
            for user in node.users:
                near = [user] if takes(user, node) else []
                if near and name_of(user) == "copy_" and user.args[0].op == "get_attr":
                    near += self._prepared.graph.find_nodes(op="get_attr", target=user.args[0].target)
                pending += [each for each in near if each not in reached]
                reached.update(near)
        return not reached.isdisjoint(nodes)

    def is_zero(self, node: Any) -> bool:
        """Return whether an input was a float tensor of zeros in all samples."""
        same = self.same[node]
        return not isinstance(same, torch.Tensor) and same == 0 and bool(self.first[node].is_floating_point())

    def _explore_masks(self, samples: Sequence[Sequence[Any]], nodes: Sequence[Any]) -> None:
        """Run the model with part of the zeros of masks that are added far below all others."""
        for group in (nodes, *([node] for node in nodes)) if nodes else ():
            changes = Changes(self.same)
            visits = [dict.fromkeys(group, partial(changes.mask, share=share)) for share in SHARES]
            self.restore()
            if not self.execute(samples[0], visits, self.unseen):
                self.masks = (*self.masks, *group)
            if len(self.masks) == len(nodes):
                return

    def _explore(self, samples: Sequence[Sequence[Any]], same: Mapping[Any, Any], nodes: Sequence[Any]) -> list[Any]:
        """Run the model with nodes changed, or else with each half of them, and so on; return those that could be changed.

        An index into a table of one row, for instance, cannot, and does not keep a mask beside it from being followed. The first
        sample decides: others may fail by chance, as where a mask leaves nothing of a row.
        """
        if not nodes:
            return []
        if self._attempts == _MAX_ATTEMPTS:
            log.warning("the model refuses other values of too many inputs to follow these", nodes=[node.name for node in nodes])
            return []
        self._attempts += 1
        changes = Changes(same)
        visits = [dict.fromkeys(nodes, partial(changes.change, share=share)) for share in SHARES]
        if any(not isinstance(same[node], float) and abs(same[node]) > 1 for node in nodes):
            visits.append(dict.fromkeys(nodes, partial(changes.change, share=SHARES[0], halves=True)))
        self.restore()
        if not (why := self.execute(samples[0], visits, self.unseen)):
            for sample in samples[1:]:
                self.execute(sample, visits, self.unseen)
            return list(nodes)
        log.info("the model does not run on changed inputs", error=why, nodes=[node.name for node in nodes])
        if len(nodes) == 1:
            return []
        half = len(nodes) // 2
        return self._explore(samples, same, nodes[:half]) + self._explore(samples, same, nodes[half:])

    def execute(
        self, sample: Sequence[Any], attempts: Iterable[Mapping[Any, Visit]], ranges: Ranges, *, accepts_all: bool = False
    ) -> str:
        """Return why the model does not run on a sample; empty if it does.

        Args:
            sample: flattened inputs.
            attempts: functions by nodes, see `_Run`, of which those after the first that works have no effect. The first one
                follows the sample before; all others begin from the initial state.
            ranges: takes in the values of the attempt that worked.
            accepts_all: whether NaN and infinity are taken, too: else, where none were seen, users give nothing that makes them.
        """
        why = ""
        for visits in attempts:
            run = _Run(self._prepared, self._observers, visits)
            leaves = (leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in sample)
            try:
                with torch.no_grad():
                    results = run.run(*leaves, enable_io_processing=False)
            except Exception as error:  # noqa: BLE001 - a model may refuse values that its users never give it
                why = first_line(error)
            else:
                if accepts_all or run.ranges.is_possible or not self.seen.is_possible:
                    ranges.add(run.ranges)
                    self.results = pytree.tree_leaves(results)
                    return ""
                why = "its values are NaN or infinite"
            self.restore()
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
        if n.op == "output":
            self.ranges.note_results(value)
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


class Changes:
    """Other values for nodes that have had one value only."""

    def __init__(self, same: Mapping[Any, Any]) -> None:
        self._same = same
        self._generator = torch.Generator().manual_seed(SEED)

    def change(self, node: Any, value: torch.Tensor, share: float, *, halves: bool = False) -> torch.Tensor:
        """Return a node's tensor with another value in about a share of its elements, at least in one.

        Args:
            halves: whether integers over one become half of what they are, as where a length cannot be 0.
        """
        if not value.numel():
            return value
        chosen = self._choose(value, share)
        if value.dtype == torch.bool:
            return value ^ chosen
        same = self._same[node]
        if not value.is_floating_point() or same == 1:
            other = torch.full_like(value, int(same / 2) if halves and abs(same) > 1 else 0 if same else 1)
        elif same == 0:
            scale = STATE_SCALE if node.op == "get_attr" else 1.0
            other = (scale * torch.randn(value.shape, generator=self._generator)).to(value.dtype)
        else:
            other = value * _OTHER
        return torch.where(chosen, other, value)

    def mask(self, _: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        """Return a tensor of zeros with a number far below others in about a share of its elements, at least in one."""
        return value.masked_fill(self._choose(value, share), _MASKED) if value.numel() else value

    def _choose(self, value: torch.Tensor, share: float) -> torch.Tensor:
        chosen = torch.rand(value.shape, generator=self._generator) < share
        chosen.view(-1)[torch.randint(value.numel(), (1,), generator=self._generator)] = True
        return chosen


def magnitude(buffer: torch.Tensor) -> float:
    """Return the largest magnitude of a buffer's finite values, true being 1; 0 if it has none."""
    finite = buffer.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if buffer.numel() else 0.0


def _is_mask(node: Any) -> bool:
    """Return whether a tensor reaches nothing else than the inputs of softmax, to which it is added as a mask is."""
    reached, pending, has_attention = {node}, [node], False
    while pending:
        for user in pending.pop().users:
            has_attention |= name_of(user) in _ATTENTION
            is_passed = user.op == "call_module" or name_of(user).rstrip("_") in PASSING
            if not is_passed and name_of(user) not in (_ATTENTION | _COMPARISONS) and user.op != "output":
                return False
            if is_passed and user not in reached:
                reached.add(user)
                pending.append(user)
    return has_attention


def _is_condition(node: Any) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _takes_values(user: Any, node: Any) -> bool:
    """Return whether values of an operator's result come from those of an input, beyond where they are read or written."""
    indices_at = _INDICES_AT.get(name_of(user).rstrip("_"))
    others = [argument for at, argument in enumerate(user.args) if at != indices_at]
    return not _is_condition(user) and any(each is node for each in pytree.tree_leaves((others, user.kwargs)))


def _is_guard(condition: Any) -> bool:
    """Return whether a condition only compares a tensor to select from that tensor, as in `where(d == 0, 1, d)`.

    With the condition changed, the tensor would still have the value that the condition says it has not.
    """
    compared = _find_compared(condition)

    def guards(user: Any) -> bool:
        selected = {"where": user.args[1:], "masked_fill": user.args[:1]}.get(name_of(user).rstrip("_"), ())
        return (_is_negation(user) and _is_guard(user)) or any(_find_original(each) in compared for each in selected)

    return bool(condition.users) and all(map(guards, condition.users))


def _find_compared(condition: Any) -> set[Any]:
    """Return the tensors that a comparison, or the one that a condition negates, has as its inputs."""
    while _is_negation(condition):
        condition = condition.args[0]
    return set(map(_find_original, condition.all_input_nodes)) if name_of(condition) in _COMPARISONS else set()


def _is_negation(node: Any) -> bool:
    return name_of(node) in ("logical_not", "bitwise_not")


def _find_original(value: Any) -> Any:
    """Return what observers and operators in `_ALIKE` get."""
    while isinstance(value, torch.fx.Node) and (value.op == "call_module" or name_of(value) in _ALIKE):
        value = value.args[0]
    return value


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
