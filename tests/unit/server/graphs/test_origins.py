"""Nodes of XNNPACK's graph that lost their debug handle: each gets its operator's, or none where it is ambiguous."""

from __future__ import annotations

import itertools

import pytest

from etfarm.server.graphs.origins import Node, Operator, find


def linear(handle: int, takes: str, gives: str, *, size: int = 64, candidate: bool = True) -> list[Operator]:
    """As TO_EDGE decomposes it: the weight's transposition and the product have one handle."""
    turned = f"turned_{gives}"
    return [
        Operator((handle,), "permute_copy", (f"weight_{gives}",), (turned,), (size,), size),
        Operator((handle,), "addmm", (f"bias_{gives}", takes, turned), (gives,), (8, 8, size), 8, candidate),
    ]


def operator(handle: int, name: str, takes: str, gives: str) -> Operator:
    return Operator((handle,), name, tuple(takes.split()), (gives,), (8,) * len(takes.split()), 8)


def product(takes: int, gives: int, *, handle: int | None = None, size: int = 64) -> Node:
    return Node("FullyConnected", handle, (takes, 100 + gives, 200 + gives), (gives,), (8, size, 8), 8)


def node(kind: str, handle: int | None, takes: tuple[int, ...], gives: int) -> Node:
    return Node(kind, handle, takes, (gives,), (8,) * len(takes), 8)


def test_products_in_a_row_are_matched_in_their_order() -> None:
    nodes = [product(0, 1), node("Sigmoid", 2, (1,), 2), product(2, 3), product(3, 4)]
    operators = [*linear(1, "x", "a"), operator(2, "sigmoid", "a", "s"), *linear(3, "s", "b"), *linear(4, "b", "c")]
    assert find(nodes, operators, [1, 1, 2, 3, 3, 4, 4]) == {0: 1, 2: 3, 3: 4}


@pytest.mark.parametrize("swapped", [False, True])
def test_data_flow_identifies_origins_better_than_their_order(swapped: bool) -> None:
    """Of a delegate whose order is another one than the graph's."""
    first, second = (6, 5) if swapped else (5, 6)
    nodes = [
        product(0, 1),
        product(0, 2),
        node("Tanh", 7, (1 if swapped else 2,), 3),
        node("Sigmoid", 8, (2 if swapped else 1,), 4),
    ]
    operators = [
        *linear(5, "x", "q"), *linear(6, "x", "k"), operator(7, "tanh", "k", "t"), operator(8, "sigmoid", "q", "s"),
    ]  # fmt: skip
    for order in ([5, 5, 6, 6, 7, 8], [6, 6, 5, 5, 7, 8], [5, 6, 6, 5, 7, 8]):
        assert find(nodes, operators, order) == {0: first, 1: second}


def test_what_is_alike_is_taken_in_the_delegate_s_own_order() -> None:
    nodes = [product(0, 1), product(0, 2), product(0, 3)]
    operators = [*linear(1, "x", "q"), *linear(2, "x", "k"), *linear(3, "x", "v")]
    assert find(nodes, operators, [1, 2, 3, 1, 2, 3]) == {0: 1, 1: 2, 2: 3}
    assert find(nodes, operators, [3, 3, 1, 1, 2, 2]) == {0: 3, 1: 1, 2: 2}
    # It begins with one and ends with it.
    assert find(nodes, operators, [1, 2, 3, 3, 2, 1]) == {0: None, 1: None, 2: None}


def test_nothing_is_guessed_where_more_operators_fit_than_there_are_nodes() -> None:
    nodes = [product(0, 1)]
    operators = [*linear(1, "x", "q"), *linear(2, "x", "k")]
    assert find(nodes, operators, [1, 1, 2, 2]) == {0: None}
    assert find(nodes, [*linear(1, "x", "q"), *linear(2, "x", "k", candidate=False)], [1, 1, 2]) == {0: 1}
    assert find([*nodes, product(0, 2, handle=1)], operators, [1, 1, 2, 2]) == {0: 2}
    # All that fit are of one operator of the user's.
    assert find(nodes, [*linear(4, "x", "a"), *linear(4, "x", "b")], [4, 4]) == {0: 4}


def test_sizes_contradict() -> None:
    operators = [*linear(1, "x", "q", size=64), *linear(2, "x", "k", size=32)]
    assert find([product(0, 1, size=32), product(0, 2, size=64)], operators, [1, 1, 2, 2]) == {0: 2, 1: 1}
    assert find([product(0, 1, size=16)], operators, [1, 1, 2, 2]) == {0: None}
    # Of dynamic ones nothing is known.
    assert find([product(0, 1, size=0), product(1, 2, size=0)], [*linear(1, "x", "q"), *linear(2, "q", "k")], [1, 2]) == {
        0: 1,
        1: 2,
    }


def test_a_batch_norm_becomes_a_convolution_of_its_own_size() -> None:
    nodes = [
        node("Conv2d", 1, (0, 10, 11), 1), node("Add", 3, (1, 0), 2),
        Node("DepthwiseConv2d", None, (2, 12, 13), (3,), (8, 3, 3), 8), node("Sigmoid", 5, (3,), 4),
    ]  # fmt: skip
    norm = "_native_batch_norm_legit_no_training"
    operators = [
        operator(1, "convolution", "x w", "c"), operator(2, norm, "c", "folded"), operator(3, "add", "folded x", "sum"),
        operator(4, norm, "sum", "alone"), operator(5, "sigmoid", "alone", "s"),
    ]  # fmt: skip
    assert find(nodes, operators, [1, 2, 3, 4, 5]) == {2: 4}


def test_what_is_left_of_a_long_concatenation_is_of_the_same_one() -> None:
    nodes = [node("Concatenate5", 4, (1, 2, 3, 4, 5), 6), node("Concatenate2", None, (6, 1), 7)]
    assert find(nodes, [operator(4, "cat", "a b", "c")], [4]) == {1: 4}


def test_what_backends_insert_is_of_no_operator_and_other_kinds_cannot_be_told() -> None:
    kinds = ["StaticTranspose", "StaticReshape", "Convert", "Copy", "Softmax"]
    nodes = [node(kind, None, (at,), at + 1) for at, kind in enumerate(kinds)]
    assert find(nodes, [operator(1, "_softmax", "x", "y")], [1]) == {4: None}
    assert find([], [], []) == {}


def test_many_in_a_row_and_beside_each_other_are_all_reported() -> None:
    """Forty blocks of three that are alike, and one behind them that takes all three."""
    nodes: list[Node] = []
    operators: list[Operator] = []
    value, at, number = 0, "x", itertools.count(1)
    handles = []
    for block in range(40):
        beside = [next(number) for _ in range(3)]
        for handle in beside:
            nodes.append(product(value, 1000 * handle))
            operators += linear(handle, at, f"v{handle}")
        joined = next(number)
        nodes.append(node("Add", joined, tuple(1000 * handle for handle in beside), 1000 * joined))
        operators.append(operator(joined, "add", " ".join(f"v{handle}" for handle in beside), f"j{block}"))
        handles += [*beside, joined]
        value, at = 1000 * joined, f"j{block}"
    result = find(nodes, operators, handles)
    assert result == {place: handles[place] for place, one in enumerate(nodes) if one.handle is None}
    assert len(result) == 120
