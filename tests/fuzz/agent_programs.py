"""Programs (.pte) and data files (.ptd) as a device's runner in Python reads them, `runners.python_child.pte`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from etfarm.device_agents.runners.python_child import pte
from etfarm.wire.flatbuffer import BadBuffer
from tests.fuzz import flatbuffers

TOKENS = (b"ET12", b"eh00", b"FT01", b"XH00", b"forward")


def seeds() -> list[bytes]:
    """Return real programs, and a file of weights."""
    return [(Path(__file__).parent / "seeds" / name).read_bytes() for name in ("program.pte", "add.pte")]


def attacks() -> list[bytes]:
    """Return a program that says the same tables over and over."""
    return [flatbuffers.program(10_000), flatbuffers.etdump(10_000).replace(b"ED00", b"FT01")]


def fuzz(data: bytes) -> None:
    """A program is described, or is a BadBuffer."""
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
        path = Path(folder) / "program.pte"
        path.write_bytes(data)
        for read in (pte.check_identifier, pte.ProgramFile.read, pte.data_keys):
            try:
                read(path)
            except BadBuffer as error:
                assert str(error)
