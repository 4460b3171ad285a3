"""The tensors that keep state from one execution to the next, such as a KV cache, are found in the instructions of a .pte."""

from __future__ import annotations

import pytest

from etfarm.server.compile.inspect import facts, sizes
from etfarm.server.compile.inspect.program import ExecutionPlan, Program, ProgramValue, TensorValue, _Flow
from tests.support.programs import program

CACHE_BYTES = 4 * 64 * 32 * 4
"""Keys and values of two layers: 64 tokens of 32 values of 4 bytes."""


@pytest.mark.slow(reason="exports language models")
@pytest.mark.parametrize("kind", ["start", "vector", "static", "xnnpack", "custom", "shared"])
def test_a_kv_cache_is_state_however_it_is_exported(kind: str) -> None:
    described = facts.of_program(sizes.read(program(f"decoder_{kind}").path).program).methods
    methods = ("prefill", "decode") if kind == "shared" else ("forward",)
    assert [described[name].state_bytes for name in methods] == [CACHE_BYTES] * len(methods)
    assert sum(described[methods[0]].planned_bytes) > CACHE_BYTES


@pytest.mark.parametrize("name", ["add", "conv"])
def test_a_program_without_buffers_has_no_state(name: str) -> None:
    (method,) = facts.of_program(sizes.read(program(name).path).program).methods.values()
    assert method.HasField("state_bytes") and method.state_bytes == 0


@pytest.mark.parametrize("dims", [(2**31 - 1,) * 4, (-1, 8)])
def test_impossible_dims_of_state_leave_its_size_unknown(dims: tuple[int, ...]) -> None:
    state = TensorValue("float32", dims, tuple(range(len(dims))), is_static=True, place=(1, 0))
    plan = ExecutionPlan("forward", [state], [], [], [], [], [16], state=[0])
    assert not facts.of_program(Program([plan], 0, [], [])).methods["forward"].HasField("state_bytes")


def test_an_impossible_size_of_a_segment_counts_as_nothing() -> None:
    described = sizes.Described(Program([], 0, [], [(1 << 64) - 1]), 8)
    assert (sizes.of_program(described).program_bytes, sizes.of_program(described).constant_bytes) == (8, 0)


def test_a_list_that_is_read_any_number_of_times_is_followed_once() -> None:
    tensors = [TensorValue("float32", (1,), (0,), True, (1, number)) for number in range(50_000)]
    lists = {len(tensors): tuple(range(len(tensors)))}
    flow = _Flow([*tensors, None, None], lists, [0])
    for _ in range(10):
        flow.call((*lists,) * 50_000 + (len(tensors) + 1,))
    assert list(flow.state) == list(range(1, len(tensors)))


def test_a_list_that_a_kernel_writes_is_no_state() -> None:
    values: list[ProgramValue] = [TensorValue("float32", (1,), (0,), True, (1, number)) for number in range(3)]
    flow = _Flow([*values, None], {3: (0, 1)}, [2])
    flow.call((2, 3))
    flow.call((0, 3, 1, 2))
    assert not flow.state
