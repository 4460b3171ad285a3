"""The operators that names in a recipe file select: of modules, by operator and ordinal, or by source line.

Does not import torch, like `places`.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from etfarm.server.compile.errors import name_not_found
from etfarm.server.compile.program import places
from etfarm.server.graphs.sources import source_of
from etfarm.v1.compile_pb2 import SelectedName, SelectedOperator

ARGUMENTS: Final = ("only_modules", "skip_modules", "only_operators", "skip_operators")
ANNOTATION: Final = "quantization_annotation"
"""Key of PT2E's annotation in a node's meta."""
KEPT_IN_FP32: Final = "etfarm_kept_in_fp32"
"""Key in the meta of nodes that a recipe file skips."""
_DROPOUTS: Final = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
"""Operators that do nothing, since programs that train are refused."""
_NO_OPERATORS: Final = frozenset({"getitem", "_guards_fn", *_DROPOUTS})
_MAX_NEAREST: Final = 3
_MAX_LISTED: Final = 12


@dataclass(frozen=True)
class _Operator:
    """An operator of a graph, with what can name it."""

    node: Any
    name: str
    """Such as `relu`, also for `relu_`."""
    overload: str
    module: str
    """Path of the innermost module; empty for the model itself."""
    owners: frozenset[str]
    """Paths of the modules of its own parameters and buffers."""
    aliases: frozenset[str]
    """Paths of modules that have these parameters and buffers by other names, by which the model does not call them."""
    line: str
    """`net.py:31`; empty if unknown."""

    @property
    def is_folded(self) -> bool:
        """Whether it is a batch norm behind a layer, which is folded into that before anything is quantized.

        Source: _fuse_conv_bn_ and _fuse_linear_bn_ of torchao/quantization/pt2e/utils.py 0.18.0.
        """
        layer = self.node.args[0]
        name = _name_of(layer)[0] if "batch_norm" in self.name else ""
        return "conv" in name or (name == "linear" and len(layer.args[0].meta["val"].shape) <= 2)


@dataclass
class Selection:
    """The names that a quantizer of a recipe file has."""

    names: tuple[tuple[str, str], ...]
    """Pairs of argument and name."""
    rows: list[tuple[str, str, list[Any]]] = field(default_factory=list)
    """What each name selected in the graphs that were annotated: argument, name, nodes."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Selection | None:
        """Return the selection of a quantizer's arguments; None if they name nothing."""
        values = {argument: arguments.get(argument) or () for argument in ARGUMENTS}
        pairs = [
            (argument, str(name))
            for argument, names in values.items()
            for name in ((names,) if isinstance(names, str) else names)
        ]
        return cls(tuple(pairs)) if pairs else None

    def restrict(self, quantizer: Any) -> None:
        """Let an XNNPACKQuantizer quantize what the names allow, and record what they selected."""
        annotate_all = quantizer.annotate

        def annotate(model: Any) -> Any:
            chosen = _choose(self.names, model.graph)
            allows = _filter(chosen)
            for (argument, _), nodes in chosen.items():
                for node in nodes if argument.startswith("skip") else ():
                    node.meta[KEPT_IN_FP32] = True
            quantizer.set_filter_function(allows)
            with kept_in_fp32([node for node in model.graph.nodes if not allows(node)]):
                annotated = annotate_all(model)
            self.rows += [(argument, name, nodes) for (argument, name), nodes in chosen.items() if nodes]
            return annotated

        quantizer.annotate = annotate
        quantizer.selection = self

    def listed(self) -> list[SelectedName]:
        """Return what each name selected in the annotated graphs, in the order of the names.

        Nodes keep their annotation, which other quantizers may have added, when observers and quantized operators are inserted.
        """
        nodes_by_name: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for argument, name, nodes in self.rows:
            nodes_by_name[argument, name] += nodes
        listed: list[SelectedName] = []
        for (argument, name), nodes in nodes_by_name.items():
            by_operator: dict[str, list[Any]] = defaultdict(list)
            for node in nodes:
                by_operator[_name_of(node)[0]].append(node)
            operators = [
                SelectedOperator(op=operator, count=len(group), quantized=_count_quantized(group), places=places.places(group))
                for operator, group in sorted(by_operator.items())
            ]
            quantized = _count_quantized(nodes)
            listed.append(SelectedName(argument=argument, name=name, count=len(nodes), quantized=quantized, operators=operators))
        return listed


def require_found(selection: Selection, graphs: Mapping[str, Any]) -> None:
    """Check that each name selects an operator that quantization sees.

    Args:
        selection: the names.
        graphs: the graphs that the quantizer gets, by method, before batch norms are folded.

    Raises:
        RECIPE_NAME_NOT_FOUND: a name selects nothing, or batch norms that are folded into the layers before them.
    """
    operators = {method: _operators(graph) for method, graph in graphs.items()}
    all_operators = [operator for rows in operators.values() for operator in rows]
    for argument, name in selection.names:
        matches = [operator for rows in operators.values() for operator in _matching(name, rows)]
        if any(not operator.is_folded for operator in matches):
            continue
        methods = ", ".join(operators)
        if matches:
            layer = next((other for other in all_operators if other.node is matches[0].node.args[0]), None)
            target = (layer.module if "modules" in argument else f"{layer.module}:{layer.name}") if layer else ""
            why = f"it is a batch norm, which is folded into the layer {target!r} before quantization"
            raise name_not_found(argument, name, methods, why, [target] if target else [])
        unnumbered = name.rpartition("#")[0]
        if count := max((len(_matching(unnumbered, rows)) for rows in operators.values()), default=0) if unnumbered else 0:
            why = f"{unnumbered!r} has {count} operator{'s' if count > 1 else ''}, counted from #0"
            raise name_not_found(argument, name, methods, why, [f"{unnumbered}#{count - 1}"])
        raise name_not_found(argument, name, methods, "no operator has it", _nearest(argument, name, all_operators))


def _choose(names: Iterable[tuple[str, str]], graph: Any) -> dict[tuple[str, str], list[Any]]:
    operators = _operators(graph)
    return {(argument, name): [operator.node for operator in _matching(name, operators)] for argument, name in names}


def _filter(chosen: Mapping[tuple[str, str], Sequence[Any]]) -> Callable[[Any], bool]:
    """Return a filter of the nodes that may be quantized.

    Constants may, since they belong to no module: the operators that use them decide. So do those around a dropout. An activation
    directly behind a selected operator may as well, unless it is named itself, since both are one kernel.
    """
    only = {node for (argument, _), nodes in chosen.items() if argument.startswith("only") for node in nodes}
    skip = {node for (argument, _), nodes in chosen.items() if argument.startswith("skip") for node in nodes}
    has_only = any(argument.startswith("only") for argument, _ in chosen)

    def allows(node: Any) -> bool:
        inputs = node.all_input_nodes
        if node.op != "call_function" or (node not in skip and inputs and all(map(_is_constant, inputs))):
            return True
        if _name_of(node)[0] in _DROPOUTS:
            return True
        is_chosen = node in only or (_is_activation(node) and inputs[0] in only)
        return node not in skip and (not has_only or is_chosen)

    return allows


def _is_constant(node: Any) -> bool:
    """Return whether a node is a parameter or buffer that the program does not write."""
    return node.op == "get_attr" and not any(_name_of(user)[0] == "copy" and user.args[0] is node for user in node.users)


@contextmanager
def kept_in_fp32(nodes: Sequence[Any]) -> Iterator[None]:
    """Keep nodes in fp32 where XNNPACK's quantizer does not ask its filter.

    It quantizes what can share the scale of its input, such as a pool, unless that is annotated already. And it takes an
    activation and the operator before it together or not at all, so that the activation must be any other operator here.
    """
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer_utils as utils
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    is_relu_node, kept = utils.is_relu_node, {node for node in nodes if not _is_annotated(node)}
    utils.is_relu_node = lambda node: node not in kept and is_relu_node(node)
    for node in kept:
        node.meta[ANNOTATION] = QuantizationAnnotation(_annotated=True)
    try:
        yield
    finally:
        utils.is_relu_node = is_relu_node
        for node in kept:
            node.meta.pop(ANNOTATION, None)


def _matching(name: str, operators: Sequence[_Operator]) -> list[_Operator]:
    """Return the operators that a name selects.

    A module's name selects the operators of the module and those inside of it, also where the model calls the module by another
    of its names. If there are none, it selects those that use the module's parameters: `self_attn.out_proj` of an
    nn.MultiheadAttention is only called by its enclosing module.
    """
    if ":" not in name:
        layers = {(each.name, each.owners) for each in operators if each.owners and _is_within(each.module, name)}
        own = [each for each in operators if _is_within(each.module, name) or (each.name, each.owners) in layers]
        return own or [each for each in operators if any(_is_within(path, name) for path in each.owners | each.aliases)]
    if re.fullmatch(r".+\.py:[0-9]+", name):
        return [operator for operator in operators if operator.line == name or operator.line.endswith(f"/{name}")]
    module, _, rest = name.rpartition(":")
    kind, _, ordinal = rest.partition("#")
    kind, _, overload = kind.partition(".")
    same = [
        operator
        for operator in operators
        if operator.module == module and operator.name == kind.rstrip("_") and overload in ("", operator.overload)
    ]
    return same[int(ordinal) :][:1] if ordinal else same


def _nearest(argument: str, name: str, operators: Sequence[_Operator]) -> list[str]:
    """Return the names that are spelled most like a name without operators."""
    if "modules" in argument:
        known = {
            module for each in operators for path in (each.module, *each.owners, *each.aliases) for module in _prefixes(path)
        }
    elif re.fullmatch(r".+\.py:[0-9]+", name):
        file, _, line = name.rpartition(":")
        here = {each.line for each in operators if each.line.rpartition(":")[0].endswith(file)}
        ordered = sorted(here, key=lambda text: (abs(int(text.rpartition(":")[2]) - int(line)), text))
        return ordered[:_MAX_NEAREST] or sorted({each.line for each in operators if each.line})[:_MAX_NEAREST]
    else:
        known = {f"{each.module}:{each.name}" for each in operators}
    near = difflib.get_close_matches(name[:200], sorted(known)[:5000], n=_MAX_NEAREST, cutoff=0.5)
    return near or sorted(known)[:_MAX_LISTED]


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: place + 1]) for place in range(len(parts))]


def _operators(graph: Any) -> list[_Operator]:
    """Return the operators of a graph in its order."""
    rows = []
    paths: dict[int, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "get_attr" and (address := _address(node)):
            paths[address].add(str(node.target).rpartition(".")[0])
    for node in graph.nodes:
        name, overload = _name_of(node)
        if node.op != "call_function" or name in _NO_OPERATORS:
            continue
        constants = [each for each in node.all_input_nodes if each.op == "get_attr"]
        owners = frozenset(str(each.target).rpartition(".")[0] for each in constants if "." in str(each.target))
        aliases = frozenset(path for each in constants for path in paths.get(_address(each), ()) if path)
        source = source_of(node.meta.get("stack_trace"))
        line = f"{source.file}:{source.line}" if source is not None else ""
        rows.append(_Operator(node, name, overload, _module(node), owners, aliases - owners, line))
    return rows


def _address(node: Any) -> int:
    """Return where the tensor is that a get_attr node reads; 0 if it reads something else."""
    value = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return int(value.data_ptr()) if hasattr(value, "data_ptr") else 0


def _module(node: Any) -> str:
    """Return the path of a node's innermost module, with the children of containers as in `named_modules`."""
    path = places.module_path(node) or ""
    path = re.sub(r"\.?_modules\['([^']*)'\]|\[['\"]?([^\]'\"]*)['\"]?\]", lambda key: f".{key[1] or key[2]}", path)
    return re.sub(r"@[0-9]+", "", path).strip(".")  # a second call of a module is NAME@1


def _name_of(node: Any) -> tuple[str, str]:
    """Return the name and overload of a node's operator."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    if schema is None:
        return getattr(getattr(node, "target", None), "__name__", ""), ""
    return str(schema.name).rpartition("::")[2].rstrip("_"), str(schema.overload_name) or "default"


def _is_activation(node: Any) -> bool:
    return _name_of(node)[0] in ("relu", "hardtanh", "relu6", "clamp")


def _is_within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _count_quantized(nodes: Iterable[Any]) -> int:
    return sum(map(_is_annotated, nodes))


def _is_annotated(node: Any) -> bool:
    return bool(getattr(node.meta.get(ANNOTATION), "_annotated", False))
