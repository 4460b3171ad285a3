"""One connection of an emulated machine to a port of this one: between stdin and stdout, which qemu holds, and the port.

`python relay.py PORT RATE_FILE`; the file has the most bytes in a second, both ways together, or nothing for no limit.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from pathlib import Path

_CHUNK = 65536


def main() -> None:
    """Until either end closes."""
    port, rate = int(sys.argv[1]), Path(sys.argv[2])
    with socket.create_connection(("127.0.0.1", port)) as there:
        guest = socket.socket(fileno=os.dup(0))
        other = {guest: there, there: guest}
        while True:
            ready, _, _ = select.select([guest, there], [], [])
            for source in ready:
                limit = int(rate.read_text() or 0) if rate.exists() else 0
                data = source.recv(min(_CHUNK, max(1, limit // 20)) if limit else _CHUNK)
                if not data:
                    return
                other[source].sendall(data)
                if limit:
                    time.sleep(len(data) / limit)


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:
        sys.exit(1)
