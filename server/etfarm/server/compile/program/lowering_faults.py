"""Faults of ExecuTorch 1.5 whose messages name no operator: how to find it in the programs, and what helps. Stdlib only."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of

_IMAGE_DIMS: Final = 4


@dataclass(frozen=True)
class Fault:
    """An error message with its cause."""

    pattern: re.Pattern[str]
    """A part of the message."""
    is_cause: Callable[[Any], bool]
    """Whether a node causes it."""
    why: str
    """The cause, with {} for the operator and its line."""
    remedy: str

    def find(self, programs: Mapping[str, Any]) -> Any:
        """Return the node that causes it, preferably one inside of a branch or loop; None if there is none."""
        nodes = [node for program in programs.values() for node in all_nodes(program) if node.op == "call_function"]
        return next((node for node in reversed(nodes) if self.is_cause(node)), None)


def find_fault(text: str, programs: Mapping[str, Any]) -> Iterator[tuple[Fault, Any]]:
    """Yield the faults that a message may stand for, each with the node that causes it."""
    for fault in _FAULTS:
        if fault.pattern.search(text) and (node := fault.find(programs)) is not None:
            yield fault, node


def find_node_in_hand(error: BaseException) -> Any:
    """Return the operator's node that the innermost function with one held when it failed; None without any."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        for value in frame.f_locals.values():
            # The `op` of a Proxy must not be compared.
            if type(value).__name__ == "Node" and getattr(value, "op", "") == "call_function":
                return value
    return None


def _lacks_maximum(node: Any) -> bool:
    return name_of(node) in ("hardtanh", "hardtanh_") and len(node.args) < 3


def _is(node: Any, operator: str) -> bool:
    return operator in (str(node.target), getattr(node.target, "__name__", ""))


def _maps_to_several(node: Any) -> bool:
    return _is(node, "map_impl") and len(node.meta.get("val") or ()) > 1


def _computes_with_number(node: Any) -> bool:
    """Return whether an operator on images has an operand of fewer dims."""
    ranks = [len(getattr(getattr(operand, "meta", {}).get("val"), "shape", ())) for operand in node.args[:2]]
    return name_of(node) in ("add", "sub", "mul", "div", "rsub") and max(ranks) == _IMAGE_DIMS and min(ranks) < _IMAGE_DIMS


def _drops_a_dim(node: Any) -> bool:
    return str(node.target) == "aten.max.dim" and len(node.args) < 3


_FAULTS: Final = (
    Fault(
        re.compile(r"\Atuple index out of range\Z"),
        _lacks_maximum,
        "XNNPACK's part of ExecuTorch does not read an integer limit of {}.",
        "Write the limits as floats: nn.Hardtanh(0.0, 1.0) for nn.Hardtanh(0, 1).",
    ),
    Fault(
        re.compile(r"\AFailed with error:\s*\n.*--> %map_impl", re.DOTALL),
        _maps_to_several,
        "ExecuTorch cannot emit a map with several outputs: {}.",
        "Return one tensor from the function, as by torch.cat, and slice it behind the map; or call map for each output.",
    ),
    Fault(
        re.compile(r"Emitting map with more than one mapped args"),
        lambda node: _is(node, "map_impl"),
        "ExecuTorch cannot emit a map over several tensors: {}.",
        "Stack tensors of one shape, and take them apart in the function: map(lambda pair: f(pair[0], pair[1]), "
        "torch.stack([x, y], 1)). Or write it as a scan, which takes several.",
    ),
    Fault(
        re.compile(r"might be aliasing the input or the output|Attempting to use FunctionalTensor on its own"),
        lambda node: _is(node, "while_loop"),
        "ExecuTorch cannot lower loops that are nested or that share values with their inputs: {}.",
        "Write a loop with a fixed number of steps in Python, which the export unrolls; where the number depends on values, take "
        "its maximum and keep finished values with torch.where.",
    ),
    Fault(
        re.compile(r"amax\.default only supports keep_dim == True"),
        _drops_a_dim,
        "XNNPACK's part of ExecuTorch takes {}, and computes maxima only if they keep their dim.",
        "Write x.amax(dim) for x.max(dim)[0] or x.max(dim).values.",
    ),
    Fault(
        re.compile(r"\A'val'\Z"),
        _computes_with_number,
        "a pass of ExecuTorch refuses what another one made of the quantized model (KeyError: 'val'), where an operand has fewer "
        "dims than the other: {}.",
        "Use a recipe in fp32, such as xnnpack_fp32.",
    ),
)
"""Provoked by test_lowering_faults.py, which applies each remedy."""
