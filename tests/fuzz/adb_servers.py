"""An adb server and the phones behind it: every answer that one can give to `etfarm.device_agents.adb`.

An input is the bytes of all connections; a byte 0xFE between two asks the server to close one and take the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from etfarm.device_agents.adb.phones import phones_of
from etfarm.device_agents.adb.server import AdbServer
from etfarm.wire.errors import EtfarmError

RUNS = 60
TOKENS = (
    b"OKAY",
    b"FAIL",
    b"ffff",
    b"0000",
    b"000c",
    b"DATA\xff\xff\xff\xff",
    b"DATA\x04\0\0\0",
    b"DONE",
    b"STA2",
    b"STAT",
    b"\x03\x01\0\0\0\0",
    b"\x01\xff\xff\xff\x7f",
    b"\x01\x04\0\0\0",
    b"\xfe",
    b"device",
    b"no permissions",
    b"transport_id:99999999999999999999",
)
_NEXT = b"\xfe"


def _text(text: bytes) -> bytes:
    return b"OKAY%04x%b" % (len(text), text)


def seeds() -> list[bytes]:
    """Return good answers to each kind of question, and refusals."""
    phone = b"HVA0123456789          device usb:1-1 product:shiba model:Pixel_8 device:shiba transport_id:3\n"
    stat = b"STA2" + bytes(4) + bytes(16) + (0o100644).to_bytes(4, "little") + bytes(12) + (5).to_bytes(8, "little") + bytes(24)
    return [
        _NEXT.join([_text(b"0029"), _text(phone), _text(b"shell_v2,stat_v2")]),
        _NEXT.join([b"OKAYOKAY\x01\x05\0\0\0hello\x03\x01\0\0\0\0"] * 4),
        _NEXT.join([_text(b"stat_v2"), b"OKAYOKAY" + stat + b"DATA\x05\0\0\0helloDONE\0\0\0\0"] * 3),
        _NEXT.join([_text(b"x"), b"OKAYOKAYFAIL\x05\0\0\0no...", b"FAIL0006closed", b"FAIL0010device not found"]),
        phone,
    ]


def fuzz(data: bytes) -> None:
    """Every question is answered, or raises what became of the server or the phone."""
    for phone in phones_of(data.decode(errors="replace")):
        assert phone.remedy is not None
    asyncio.run(_ask(data.split(_NEXT)))


async def _ask(answers: list[bytes]) -> None:
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            writer.write(next(left, b""))
            await writer.drain()
            # What the client sends is read, or a closed connection would take with it what it was sent.
            writer.write_eof()
            while await reader.read(1 << 16):
                continue
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        server = AdbServer(f"tcp:127.0.0.1:{port}", answer_s=5.0)
        with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
            path = Path(folder) / "pulled"
            calls = (
                server.version,
                server.phones,
                lambda: server.features("s"),
                lambda: server.connect("127.0.0.1:5555"),
                lambda: server.run("s", "id", deadline_s=5.0, max_bytes=1 << 16),
                lambda: server.stat("s", "/x"),
                lambda: server.push("s", b"bytes", "/x", silence_s=5.0),
                lambda: server.pull("s", "/x", path, silence_s=5.0, max_bytes=1 << 16),
            )
            for call in calls:
                try:
                    await call()
                except EtfarmError as error:
                    assert str(error)
                assert [one.name for one in Path(folder).iterdir()] in ([], ["pulled"])
