"""Kernels of a profile against the nodes of a graph: every rule by an example, and no map where one event is off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etfarm.server.reports.trace.kernels import Match, Part, Unaligned, align, family
from etfarm.server.reports.trace.xnnpack import Value, XGraph, XNode

FP32, QINT8, QDINT8 = 1, 3, 9


def chain(*kinds: str, types: Sequence[int] = ()) -> XGraph:
    """Nodes in a row, each of which takes the output of the one before it; `Add!` is clamped."""
    nodes = [XNode(kind.rstrip("!"), at, kind.endswith("!"), (at,), (at + 1,)) for at, kind in enumerate(kinds)]
    datatypes = [*types, *[FP32] * (len(kinds) + 1 - len(types))]
    return XGraph(tuple(nodes), {at: Value(kind, at == len(kinds)) for at, kind in enumerate(datatypes)})


def numbers(matches: Sequence[Match]) -> list[tuple[int, ...]]:
    return [(match.part.node, *(part.node for part in match.fused)) for match in matches]


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("Convolution (NHWC, F32) IGEMM #12", "Convolution"),
        ("Fully Connected (NC, QDU8, F32, QC8W) GEMM #1", "Fully Connected"),
        ("Mean (ND) Reduce2 #1", "Mean"),
        ("Invalid Unary Op #3", "Invalid Unary Op"),
        ("Clamp (NC)", "Clamp"),
    ],
)
def test_a_family_is_the_name_without_layout_and_number(event: str, name: str) -> None:
    assert family(event) == name


def test_a_clamped_binary_is_two_kernels() -> None:
    result = align(chain("Conv2d", "Add!", "StaticTranspose"), ["Convolution (NHWC, F32) IGEMM #1", "Add", "Clamp", "Transpose"])
    assert result == [Match(Part(0)), Match(Part(1)), Match(Part(1, clamp=True)), Match(Part(2))]


SQUARED = XGraph((XNode("Multiply", 1, False, (0, 0), (1,)),), {0: Value(), 1: Value(output=True)})
NEEDED_CLAMP = XGraph(
    (
        XNode("MaxPooling2d", 1, False, (0,), (1,)),
        XNode("Clamp", 2, False, (1,), (2,)),
        XNode("Add", 3, False, (1, 2), (3,)),
    ),
    {at: Value(output=at == 3) for at in range(4)},
)
TRANSPOSED = XGraph(
    (XNode("StaticTranspose", 1, False, (5,), (1,)), XNode("BatchMatrixMultiply", 2, False, (0, 1), (2,))),
    {at: Value(output=at == 2) for at in range(6)},
)
DYNAMIC = chain("Convert", "FullyConnected", types=(FP32, QDINT8))
LOOKUP = chain("Conv2d", "Convert", "Gelu", "Convert", "Conv2d", types=(QINT8, QINT8, FP32, FP32, QINT8, QINT8))


@pytest.mark.parametrize(
    ("graph", "events", "expected"),
    [
        pytest.param(
            chain("MaxPooling2d", "Clamp", "Clamp"), ["Max Pooling"], [(0, 1, 2)], id="clamps behind a kernel that can clamp"
        ),
        pytest.param(chain("MaxPooling2d", "Clamp"), ["Max Pooling", "Clamp"], [(0,), (1,)], id="one that has a kernel"),
        pytest.param(NEEDED_CLAMP, ["Max Pooling", "Clamp", "Add"], [(0,), (1,), (2,)], id="one whose input is needed elsewhere"),
        pytest.param(chain("StaticConstantPad", "Conv2d"), ["Convolution"], [(1, 0)], id="padding runs in the convolution"),
        pytest.param(chain("Sigmoid", "Copy", "Tanh"), ["Sigmoid", "TanH"], [(0, 1), (2,)], id="a copy in the kernel before it"),
        pytest.param(chain("StaticReshape", "StaticReshape"), ["Static Reshape"], [(1, 0)], id="the second of two reshapes"),
        pytest.param(TRANSPOSED, ["Batch Matrix Multiply"], [(1, 0)], id="a transposed second operand is read so"),
        pytest.param(TRANSPOSED, ["Transpose", "Batch Matrix Multiply"], [(0,), (1,)], id="or has a kernel"),
        pytest.param(DYNAMIC, ["Fully Connected"], [(1, 0)], id="a linear quantizes its own input"),
        pytest.param(DYNAMIC, ["Convert", "Fully Connected"], [(0,), (1,)], id="or another kernel does"),
        pytest.param(
            LOOKUP, ["Convolution", "Invalid Unary Op", "Convolution"], [(0,), (3, 1, 2), (4,)],
            id="elementwise nodes between two 8-bit values are one lookup",
        ),
        pytest.param(chain("Square", "GlobalAvgPooling2d"), ["Mean Squared"], [(1, 0)], id="a square before a mean"),
        pytest.param(SQUARED, ["Square"], [(0,)], id="a product with itself"),
    ],
)  # fmt: skip
def test_a_node_without_a_kernel_runs_in_its_neighbours(
    graph: XGraph, events: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert numbers(align(graph, events)) == expected


@pytest.mark.parametrize(
    ("graph", "events"),
    [
        (NEEDED_CLAMP, ["Max Pooling", "Add"]),
        (chain("StaticConstantPad", "MaxPooling2d"), ["Max Pooling"]),
        (chain("Convert", "FullyConnected", types=(FP32, QINT8)), ["Fully Connected"]),
        (LOOKUP, ["Convolution", "Convert", "GELU", "Convert", "Convolution"]),
    ],
    ids=["a clamp that is needed", "padding of a pool", "a linear of static numbers", "a lookup in parts"],
)
def test_a_node_that_no_neighbour_runs_needs_its_kernel(graph: XGraph, events: list[str]) -> None:
    with pytest.raises(Unaligned):
        align(graph, events)


def test_a_binary_s_clamp_can_be_part_of_a_lookup() -> None:
    graph = chain("Add!", "Convert", "Gelu", "Convert", "Conv2d", types=(QINT8, QINT8, FP32, FP32, QINT8, QINT8))
    assert align(graph, ["Add", "Invalid Unary Op", "Convolution"]) == [
        Match(Part(0)),
        Match(Part(3), (Part(0, clamp=True), Part(1), Part(2))),
        Match(Part(4)),
    ]


def test_what_fits_in_two_ways_leaves_the_other_kernels_certain() -> None:
    graph = chain("Sigmoid", "StaticReshape", "StaticReshape", "StaticReshape", "Tanh")
    assert align(graph, ["Sigmoid", "Static Reshape", "Static Reshape", "TanH"]) == [
        Match(Part(0)),
        Match(Part(1), alternatives=(Part(2),)),
        Match(Part(3)),
        Match(Part(4)),
    ]


def test_a_graph_with_too_many_assignments_is_refused() -> None:
    graph = chain("Sigmoid", *["StaticReshape"] * 700)
    with pytest.raises(Unaligned, match="too many assignments"):
        align(graph, ["Sigmoid", *["Static Reshape"] * 350])


def test_reshapes_without_a_kernel_are_fused_into_the_one_that_has_it() -> None:
    graph = chain("StaticReshape", "StaticReshape", "StaticReshape", "Conv2d")
    first, second = align(graph, ["Static Reshape", "Convolution"])
    assert first == Match(Part(2), (Part(0), Part(1)))
    assert second == Match(Part(3))


def test_the_counts_and_the_first_difference_are_reported() -> None:
    with pytest.raises(Unaligned, match=r"2 kernels ran for 3 nodes; kernel 1 is 'TanH \(NC\) #1' where node 1 is Softmax"):
        align(chain("Sigmoid", "Softmax", "Tanh"), ["Sigmoid (NC) #1", "TanH (NC) #1"])
    with pytest.raises(Unaligned, match="kernel 1 is no kernel where node 1 is Softmax"):
        align(chain("Sigmoid", "Softmax"), ["Sigmoid"])
    with pytest.raises(Unaligned, match="kernel 1 is 'Softmax' where node 1 is no node"):
        align(chain("Sigmoid"), ["Sigmoid", "Softmax"])
    assert align(chain(), []) == []


PLAIN = {
    "Conv2d": "Convolution", "Softmax": "Softmax", "Sigmoid": "Sigmoid", "GlobalAvgPooling2d": "Mean",
    "Concatenate2": "Copy", "StaticSlice": "Slice", "StaticTranspose": "Transpose", "Hardswish": "HardSwish",
}  # fmt: skip
"""Kinds that have one kernel each wherever they stand in a row of these."""

KINDS = st.lists(st.sampled_from(sorted(PLAIN)), min_size=1, max_size=30)


@given(KINDS)
def test_nodes_that_each_have_a_kernel_are_matched_in_order(kinds: list[str]) -> None:
    events = [f"{PLAIN[kind]} (X) #{at}" for at, kind in enumerate(kinds)]
    assert align(chain(*kinds), events) == [Match(Part(at)) for at in range(len(kinds))]


@given(KINDS, st.data())
def test_one_kernel_more_or_less_is_no_alignment(kinds: list[str], data: st.DataObject) -> None:
    events = [PLAIN[kind] for kind in kinds]
    at = data.draw(st.integers(0, len(events) - 1))
    changed = data.draw(st.sampled_from([events[:at] + events[at + 1 :], [*events[:at], "Sigmoid", *events[at:]]]))
    with pytest.raises(Unaligned):
        align(chain(*kinds), changed)


@given(KINDS, st.data())
def test_kernels_in_another_order_are_no_alignment(kinds: list[str], data: st.DataObject) -> None:
    events = [PLAIN[kind] for kind in kinds]
    changed = data.draw(st.permutations(events))
    assume(changed != events)
    with pytest.raises(Unaligned):
        align(chain(*kinds), changed)


ANY = st.lists(
    st.sampled_from([*PLAIN, "Add!", "Clamp", "MaxPooling2d", "StaticReshape", "Copy", "StaticConstantPad"]), max_size=12
)
EVENTS = st.lists(
    st.sampled_from([*PLAIN.values(), "Add", "Clamp", "Max Pooling", "Static Reshape", "Constant Pad"]), max_size=12
)


@given(ANY, EVENTS)
def test_a_match_is_of_the_node_s_family_in_order_and_complete(kinds: list[str], events: list[str]) -> None:
    graph = chain(*kinds)
    try:
        matches = align(graph, events)
    except Unaligned:
        return
    assert len(matches) == len(events)
    certain = [match.part.node for match in matches if not match.alternatives]
    assert certain == sorted(set(certain))
    taken = [part for match in matches for part in (match.part, *match.fused) if not match.alternatives]
    assert len(taken) == len(set(taken))
    families = {**PLAIN, "Add": "Add", "Clamp": "Clamp", "MaxPooling2d": "Max Pooling", "StaticReshape": "Static Reshape"}
    families |= {"StaticConstantPad": "Constant Pad", "Copy": "Copy"}
    for match, event in zip(matches, events, strict=True):
        for part in (match.part, *match.alternatives):
            assert event == ("Clamp" if part.clamp else families[graph.nodes[part.node].kind])


@given(ANY, EVENTS)
def test_candidates_are_those_of_all_alignments_tried_one_by_one(kinds: list[str], events: list[str]) -> None:
    from etfarm.server.reports.trace import kernels

    graph = chain(*kinds)
    parts, split = kernels._split(graph)
    roles = kernels._roles(split)

    def all_runs(index: int, at: int) -> list[tuple[int, ...]]:
        if index == len(roles):
            return [()] if at == len(events) else []
        skipped = all_runs(index + 1, at) if roles[index].optional else []
        ran = [(index, *rest) for rest in all_runs(index + 1, at + 1)] if roles[index].may_run(events, at) else []
        return skipped + ran

    alignments = all_runs(0, 0)
    if not alignments:
        with pytest.raises(Unaligned):
            align(graph, events)
        return
    expected = [tuple(parts[index] for index in sorted(set(column))) for column in zip(*alignments, strict=True)]
    assert [(match.part, *match.alternatives) for match in align(graph, events)] == expected
