"""Which operators an instruction executes: as an exhaustive search finds them, in time that grows with their number."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.numerics import edge
from etfarm.server.reports.numerics.edge import EdgeGraph, Operator, OutputSpec
from etfarm.server.reports.trace.graph import Instruction, Node, base_name
from etfarm.server.reports.trace.recording import Stored

NAMES = ("add", "mul", "dequantize_per_tensor")
SHAPES: tuple[tuple[int | None, ...], ...] = ((), (2,), (None,), (3,))
Handles = Mapping[int, Sequence[int]]
Program = Mapping[tuple[int, int], Instruction]
Recorded = Mapping[int, Sequence[Stored]]


def operator(index: int, name: str, handles: Sequence[int], takes: Sequence[str], gives: Sequence[OutputSpec]) -> Operator:
    node = Node(f"aten.{name}.default", None, None)
    return Operator(index, node, tuple(handles), tuple(takes), tuple(gives), ())


def graph(operators: Sequence[Operator], outputs: frozenset[str] = frozenset()) -> EdgeGraph:
    users: dict[str, list[int]] = {}
    for each in operators:
        for name in dict.fromkeys(each.takes):
            users.setdefault(name, []).append(each.index)
    return EdgeGraph(tuple(operators), {name: tuple(indexes) for name, indexes in users.items()}, outputs)


def searched(own: EdgeGraph, handles: Handles, program: Program, recorded: Recorded) -> dict[int, tuple[Operator, ...]]:
    """Return what `edge.executed` must, by comparing every operator of a handle each time."""
    by_handle: dict[int, list[Operator]] = {}
    for each in own.operators:
        for handle in each.handles:
            by_handle.setdefault(handle, []).append(each)
    producers = {output.name: each.index for each in own.operators for output in each.gives}
    groups: dict[int, list[Operator]] = {}
    done: set[int] = set()

    def rank(candidate: Operator, values: Sequence[Stored]) -> tuple[bool, bool, int]:
        is_misfit = bool(values) and len(candidate.gives) == 1 and not edge.fits(candidate.gives[0], values[-1])
        lacks = any(producers[name] not in done for name in candidate.takes if name in producers)
        return is_misfit, lacks, candidate.index

    for (_, number), instruction in sorted(program.items()):
        group = groups.setdefault(number, [])
        known = [handle for handle in handles.get(number, ()) if by_handle.get(handle)]
        values = recorded.get(number, ()) if len(known) == 1 else ()
        for handle in known:
            left = by_handle[handle]
            if not instruction.delegate:
                left = [each for each in left if base_name(each.node.op_type) == base_name(instruction.name)] or left
            if left and (instruction.delegate or not group):
                chosen = min(left, key=lambda each: rank(each, values))
                by_handle[handle].remove(chosen)
                group.append(chosen)
                done.add(chosen.index)
    place = {each.index: number for number, group in groups.items() for each in group}
    for number, group in list(groups.items()):
        for each in [member for member in group if base_name(member.node.op_type).startswith("dequantize")]:
            twins = [other for other in own.operators if (other.node, other.takes) == (each.node, each.takes)]
            users = [user for output in each.gives for user in own.users.get(output.name, ())]
            owner = next((place[user] for user in users if user in place), number)
            if len(twins) > 1 and owner != number:
                groups[number].remove(each)
                groups[owner].append(each)
    return {number: tuple(sorted(group, key=lambda each: each.index)) for number, group in groups.items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[EdgeGraph, Handles, Program, Recorded]:
    values = st.sampled_from([f"v{index}" for index in range(8)])
    specs = st.builds(OutputSpec, values, st.sampled_from(["float32", "int8", None]), st.sampled_from(SHAPES))
    few_handles = st.lists(st.integers(1, 4), max_size=3)
    operators = [
        operator(
            index, draw(st.sampled_from(NAMES)), draw(few_handles), draw(st.lists(values, max_size=3)),
            draw(st.lists(specs, max_size=2)),
        )
        for index in range(draw(st.integers(0, 10)))
    ]  # fmt: skip
    numbers = range(draw(st.integers(0, 6)))
    program = {
        (draw(st.integers(0, 1)), number): Instruction(f"aten.{draw(st.sampled_from(NAMES))}.out", draw(st.booleans()))
        for number in numbers
    }
    stored = st.builds(Stored, st.sampled_from(["float32", "int8"]), st.sampled_from([(), (2,), (3,)]), st.just(()), st.just(0))
    recorded = {number: draw(st.lists(stored, max_size=2)) for number in numbers}
    handles = {number: draw(st.lists(st.integers(1, 5), max_size=6)) for number in numbers}
    return graph(operators, frozenset(draw(st.lists(values, max_size=2)))), handles, program, recorded


@given(cases())
def test_the_operators_are_those_of_an_exhaustive_search(case: tuple[EdgeGraph, Handles, Program, Recorded]) -> None:
    groups = edge.executed(*case)
    assert groups == searched(*case)
    own = case[0]
    for group in groups.values():
        members = {each.index for each in group}
        assert own.leaving(group) == [
            (each, at)
            for each in {each.index: each for each in group}.values()
            for at, output in enumerate(each.gives)
            if output.name in own.outputs or any(user not in members for user in own.users.get(output.name, ()))
        ]


def calls_of(case: tuple[EdgeGraph, Handles, Program, Recorded]) -> int:
    """Return the number of function calls that a case takes, which depends on no clock."""
    count = 0

    def profile(frame: object, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        edge.executed(*case)
    finally:
        sys.setprofile(former)
    return count


def steps(count: int, name: str, *, is_delegate: bool) -> tuple[EdgeGraph, Handles, Program, Recorded]:
    """Return a decomposed operator of `count` parts with one handle, such as an LSTM, and the instructions that run it."""
    spec = OutputSpec("", "float32", (2,))
    operators = [operator(index, name, [7], ["x"], [OutputSpec(f"v{index}", spec.dtype, spec.shape)]) for index in range(count)]
    if is_delegate:
        return graph(operators), {0: [7] * count}, {(0, 0): Instruction("XnnpackBackend", True)}, {}
    numbers = range(count)
    program = {(0, number): Instruction(f"aten.{name}.out", False) for number in numbers}
    value = Stored("float32", (2,), (1,), 0)
    return graph(operators), {number: [7] for number in numbers}, program, {number: [value] for number in numbers}


@pytest.mark.parametrize("name", ["add", "dequantize_per_tensor"])
@pytest.mark.parametrize("is_delegate", [True, False])
def test_ten_times_the_operators_take_ten_times_the_steps(name: str, is_delegate: bool) -> None:
    small, large = (calls_of(steps(count, name, is_delegate=is_delegate)) for count in (50, 500))
    assert large < 15 * small
