"""What in a graph makes the runtime refuse a program that was lowered, with the line and what helps.

Each cause is a fault of ExecuTorch 1.5, mostly of its XNNPACK backend with quantized graphs. The runtime's message names none of
them, and often blames another operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_control_flow, describe_node
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.sources import source_of
from etfarm.server.graphs.views import name_of

_RESIZED: Final = re.compile(r"resize a static tensor\. Expected shape \(([\d, ]+)\), but received \(([\d, ]+)\)")
_PAD: Final = "Failed to create StaticConstantPad"

_FIXED: Final = re.compile(r"resize a (?:static|bounded) tensor|copy_to and copy_from")
_CONVOLUTIONS: Final = frozenset({"conv1d", "conv2d", "convolution", "conv_transpose1d", "conv_transpose2d"})
_MAX_HOPS: Final = 16


@dataclass(frozen=True)
class Refusal:
    """The cause of a refusal."""

    operator: str
    """The operator with its line, like `aten::add at models/net.py:31 (y = y + 1.0)`."""
    advice: str
    """The cause, and what helps."""


def find_refusal(program: Any, why: str) -> Refusal | None:
    """Return what in a quantized graph explains the runtime's reason; None if nothing does.

    Args:
        program: the exported program as it was lowered to XNNPACK.
        why: the runtime's reason.
    """
    if (match := _RESIZED.search(why)) is not None:
        expected, received = (tuple(map(int, re.findall(r"\d+", shape))) for shape in match.groups())
        if sorted(expected) == sorted(received) and len(expected) == 4:
            return _returned_channels_last(program, expected)
    if _PAD in why:
        return _pad_of_quantized(program)
    return None


def find_fixed_size(program: Any, why: str) -> Refusal | None:
    """Return the map or circular pad of dynamic sizes that explains the runtime's reason; None if there is none.

    Args:
        program: the exported program, of any recipe.
        why: the runtime's reason.
    """
    for node in all_nodes(program) if _FIXED.search(why) else ():
        if name_of(node) == "pad" and "circular" in node.args and any(not isinstance(size, int) for size in _shape(node)):
            advice = (
                "ExecuTorch fixes the sizes of a circular pad at those of the example inputs: write torch.cat([x[..., -p:], x, "
                "x[..., :p]], -1) for a pad of p at both ends of the last dim, and so for each padded dim, before a convolution "
                "with padding_mode='zeros' and without padding there; or export that dim as static."
            )
            return Refusal(describe_node(node), advice)
        shapes = [_shape(value) for value in node.args[1]] if "map_impl" in str(node.target) else []
        if any(not isinstance(size, int) for shape in shapes for size in shape[1:]):
            advice = (
                "ExecuTorch's map takes rows of fixed sizes only: export their dims as static, or apply the function to all rows "
                "at once, without map."
            )
            return Refusal(describe_control_flow([node]), advice)
        if any(not isinstance(shape[0], int) for shape in shapes):
            advice = (
                "ExecuTorch fixes the number of steps of map at that of the example inputs: write the loop as a scan, whose "
                "number of steps stays dynamic, or export that dim as static."
            )
            return Refusal(describe_control_flow([node]), advice)
    return None


def _returned_channels_last(program: Any, shape: tuple[int, ...]) -> Refusal | None:
    returned: list[Any] = next((node.all_input_nodes for node in program.graph.nodes if node.op == "output"), [])
    for value in returned:
        operator = next((node for node in _upwards(value) if not _is_conversion(node)), None)
        if _shape(value) == shape and operator is not value and operator is not None:
            return Refusal(
                describe_node(operator),
                "XNNPACK gives this output in the memory layout of channels last, as it is returned and an operator that is not "
                "quantized uses it too. Return a copy, y * 1.0 for y, or use an int8 recipe with dynamic scales.",
            )
    return None


def _pad_of_quantized(program: Any) -> Refusal | None:
    for node in program.graph.nodes:
        if name_of(node) not in ("pad", "constant_pad_nd") or not _is_dequantized(node.args[0]):
            continue
        if any(str(user.target).startswith("quantized_decomposed.quantize") for user in node.users):
            continue
        operator = next((source for source in _upwards(node.args[0]) if not _is_conversion(source)), None)
        if operator is not None:
            return Refusal(describe_node(node), f"XNNPACK refuses a pad whose input only is quantized. {advise_of_pad(operator)}")
    return None


def advise_of_pad(operator: Any) -> str:
    """Return what to do about a pad that is not quantized, behind an operator that is."""
    source = source_of(operator.meta.get("stack_trace"))
    name = f"{source.file}:{source.line}" if source is not None else f":{name_of(operator)}"
    return (
        f'Keep the operator before the pad, {describe_node(operator)}, in fp32: skip_operators = ["{name}"] in a recipe file. Or '
        "use an int8 recipe with dynamic scales."
    )


def _upwards(value: Any) -> Iterator[Any]:
    """Yield a node and those before it, through operators with one input of the same shape."""
    for _ in range(_MAX_HOPS):
        yield value
        inputs = [node for node in value.all_input_nodes if _shape(node) == _shape(value)]
        if value.op != "call_function" or len(inputs) != 1 or name_of(value) in _CONVOLUTIONS:
            return
        value = inputs[0]


def _is_dequantized(value: Any) -> bool:
    return str(value.target).startswith("quantized_decomposed.dequantize_per_tensor")


def _is_conversion(node: Any) -> bool:
    return str(node.target).startswith("quantized_decomposed.")


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))
