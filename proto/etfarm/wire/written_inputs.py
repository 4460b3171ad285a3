"""The placeholders that the operators of an exported graph write to. Reads the nodes of torch.fx without importing torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem
from typing import Any, Final

MAY_RETURN_INPUT: Final = frozenset(
    {
        "atleast_1d", "atleast_2d", "atleast_3d", "alpha_dropout", "broadcast_tensors", "cartesian_prod", "conj_physical",
        "dropout", "einsum", "feature_alpha_dropout", "feature_dropout", "meshgrid", "sum_to_size", "type_as",
    }
)  # fmt: skip
"""Operators of ATen that may return an input itself, or a view of it, although their schemas do not say so."""

_CONVERT: Final = frozenset({"to", "type_as"})
"""Operators that return an input itself, or a copy: of another dtype, or with copy=True."""


def written_placeholders(graph: Any) -> dict[Any, Any]:
    """Return the placeholders that operators write to, themselves or through a view, with the first node that writes.

    In the order of the graph's placeholders. An exported program's graph keeps operators that write, such as `aten.add_`.
    """
    return _follow(graph)[1]


def viewed_placeholders(graph: Any) -> dict[Any, frozenset[Any]]:
    """Return the placeholders that each node's value is, or may be a view of; themselves for placeholders."""
    return _follow(graph)[0]


def _follow(graph: Any) -> tuple[dict[Any, frozenset[Any]], dict[Any, Any]]:
    origins: dict[Any, frozenset[Any]] = {}
    writers: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            origins[node] = frozenset([node])
        elif node.op == "call_function":
            written, returned = _effects(node, origins)
            for placeholder in written:
                writers.setdefault(placeholder, node)
            origins[node] = returned
    return origins, {node: writers[node] for node in graph.nodes if node in writers}


def written_inputs(program: Any) -> dict[str, Any]:
    """Return the user inputs of an exported program that a run changes, by name in order, with the node that writes first."""
    signature = program.graph_signature
    inputs = [spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
    by_name = {node.name: node for node in program.graph.nodes}
    writers = {node.name: writer for node, writer in written_placeholders(program.graph).items()}
    # A program after run_decompositions computes the changed inputs as outputs of their own.
    functional = {spec.target: by_name[spec.arg.name] for spec in signature.output_specs if is_mutation(spec)}
    return {name: node for name in inputs if (node := writers.get(name, functional.get(name))) is not None}


def is_mutation(spec: Any) -> bool:
    """Return whether an output of a program's signature is the changed value of a user input."""
    return bool(spec.kind.name == "USER_INPUT_MUTATION")


def written_values(node: Any) -> list[Any]:
    """Return the nodes whose values a node changes, itself or in the graphs that it calls."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return list(_nodes_in(value for argument, value in _arguments(node, schema) if argument.is_write))
    graphs, operands = _called(node)
    written = []
    for graph in graphs:
        placeholders = [each for each in graph.nodes if each.op == "placeholder"]
        inner = written_placeholders(graph)
        written += [operand for each, operand in zip(placeholders, operands, strict=False) if each in inner]
    return written


def _effects(node: Any, origins: dict[Any, frozenset[Any]]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the placeholders that a node writes to, and those that its result may be a view of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return _effects_of_submodules(node, origins)
    aliases = any(each.alias_info is not None for each in schema.returns)
    name = schema.name.partition("::")[2]
    lies = not aliases and name in MAY_RETURN_INPUT
    is_copy = any(argument.name == "copy" and value is True for argument, value in _arguments(node, schema))
    if name in _CONVERT and (is_copy or _dtype_of(node) != _dtype_of(node.args[0])):
        return frozenset(), frozenset()
    viewed = [value for argument, value in _arguments(node, schema) if lies or (aliases and argument.alias_info is not None)]
    return _origins_of(written_values(node), origins), _origins_of(viewed, origins)


def _arguments(node: Any, schema: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operator's schema with a node's values for them."""
    for place, argument in enumerate(schema.arguments):
        yield argument, node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)


def _dtype_of(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _effects_of_submodules(node: Any, origins: dict[Any, frozenset[Any]]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the effects of `getitem`, and of operators that call graphs, such as `cond`: with what follows the graphs."""
    if node.target is getitem:
        return frozenset(), _origins_of(node.args[0], origins)
    return _origins_of(written_values(node), origins), _origins_of(_called(node)[1], origins)


def _called(node: Any) -> tuple[list[Any], list[Any]]:
    """Return the graphs that a node calls, and the nodes that it gives them."""
    graphs = [(place, graph) for place, value in enumerate(node.args) if (graph := _subgraph(value)) is not None]
    return [graph for _, graph in graphs], list(_nodes_in(node.args[graphs[-1][0] + 1 :])) if graphs else []


def _subgraph(value: Any) -> Any:
    if getattr(value, "op", "") != "get_attr":
        return None
    owner = value.graph.owning_module
    return getattr(getattr(owner, str(value.target), None), "graph", None)


def _origins_of(value: Any, origins: dict[Any, frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*(origins.get(node, frozenset()) for node in _nodes_in([value])))


def _nodes_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes among values and in their lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _nodes_in(value)
        elif hasattr(value, "op"):
            yield value
