"""ETDumps of a device's traced pass, `etfarm.server.reports.trace.etdump`."""

from __future__ import annotations

from pathlib import Path

from etfarm.server.reports.trace import etdump
from etfarm.wire.errors import DeviceError
from tests.fuzz import flatbuffers

TOKENS = (b"ED00", b"Method::execute", b"DELEGATE_CALL", b"native_call_cumsum.out")


def seeds() -> list[bytes]:
    """Return the dump of three executions of a real program."""
    return [(Path(__file__).parent / "seeds" / "trace.etdp").read_bytes()]


def attacks() -> list[bytes]:
    """Return a dump whose runs are all one run."""
    return [flatbuffers.etdump(10_000)]


def fuzz(data: bytes) -> None:
    """A dump is a trace whose times fit its iterations, or a BAD_TRACE."""
    try:
        trace = etdump.read(data)
    except DeviceError as error:
        assert str(error)
        return
    assert all(call.times_ns.shape == trace.method_ns.shape for call in trace.calls)
    assert (trace.method_ns >= 0).all()
