"""What a process can do that is confined as the web page is, run by whoever starts this: `page_probe FOLDER`.

FOLDER gets a configuration with a data folder, a token file and a TLS key. Prints the measures, and which of the steps worked.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from etfarm.server.config import Config
from etfarm.server.operation.page_confinement import PageConfinement
from etfarm.wire.channel import parse_address

PROBE: Final = """
import ctypes, json, os, socket, sys
data, tokens, key, elsewhere, server, farm, other, local, log = sys.argv[1:]
def attempt(step):
    try:
        step()
        return True
    except OSError:
        return False
def connect(port):
    socket.create_connection(("127.0.0.1", int(port)), 10).close()
def connect_unix():
    socket.socket(socket.AF_UNIX).connect(local)
def send_unix():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"x", log)
def pair():
    first, second = socket.socketpair()
    first.close()
    second.close()
def listen():
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
    socket.create_server(("127.0.0.1", port)).close()
def work():
    os.mkdir("made")
    open("made/file", "w").write("x")
    os.unlink("made/file")
    os.rmdir("made")
libc = ctypes.CDLL(None, use_errno=True)
def memory():
    if libc.memfd_create(b"x", 0) < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
def trace():
    if libc.ptrace(16, int(server), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
print(json.dumps({
    "data": attempt(lambda: open(f"{data}/farm.sqlite").read()),
    "list data": attempt(lambda: os.listdir(data)),
    "tokens": attempt(lambda: open(tokens).read()),
    "key": attempt(lambda: open(key).read()),
    "shadow": attempt(lambda: open("/etc/shadow").read()),
    "write elsewhere": attempt(lambda: open(f"{elsewhere}/made", "w")),
    "write code": attempt(lambda: open(os.__file__, "r+")),
    "server's environment": attempt(lambda: open(f"/proc/{server}/environ").read()),
    "server's memory": attempt(lambda: open(f"/proc/{server}/mem", "rb").read(1)),
    "trace": attempt(trace),
    "signal": attempt(lambda: os.kill(int(server), 0)),
    "memory beside its limit": attempt(memory),
    "a port of another program": attempt(lambda: connect(other)),
    "a port of its choice": attempt(listen),
    "a unix socket of another program": attempt(connect_unix),
    "a datagram to a unix socket": attempt(send_unix),
    "a pair of sockets": attempt(pair),
    "own folder": attempt(work),
    "the farm": attempt(lambda: connect(farm)),
    "environment": sorted(os.environ),
    "user": os.getuid(),
}))
"""


async def main(folder: Path) -> None:
    """Start the probe in the page's confinement, and print what it reports."""
    data, tokens, key = folder / "data", folder / "tokens", folder / "key.pem"
    data.mkdir()
    elsewhere = Path(tempfile.mkdtemp(dir=folder))
    own = Path(tempfile.mkdtemp(dir="/tmp", prefix="etfarm-probe-"))
    for file in (data / "farm.sqlite", tokens, key):
        # Readable for every user: Landlock alone has to refuse them.
        file.write_text("secret")
        file.chmod(0o644)
    elsewhere.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as farm,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        reached = Path(tempfile.mkdtemp(dir="/tmp", prefix="etfarm-sockets-"))
        reached.chmod(0o755)
        for listener, name in ((local, "stream"), (log, "datagrams")):
            listener.bind(str(reached / name))
            (reached / name).chmod(0o777)
        local.listen()
        address = f"127.0.0.1:{farm.getsockname()[1]}"
        config = Config(parse_address(address), data, tokens=tokens, tls_key=key, tls_cert=key)
        confinement = PageConfinement(config, address)
        ports = [str(each.getsockname()[1]) for each in (farm, other)] + [str(reached / name) for name in ("stream", "datagrams")]
        arguments = [*map(str, (data, tokens, key, elsewhere)), str(os.getpid()), *ports]
        try:
            process = await confinement.start([sys.executable, "-c", PROBE, *arguments], own, ())
            output, _ = await process.communicate()
        finally:
            for left in own.iterdir():
                left.unlink()
            own.rmdir()
            shutil.rmtree(reached)
        measures = {measure.name: measure.active for measure in await confinement.measures()}
        print(json.dumps({"measures": measures, "steps": json.loads(output)}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
