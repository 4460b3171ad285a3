"""Remainders of sizes and other numbers: ExecuTorch computes them as C does, with the sign of the dividend.

Python's have the sign of the divisor, so that `-n % 4` is never negative. Differences of sizes and numbers
that come from a tensor may be negative. Quotients (`//`) are rounded down in both.

Source: `executorch_prim::mod.Scalar` of executorch/kernels/prim_ops/register_prim_ops.cpp 1.5.1.
"""

from __future__ import annotations

import operator
from typing import Any

import torch


def compute_as_python(edge: Any) -> None:
    """Replace the remainders of an edge program that C and Python may compute differently by others that both compute alike.

    Not earlier: torch sees that `(n % 4 + 4) % 4` is the same number as `n % 4`, and would drop the rest.

    Args:
        edge: the program, whose graphs are changed.
    """
    for module in edge.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            nodes = [node for node in module.graph.nodes if node.target is operator.mod and _may_differ(*node.args)]
            for node in nodes:
                _replace(module, node)
            if nodes:
                module.recompile()


def _replace(module: torch.fx.GraphModule, node: Any) -> None:
    dividend, divisor = node.args
    users = list(node.users)

    def call(target: Any, *args: Any) -> Any:
        new = module.graph.call_function(target, args)
        new.meta = {**node.meta, "val": target(*map(_value, args))}
        return new

    with module.graph.inserting_after(node):
        if _is_at_least(1, divisor):  # keeps the bounds of a size, from which memory is planned
            second = call(operator.add, node, divisor)
            with module.graph.inserting_after(second):
                result = call(operator.mod, second, divisor)
        else:
            quotient = call(operator.floordiv, dividend, divisor)
            with module.graph.inserting_after(quotient):
                product = call(operator.mul, quotient, divisor)
            with module.graph.inserting_after(product):
                result = call(operator.sub, dividend, product)
    for user in users:
        user.replace_input_with(node, result)
    if not node.users:
        module.graph.erase_node(node)


def _may_differ(dividend: Any, divisor: Any) -> bool:
    return not (_is_at_least(0, dividend) and _is_at_least(1, divisor))


def _is_at_least(least: int, argument: Any) -> bool:
    """Return whether a number in a graph is never less than another."""
    value = _value(argument)
    if isinstance(value, torch.SymInt):
        value = value.node.shape_env.bound_sympy(value.node.expr).lower
    return bool(value >= least)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
