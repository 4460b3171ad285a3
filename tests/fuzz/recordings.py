"""The values of a device's numerics pass: an ETDump and the file that it refers to, `etfarm.server.reports.trace.recording`."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from etfarm.server.reports.trace.recording import BadRecording, Recording
from tests.fuzz import flatbuffers

TOKENS = (b"ED00", struct.pack("<q", -1), struct.pack("<q", 1 << 40), struct.pack("<I", 1 << 20))
_DEBUG = bytes(512)


def seeds() -> list[bytes]:
    """Return the dump of a real program's one execution with its values."""
    return [(Path(__file__).parent / "seeds" / "numerics.etdp").read_bytes()]


def attacks() -> list[bytes]:
    """Return a dump whose runs are all one run."""
    return [flatbuffers.etdump(10_000)]


def fuzz(data: bytes) -> None:
    """A recording gives every value that it names, or is a BadRecording."""
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
        etdump, debug = Path(folder) / "numerics.etdp", Path(folder) / "numerics.bin"
        etdump.write_bytes(data)
        debug.write_bytes(_DEBUG)
        try:
            recording = Recording(etdump, debug)
        except BadRecording as error:
            assert str(error)
            return
        for instruction in recording.instructions:
            for stored in instruction.values:
                assert recording.array(stored).shape == stored.shape
