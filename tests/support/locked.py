"""A phone that asks its owner before it lets a machine debug it: adb's handshake in front of a real adbd without such a question.

`python locked.py PORT ADBD_PORT` listens on loopback. Each connection is asked for a signature, whatever key it has, until it
shows its public key, as by a phone that has never seen it. After SIGUSR1, which is the owner's yes, it is handed on to adbd.

Source: AOSP's packages/modules/adb/protocol.txt.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from contextlib import suppress

_HEADER = struct.Struct("<4sIIIII")
"""command, its two arguments, bytes that follow, their sum, the command's complement."""
_TOKEN, _PUBLIC_KEY = 1, 3


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes, int]:
    """Return a message as it came, its command, its first argument."""
    head = await reader.readexactly(_HEADER.size)
    command, argument, _, size, _, _ = _HEADER.unpack(head)
    return head + await reader.readexactly(size), command, argument


def _ask() -> bytes:
    token, command = os.urandom(20), b"AUTH"
    magic = int.from_bytes(command, "little") ^ 0xFFFFFFFF
    return _HEADER.pack(command, _TOKEN, 0, len(token), sum(token), magic) + token


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(port: int, adbd_port: int) -> None:
    """Listen for ever."""
    allowed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, allowed.set)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            hello, _, _ = await _message(reader)
            command, kind = b"", 0
            while (command, kind) != (b"AUTH", _PUBLIC_KEY):
                writer.write(_ask())
                _, command, kind = await _message(reader)
            await allowed.wait()
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", adbd_port)
            there_writer.write(hello)
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
