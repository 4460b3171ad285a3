"""Splits of a dynamic dim into parts, whose number an exported program fixes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from etfarm.client.export.errors import DimSpecialized
from etfarm.client.export.traces import Place, place_in, traced_graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_BY_NUMBER: Final = ("chunk", "tensor_split", "vsplit", "hsplit", "dsplit")
"""Operators that take a number of parts; `split` takes their size."""
_DIMS: Final = {"vsplit": 0, "hsplit": 1, "dsplit": 2}
_MAX_SIZES: Final = 1000
"""Sizes of a dim that are tried at either end of its range."""


class Split(NamedTuple):
    """A split of a dynamic dim in a graph of torch.export."""

    operator: str
    """Such as `chunk`."""
    parts: int
    size: int | None
    """The size of the parts, if the model gives that as a constant."""
    dim: int
    length: Any
    """The symbolic size of the dim."""
    place: Place | None

    def why(self) -> str:
        """Return why the dim cannot have any size: the rest of a sentence that starts with it."""
        if self.size is not None:
            return f"{self.operator} cuts parts of {self.size} from it, and the program always has {self.parts} of them"
        return f"{self.operator} cuts it into {self.parts} parts, which must be equal in the program"

    def remedy(self, lowest: int = 0, highest: int = 0) -> str:
        """Return what to write instead, with the Dim of a range of sizes if that is given."""

        def multiple(factor: int) -> str:
            if highest // factor < 3:
                return f"{factor} * Dim('k', max=...)"
            return f"{factor} * Dim('k', min={max(2, -(-lowest // factor))}, max={highest // factor})"

        if self.size is not None:
            return (
                f"Cut it into a number of parts, .chunk({self.parts}, {self.dim}), and give the dim as {multiple(self.parts)}, "
                f"or make one tensor of parts of {self.size}, .unflatten({self.dim}, (-1, {self.size})), and give it as "
                f"{multiple(self.size)}; with example inputs of such a size. Or export the dim as static."
            )
        return (
            f"Give the dim as a multiple of {self.parts}, {multiple(self.parts)}, with example inputs of such a size, or export "
            "it as static."
        )


def find_split(error: BaseException, base: Path) -> Split | None:
    """Return the first split of a dynamic dim in the graph that torch.export had traced when it failed; None if there is none."""
    graph = traced_graph(error)
    return next(_splits(graph, base), None) if graph is not None else None


def find_padding(error: BaseException, base: Path) -> str | None:
    """Return the line of a torch.cat with a tensor that is empty for some sizes, in the graph as of `find_split`; None without.

    It is empty if the operator has no line of the user's.

    torch.export 2.13 drops empty tensors there, and the conditions of that exclude sizes, or end in an assertion.
    """
    from torch.fx.experimental.symbolic_shapes import is_symbolic

    graph = traced_graph(error)
    for node in graph.nodes if graph is not None else ():
        if getattr(getattr(node.target, "overloadpacket", None), "__name__", "") != "cat":
            continue
        for part in node.args[0]:
            sizes = [size for size in part.meta["val"].shape if is_symbolic(size)]
            if any(size.node.shape_env.bound_sympy(size.node.expr).lower <= 0 for size in sizes):
                return str(place_in(node.meta.get("stack_trace") or "", base) or "")
    return None


def must_fit_all_sizes(method: str, program: ExportedProgram, base: Path) -> None:
    """Require that splits give the same number of parts for all sizes of their dims.

    torch.export leaves it to a check when its program is called if the dim is a multiple, `4 * n`. ExecuTorch has no such check.

    Raises:
        DimSpecialized: some sizes give another number.
    """
    for split in _splits(program.graph, base):
        length = split.length.node.expr
        sizes = [int(length.subs(symbol, value)) for symbol, value in sizes_of(length, program)]
        if any(_parts(split, size) != split.parts for size in sizes):
            remedy = split.remedy(min(sizes), max(sizes))
            raise DimSpecialized(method, f"dim {split.dim} of a tensor", split.why(), remedy, str(split.place or ""))


def _splits(graph: Graph, base: Path) -> Iterator[Split]:
    for node in graph.nodes:
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        parts = node.meta.get("val")
        if packet not in (*_BY_NUMBER, "split") or not isinstance(parts, list | tuple) or len(parts) < 2:
            continue
        dim, length = _dim_of(node, packet)
        # Lists of sizes have their sum in them, which torch.export explains itself.
        if isinstance(length, int) or isinstance(node.args[1], list | tuple):
            continue
        size = node.args[1] if packet == "split" and isinstance(node.args[1], int) else None
        place = place_in(node.meta.get("stack_trace") or "", base)
        yield Split(packet, len(parts), size, dim, length, place)


def _dim_of(node: Node, operator: str) -> tuple[int, Any]:
    """Return the dim that a node splits, and its size."""
    value = node.args[0].meta["val"]
    argument = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    dim = _DIMS.get(operator, int(argument))
    if operator == "hsplit" and value.dim() == 1:
        dim = 0
    return dim % value.dim(), value.shape[dim]


def _parts(split: Split, length: int) -> int:
    """Return the number of parts that a split gives for a size of its dim."""
    if split.operator in _BY_NUMBER and split.operator != "chunk":
        return split.parts
    size = split.size if split.size is not None else -(-length // split.parts)
    return max(1, -(-length // size)) if size else 1


def sizes_of(expression: Any, program: ExportedProgram) -> Iterator[tuple[Any, int]]:
    """Yield the symbol of an expression of sizes with values in its range; none if it depends on several."""
    symbols, ranges = list(expression.free_symbols), program.range_constraints
    if len(symbols) != 1 or symbols[0] not in ranges:
        return
    low, high = int(ranges[symbols[0]].lower), int(ranges[symbols[0]].upper)
    middle = min(high, low + _MAX_SIZES)
    for value in chain(range(low, middle + 1), range(max(middle + 1, high - _MAX_SIZES), high + 1)):
        yield symbols[0], value
