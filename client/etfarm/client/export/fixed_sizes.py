"""Dynamic dims of which a model takes a quotient as a number, mostly in Python: the steps of a loop, a branch, an int."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from etfarm.client.export.errors import DimSpecialized
from etfarm.client.export.splits import sizes_of
from etfarm.client.export.traces import Place, environment_of, place_in, place_of_frame, traced_graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

_LOOP: Final = re.compile(r"(for|while)\b|.*\brange\(")
_BRANCH: Final = re.compile(r"(if|elif|assert)\b|.*\bif\b.+\belse\b")
_OF_RESHAPES: Final = frozenset({"_reshape_view_helper_core_alg", "check_contiguous_sizes_strides"})
"""Functions of torch 2.13 that choose among ways to the same result, by conditions on the sizes of the example inputs."""
_LISTED: Final = 5
"""Maximum number of sizes in a message."""


class Fixing(NamedTuple):
    """The equation by which a program has one size, or one quotient of it, and the line that it comes from."""

    equation: Any
    """An expression of sympy; None if it is unknown."""
    place: Place | None

    @property
    def _code(self) -> str:
        return self.place.code.strip() if self.place else ""

    def why(self) -> str:
        """Return why the dim cannot have any size: the rest of a sentence that starts with it."""
        if _LOOP.match(self._code):
            return "the number of steps of a Python loop depends on it, and the program has those of the example inputs"
        if _BRANCH.match(self._code):
            return "a Python branch depends on it, and the program has the one of the example inputs"
        return "the model takes a quotient of it as a number, and the program has that of the example inputs"

    def remedy(self) -> str:
        """Return what to do about it."""
        static = "Leave the dim out of dynamic_shapes, and compile a program for each size"
        if _LOOP.match(self._code):
            return f"{static}. Or write the loop as a scan over torch.arange(n), where n is the number of steps, which can vary."
        if _BRANCH.match(self._code):
            return f"{static}. Or compute both and choose with torch.where and a tensor of the size, torch.tensor(x.shape[0])."
        return (
            f"{static}. Or remove what fixes the quotient: write x.shape[0] // 2 for int(x.shape[0] / 2), which fixes it as a "
            "number in a reshape does. Where a slice ends there, give a multiple as the dim, with a minimum: "
            "2 * Dim('k', min=2, max=8)."
        )


def find_fixing(error: BaseException, base: Path) -> Fixing | None:
    """Return the first equation of a size in the graph that torch.export had traced when it failed; None if there is none."""
    graph = traced_graph(error)
    return next(_fixings(graph, base), None) if graph is not None else None


def find_steps(error: BaseException, base: Path, size: int) -> Place | None:
    """Return the line of a linspace of about `size` steps in the graph as of `find_fixing`; None without.

    Its number of steps is a number in the program, unlike that of arange.
    """
    graph = traced_graph(error)
    for node in graph.nodes if graph is not None else ():
        if getattr(node.target, "overloadpacket", None) is not None and node.target.overloadpacket.__name__ == "linspace":
            steps = node.kwargs.get("steps", node.args[-1])
            if isinstance(steps, int) and abs(steps - size) <= 1:
                return place_in(node.meta.get("stack_trace") or "", base)
    return None


def find_limit(error: BaseException, base: Path) -> Place | None:
    """Return the line of the first operator that is known to limit sizes, in the graph as of `find_fixing`; None without.

    That is a pool with ceil_mode, a cdist, or a quotient of a size that is in a condition.
    """
    graph = traced_graph(error)
    for node in graph.nodes if graph is not None else ():
        value, name = node.meta.get("val"), getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        sizes = [size for size in getattr(value, "shape", ()) if hasattr(size, "node")]
        is_pool = name.startswith(("max_pool", "avg_pool")) and _has_ceil_mode(node)
        is_quotient = node.target is operator.floordiv and hasattr(value, "node")
        if (sizes and (is_pool or name == "cdist")) or (
            is_quotient and any(guard.expr.has(value.node.expr) for guard in value.node.shape_env.guards)
        ):
            return place_in(node.meta.get("stack_trace") or "", base)
    return None


def only_reshapes_exclude(error: BaseException) -> bool:
    """Return whether all conditions that exclude sizes come from how torch computes a reshape.

    The exported program then computes the model for the sizes that they exclude, too.
    """
    import sympy

    env = environment_of(error)
    guards = env.guards if env is not None else ()
    fixed = {guard.expr.lhs for guard in guards if isinstance(guard.expr, sympy.Eq)}
    excluding = [guard for guard in guards if isinstance(guard.expr, sympy.Ne) and guard.expr.lhs not in fixed]
    return bool(excluding) and all(getattr(guard.sloc.framework_loc, "name", "") in _OF_RESHAPES for guard in excluding)


def find_example(error: BaseException, dim: str) -> int | None:
    """Return the size of a dim in the example inputs; None if it is not known.

    Args:
        dim: torch's name of it, `L['x'].size()[0]`.
    """
    env = environment_of(error)
    symbols = [(source.name, symbol) for symbol, sources in env.var_to_sources.items() for source in sources] if env else []
    place = dim[dim.rindex("']") + 2 :]  # strict exports number the inputs, as L['flat_args'][0].size()[0]
    fitting = [each for each in symbols if each[0] == dim] or [each for each in symbols if each[0].endswith(place)]
    sizes = {int(env.backed_var_to_val[symbol]) for _, symbol in fitting}
    return sizes.pop() if len(sizes) == 1 else None


def _has_ceil_mode(node: Any) -> bool:
    named = zip((each.name for each in node.target._schema.arguments), node.args, strict=False)
    return bool({**dict(named), **node.kwargs}.get("ceil_mode"))


def must_not_be_fixed(method: str, program: ExportedProgram, base: Path) -> None:
    """Require that equations of sizes hold for all sizes of their dims.

    torch.export leaves it to a check when its program is called if the dim is a multiple, `4 * n`. ExecuTorch has no such check.

    Raises:
        DimSpecialized: an equation does not hold for some sizes.
    """
    for fixing in _fixings(program.graph, base):
        holds = {value: bool(fixing.equation.subs(symbol, value)) for symbol, value in sizes_of(fixing.equation, program)}
        if all(holds.values()):
            continue
        dim, length = _dim_of(program, fixing)
        sizes = [str(length.subs(symbol, value)) for symbol, value in sizes_of(fixing.equation, program) if holds[value]]
        listed = ", ".join(sizes[:_LISTED]) + (", ..." if len(sizes) > _LISTED else "")
        why = f"{fixing.why()}; it is right for {listed} only"
        raise DimSpecialized(method, dim, why, fixing.remedy(), str(fixing.place or ""))


def _fixings(graph: Graph, base: Path) -> Iterator[Fixing]:
    import sympy

    sizes = [size for node in graph.nodes for size in getattr(node.meta.get("val"), "shape", ()) if hasattr(size, "node")]
    env: Any = sizes[0].node.shape_env if sizes else None
    for guard in env.guards if env is not None else ():
        frame = guard.sloc.framework_loc
        # A condition on a remainder holds for multiples, and says so itself.
        is_fixing = isinstance(guard.expr, sympy.Eq) and guard.expr.rhs.is_number and "Mod(" not in str(guard.expr)
        if is_fixing:
            equation = guard.expr.subs(env.replacements)  # a dim that is a multiple has had a symbol of its own
            yield Fixing(equation, None if isinstance(frame, str | None) else place_of_frame(frame, base))


def _dim_of(program: ExportedProgram, fixing: Fixing) -> tuple[str, Any]:
    """Return the name and the size of an input's dim that an equation is about."""
    for node in program.graph.nodes:
        for index, size in enumerate(getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()):
            if hasattr(size, "node") and size.node.expr.free_symbols & fixing.equation.free_symbols:
                return f"dim {index} of {node.name!r}", size.node.expr
    return "a dim", fixing.equation.lhs
