"""Programs (.pte) that users send, as the server reads them: its screen, and what a report takes of their instructions."""

from __future__ import annotations

import tempfile
from pathlib import Path

from etfarm.server.compile.screening import screen
from etfarm.server.reports.trace import graph, xnnpack
from etfarm.wire.errors import EtfarmError
from tests.fuzz import flatbuffers

TOKENS = (b"ET12", b"eh00", b"XH00", b"forward", b"XnnpackBackend")


def seeds() -> list[bytes]:
    """Return a real program with XNNPACK's delegates and a kernel between them, and one of kernels alone."""
    return [(Path(__file__).parent / "seeds" / name).read_bytes() for name in ("program.pte", "add.pte")]


def attacks() -> list[bytes]:
    """Return a program that says ten thousand times ten thousand instructions."""
    return [flatbuffers.program(10_000)]


def fuzz(data: bytes) -> None:
    """A program is refused, or its instructions and its delegates' graphs are read."""
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
        path = Path(folder) / "program.pte"
        path.write_bytes(data)
        try:
            screen.screen_pte(path)
            instructions = graph.read_program(path, "forward")
        except EtfarmError as error:
            assert str(error)
            return
    for instruction in instructions.values():
        if instruction.data is not None:
            try:
                assert xnnpack.read(instruction.data).nodes is not None
            except xnnpack.BadGraph as error:
                assert str(error)
