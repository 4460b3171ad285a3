"""ETRecords: the graph of a compilation that a report joins with a trace, `etfarm.server.reports.graph` and `edge`.

An input is a zip archive, or texts of entries: a name, a line feed, the text, and a NUL byte between two entries.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path

from etfarm.server.reports import edge, graph
from etfarm.server.reports.graph import BadRecord

RUNS = 120
TOKENS = (
    b'"debug_handle"',
    b'"target"',
    b'"metadata": null',
    b"Infinity",
    b"NaN",
    b"1e999",
    b"null",
    b"[]",
    b"{}",
    b'"nodes": [',
    b'""',
    b'"tensor_values": {',
    b"18446744073709551616",
)
MEMORY_FACTOR = 200


def seeds() -> list[bytes]:
    """Return the entries of a real record, and the record itself."""
    path = Path(__file__).parent / "seeds" / "program.etrecord"
    with zipfile.ZipFile(path) as archive:
        entries = [name.encode() + b"\n" + archive.read(name) for name in archive.namelist()]
    return [b"\0".join(entries), path.read_bytes()]


def fuzz(data: bytes) -> None:
    """A record's method is told, or is a BadRecord."""
    if not data.startswith(b"PK"):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for entry in data.split(b"\0")[:32]:
                name, _, text = entry.partition(b"\n")
                archive.writestr(name.decode(errors="replace").replace("\0", "") or "x", text)
        data = packed.getvalue()
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
        path = Path(folder) / "program.etrecord"
        path.write_bytes(data)
        for read in (graph.read_record, edge.read):
            try:
                assert read(path, "forward") is not None
            except BadRecord as error:
                assert str(error)
