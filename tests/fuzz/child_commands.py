"""Lines that the child with ExecuTorch's Python binding reads, `etfarm.device_agents.runners.python_child.channel`."""

from __future__ import annotations

from etfarm.device_agents.runners.python_child.channel import Command
from etfarm.device_agents.runners.python_child.refusals import Refusal

TOKENS = (b" ", b"=", b"%", b"%00", b"%zz", b"%ff", b"shape=", b"bytes=", b"index=", b"-", b"99999999999999999999", b",,")


def seeds() -> list[bytes]:
    """Return commands of the protocol."""
    return [
        b"hello",
        b"load path=/x/program.pte data=/x/a.ptd data=/x/b%20c.ptd",
        b"input index=0 dtype=float32 shape=1,3 dim_order=0,1 bytes=12",
        b"measure warmup=10 iterations=100 min_time_ns=1000000000 max_time_ns=1 max_samples=9 steady=1",
        b"stream prefill=forward depth=0 tokens=9 stop_tokens= bytes=4",
        b"affinity cores=0,1,2",
    ]


def fuzz(data: bytes) -> None:
    """A line is a command with its options, or is refused with a code."""
    command = Command(data)
    if command.bad is not None:
        assert command.bad.code
        return
    try:
        command.take_all("data")
        command.take("path")
        command.integer("index", 0, 1 << 16, 0)
        command.integer("bytes", 0, 1 << 40, 0)
        assert all(0 <= size < 1 << 31 for size in command.integers("shape", 0, (1 << 31) - 1))
        command.finish()
    except Refusal as error:
        assert error.code
