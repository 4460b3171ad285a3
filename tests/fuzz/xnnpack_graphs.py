"""XNNPACK's own graphs within a program, `etfarm.server.reports.trace.xnnpack`."""

from __future__ import annotations

from pathlib import Path

from etfarm.server.reports.trace import graph, xnnpack
from tests.fuzz import flatbuffers

TOKENS = (b"XH00", b"XN00", b"XN01")


def seeds() -> list[bytes]:
    """Return the graphs of a real program's delegates."""
    result = graph.read_program(Path(__file__).parent / "seeds" / "program.pte", "forward")
    return [bytes(instruction.data) for instruction in result.values() if instruction.data is not None]


def attacks() -> list[bytes]:
    """Return a graph of one value with many dims, over and over."""
    return [flatbuffers.xnnpack(10_000), flatbuffers.xnnpack(15)]


def fuzz(data: bytes) -> None:
    """A delegate's bytes are its graph, or a BadGraph."""
    try:
        result = xnnpack.read(data)
    except xnnpack.BadGraph as error:
        assert str(error)
        return
    assert all(set(node.outputs) <= result.values.keys() for node in result.nodes)
