"""Our reader of a program's description: equal to ExecuTorch's, and strict with what it does not know."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from etfarm.server.compile.inspect import program, sizes
from etfarm.wire.flatbuffer import BadBuffer, Table

SEEDS = Path(__file__).parents[4] / "fuzz" / "seeds"


@pytest.mark.parametrize("name", ["add", "program"])
def test_executorchs_reader_sees_the_same(name: str) -> None:
    pytest.importorskip("executorch")
    from executorch.exir import schema
    from executorch.exir._serialize._program import _flatbuffer_to_program

    path = SEEDS / f"{name}.pte"
    described = sizes.read(path)
    theirs = _flatbuffer_to_program(path.read_bytes()[: described.program_bytes])
    ours = described.program
    assert ours.segment_bytes == [segment.size for segment in theirs.segments]
    assert ours.constant_bytes == sum(len(buffer.storage) for buffer in theirs.constant_buffer)
    assert ours.inline_data_bytes == [len(data.data) for data in theirs.backend_delegate_data]
    for plan, expected in zip(ours.execution_plan, theirs.execution_plan, strict=True):
        assert (plan.name, plan.inputs, plan.outputs) == (expected.name, list(expected.inputs), list(expected.outputs))
        assert plan.planned_bytes == list(expected.non_const_buffer_sizes[1:])
        assert plan.operators == [f"{op.name}.{op.overload}" if op.overload else op.name for op in expected.operators]
        assert [(d.backend, d.index) for d in plan.delegates] == [(d.id, d.processed.index) for d in expected.delegates]
        for value, their_value in zip(plan.values, (value.val for value in expected.values), strict=True):
            if isinstance(their_value, schema.Tensor):
                is_static = their_value.shape_dynamism == schema.TensorShapeDynamism.STATIC
                assert isinstance(value, program.TensorValue)
                assert (value.sizes, value.dim_order) == (tuple(their_value.sizes), tuple(their_value.dim_order))
                assert value.is_static == is_static
            elif isinstance(their_value, schema.Int | schema.Bool | schema.Double | schema.String):
                assert value == next(iter(vars(their_value).values()))
            else:
                assert value is None


def test_each_dtype_of_executorch_has_torchs_name() -> None:
    torch = pytest.importorskip("torch")
    from executorch.exir.scalar_type import ScalarType

    assert set(program.DTYPES) == {int(kind) for kind in ScalarType}
    assert [name for name in program.DTYPES.values() if not isinstance(getattr(torch, name, None), torch.dtype)] == []


def union(kind: int) -> bytes:
    """Return a flatbuffer whose root is a union of the kind with an empty table."""
    layout = struct.pack("<HHHH", 8, 12, 4, 8)
    table = struct.pack("<iBxxxI", 8, kind, 8)
    empty = struct.pack("<HHi", 4, 4, 4)
    return struct.pack("<I", 12) + layout + table + empty


@pytest.mark.parametrize(("kind", "value"), [(1, None), (2, 0), (3, False), (4, 0.0), (6, ""), (7, None), (11, None)])
def test_a_value_of_each_kind_is_read(kind: int, value: object) -> None:
    table = Table.root(union(kind))
    read = program.read_value(kind, table.table(1))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("kind", [0, 12, 255])
def test_a_value_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(BadBuffer, match=f"unknown kind {kind}"):
        program.read_value(kind, Table.root(union(kind)).table(1))


def test_a_program_whose_instructions_are_damaged_is_refused() -> None:
    data = (SEEDS / "add.pte").read_bytes()
    refused = 0
    for at in range(40, len(data) - 4, 4):
        damaged = bytearray(data)
        struct.pack_into("<I", damaged, at, 0xFFFFFFF0)
        try:
            program.parse(bytes(damaged))
        except BadBuffer:
            refused += 1
    assert refused > len(data) // 16, "offsets, sizes and kinds that lead nowhere"
