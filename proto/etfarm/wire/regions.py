"""Regions of torch.no_grad and torch.autocast, which torch.export keeps as calls of graphs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_GRADIENTS: Final = "wrap_with_set_grad_enabled"
_AUTOCAST: Final = "wrap_with_autocast"
_ENTER, _EXIT = "_enter_autocast", "_exit_autocast"


def inline_regions(program: Any) -> list[Any]:
    """Put the operators of regions into the graph that calls them, except those that torch.autocast changes.

    Quantizers look at no operator within a region, and torch 2.13 cannot load an archive with a region that returns nothing. A
    region in which torch.autocast is off is put into the graph, unless it is on around that region.

    Returns:
        The regions that return nothing and stay.
    """
    stay = _inline(program.graph_module, frozenset())
    program.graph_module.recompile()
    name_outputs(program)
    return stay


def _inline(module: Any, on: frozenset[str]) -> list[Any]:
    """Put the regions of a graph into it, and the regions of the graphs that it calls into these.

    Args:
        module: the module of the graph.
        on: kinds of devices for which torch.autocast is on around the graph.
    """
    graph, stay = module.graph, []
    for node in graph.nodes:
        for value in node.all_input_nodes:
            value.users.setdefault(node)  # torch forgets one where two regions follow each other
    left: list[tuple[Any, frozenset[str]]] = []
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        name = getattr(node.target, "__name__", "")
        called = [(each, body) for each in node.args if hasattr(body := _attribute(module, each), "graph")]
        within, changes = _autocast(node.args, on) if name in (_AUTOCAST, _ENTER) else (on, False)
        if name == _ENTER:  # a program with branches has no regions of torch.autocast, but begins and ends of it
            left.append((None if changes else node, on))
            on = within
        elif name == _EXIT and left:
            entered, on = left.pop()
            if entered is not None:
                graph.erase_node(node)
                graph.erase_node(entered)
        for _, body in called:
            stay += _inline(body, within)
            body.recompile()
        if name not in (_GRADIENTS, _AUTOCAST):
            continue
        ((inner, body),) = called
        if not changes and not any("set_.source_Tensor" in str(each.target) for each in body.graph.nodes):
            _put(module, node, inner, body)
        elif not node.users:
            stay.append(node)
    return stay


def _autocast(args: Sequence[Any], on: frozenset[str]) -> tuple[frozenset[str], bool]:
    """Return the kinds of devices for which torch.autocast is on within a region, and whether that changes its operators.

    Args:
        args: kind of device, dtype, whether it is on, and others.
        on: kinds of devices for which it is on around the region.
    """
    device, _, is_on, *_ = args
    return (on | {device}, True) if is_on else (on - {device}, device in on)


def _attribute(module: Any, value: Any) -> Any:
    return getattr(module, value.target, None) if getattr(value, "op", "") == "get_attr" else None


def _put(module: Any, region: Any, inner: Any, body: Any) -> None:
    """Put the operators of one region into the graph in place of it.

    Args:
        inner: the node that is the region's graph.
        body: the module of the region's graph.
    """
    graph = module.graph
    values = iter(region.args[region.args.index(inner) + 1 :])
    copies: dict[Any, Any] = {}
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(values)
            elif node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copies[node].target = _take(module, node.target, getattr(body, node.target))
    for item in list(region.users):
        value = body.graph.output_node().args[0][item.args[1]]
        item.replace_all_uses_with(copies.get(value, value))
        graph.erase_node(item)
    graph.erase_node(region)
    if not inner.users:
        graph.erase_node(inner)
        delattr(module, inner.target)


def _take(module: Any, name: str, value: Any) -> str:
    """Give a module an attribute of another one; return its name there."""
    while hasattr(module, name):
        name = f"{name}_1"
    setattr(module, name, value)
    return name


def name_outputs(program: Any) -> None:
    """Let the signature of a program name the nodes that its graph returns."""
    specs = program.graph_signature.output_specs
    nodes = program.graph.output_node().args[0]
    names = {spec.arg.name: node.name for spec, node in zip(specs, nodes, strict=True) if hasattr(node, "op")}
    for argument in (*(spec.arg for spec in specs), *(program.module_call_graph[0].signature.outputs or ())):
        argument.name = names.get(argument.name, argument.name)
