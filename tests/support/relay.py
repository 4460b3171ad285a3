"""One connection of an emulated machine to a port of this one: between stdin and stdout, which qemu holds, and the port.

`python relay.py PORT FOLDER OWNER`. The folder's file `rate` has the most bytes in a second, both ways together, or nothing for
no limit. While there is a file `dark`, the port is not told that the machine is gone, as nobody is told of a power cut; that ends
with the process OWNER at the latest.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

_CHUNK = 65536


def main() -> None:
    """Until either end closes."""
    port, folder, owner = int(sys.argv[1]), Path(sys.argv[2]), os.pidfd_open(int(sys.argv[3]))
    with socket.create_connection(("127.0.0.1", port)) as there:
        with suppress(ConnectionError):
            _relay(there, folder / "rate")
        while (folder / "dark").exists() and not select.select([owner], [], [], 0.2)[0]:
            pass


def _relay(there: socket.socket, rate: Path) -> None:
    guest = socket.socket(fileno=os.dup(0))
    other = {guest: there, there: guest}
    while True:
        for source in select.select([guest, there], [], [])[0]:
            limit = int(rate.read_text() or 0) if rate.exists() else 0
            data = source.recv(min(_CHUNK, max(1, limit // 20)) if limit else _CHUNK)
            if not data:
                return
            other[source].sendall(data)
            if limit:
                time.sleep(len(data) / limit)


if __name__ == "__main__":
    main()
