"""ETRecords: the graph of a compilation that a report joins with a trace, `etfarm.server.reports.trace.graph` and `edge`.

An input is a zip archive, or texts of entries: a name, a line feed, the text, and a NUL byte between two entries.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from pathlib import Path

from etfarm.server.reports.numerics import edge
from etfarm.server.reports.trace import graph
from etfarm.server.reports.trace.graph import BadRecord

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


def attacks() -> list[bytes]:
    """Return graphs whose values take themselves, in a circle, and a tensor of many huge dims."""
    node = {
        "target": "aten.relu.default",
        "inputs": [{"arg": {"as_tensor": {"name": "a"}}}],
        "outputs": [{"as_tensor": {"name": "a"}}],
        "metadata": {"debug_handle": "1"},
    }
    other = {**node, "outputs": [{"as_tensor": {"name": "b"}}]}
    back = {**node, "inputs": [{"arg": {"as_tensor": {"name": "b"}}}]}
    huge = {"a": {"dtype": 7, "sizes": [{"as_int": (1 << 63) - 1}] * 20_000}}
    text = []
    for nodes, values in (([node], {}), ([other, back], {}), ([other], huge)):
        graph = {"nodes": nodes, "inputs": [], "outputs": [], "tensor_values": values}
        text.append(json.dumps({"graph_module": {"graph": graph}}))
    return [f"edge_dialect_exported_program\n{one}".encode() for one in text]


def fuzz(data: bytes) -> None:
    """A record's methods are read, or it is refused as a BadRecord."""
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
