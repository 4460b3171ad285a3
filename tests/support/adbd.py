"""A phone without hardware: Debian's real adbd, and a real adb server that is connected to it, unreachable for other processes.

adbd gives a root shell to whoever connects, on all interfaces. So both run in a network namespace of their own, and the server
is reached through a unix domain socket. Process and mount namespaces come with it: all that the phone starts ends with its first
process, which ends with the test run, and what is written to the phone is gone with it. The phone's userland is this machine's,
behind an overlay in memory: nothing that happens there changes a file here.

Not like a real phone: USB, Android's own userland, SELinux, seccomp; the shell is root.
This adbd asks no owner for permission; `AdbPhone.lock` does so in its place.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest
import pytest_asyncio

from etfarm.device_agents.adb import AdbRefused, AdbServer, PhoneGone
from tests.support.debian import debian_tree, need_debian, run

RELEASE: Final = "trixie"
"""Debian's, which has adbd; it is run with that release's own C library."""
ADBD_PACKAGES: Final = (
    "adbd", "android-libbase", "android-libboringssl", "android-libcutils", "android-liblog", "libbrotli1", "libbsd0", "libc6",
    "libcap2", "libgcc-s1", "liblz4-1", "libmd0", "libprotobuf32t64", "libstdc++6", "libsystemd0", "libxxhash0", "libzstd1",
    "zlib1g",
)  # fmt: skip
STORAGE_BYTES: Final = 512 << 20
"""Of what is written to a phone, which is this machine's memory."""
FOLDER: Final = "/data/local/tmp"
"""Where a phone lets its shell write and execute."""
_READY_S: Final = 60.0
_PHONE: Final = r"""
set -eu
ip link set lo mtu 1500 up
mount -t tmpfs -o mode=755,size="$2" phone "$1"
cd "$1"
mkdir -p changes/data/local/tmp changes/system/bin changes/apex/adbd scratch root
chmod 1777 changes/data/local/tmp
mount -t overlay -o lowerdir=/,upperdir=changes,workdir=scratch phone root
mount --bind "$3" root/apex/adbd
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --rbind /sys root/sys
echo ready
exec cat
"""
"""The first process of the phone; it ends, and all others with it, when its stdin does."""


def need_adb() -> None:
    """Skips where the phone cannot be made."""
    need_debian()
    for program, package in {"adb": "adb", "ip": "iproute2"}.items():
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install {package}")
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes namespaces and mounts")


class _Inside:
    """A program that runs in the phone's namespaces."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, pass_fds: Sequence[int] = ()) -> None:
        with log.open("ab") as output:
            self._entering = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=pass_fds
            )
        # nsenter waits for its child, which is the program: only a child is in another process namespace.
        while not (children := psutil.Process(self._entering.pid).children()):
            assert self._entering.poll() is None, f"{command} ended with {self._entering.returncode}: {log.read_text()}"
        self._program = children[0]

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._entering.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it one."""
        self._program.send_signal(number)

    def go_on(self) -> None:
        """SIGCONT; nsenter stops itself together with its child."""
        self._program.send_signal(signal.SIGCONT)
        self._entering.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and the end of it; harmless where it has ended."""
        with suppress(psutil.NoSuchProcess):
            self._program.kill()
        self._entering.send_signal(signal.SIGCONT)  # it stopped itself where its child was
        self._entering.wait(_READY_S)


class AdbPhone:
    """A running phone and its adb server; `running_phone` makes one."""

    def __init__(self, folder: Path, storage_bytes: int = STORAGE_BYTES, beside: AdbPhone | None = None) -> None:
        """Start everything; `connect` then makes the server know the phone.

        Args:
            folder: for the server's keys, socket and log; of a path so short that a socket's name can be in it.
            storage_bytes: of the phone.
            beside: another phone, whose network and adb server this one shares.
        """
        self._folder = folder
        self._mount = folder / "phone"
        self._mount.mkdir()
        tree = debian_tree(ADBD_PACKAGES, run("dpkg", "--print-architecture").strip(), RELEASE)
        loader = next(tree.glob("usr/lib/*-linux-gnu/ld-linux-*"))
        self._loader = loader.name
        self._libraries = Path("/apex/adbd") / loader.parent.relative_to(tree)
        network = ["unshare", "--net"] if beside is None else ["nsenter", "--target", str(beside._first), "--net", "unshare"]
        self._keeper = subprocess.Popen(
            [*network, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _PHONE, "phone",
             str(self._mount), str(storage_bytes), str(tree)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n", "the phone's namespaces cannot be made; its words are on stderr"
        self._first = psutil.Process(self._keeper.pid).children()[0].pid
        # adbd would listen on this port of the virtual machine's own socket family too, which namespaces do not part.
        self._vsock, port = _reserved_port()
        self.serial = f"127.0.0.1:{port}"
        """What adb calls the phone."""
        self.server = AdbServer(f"localfilesystem:{folder / 'adb.sock'}") if beside is None else beside.server
        """The adb server, as the agent sees it."""
        self.files = Path(f"/proc/{self._first}/root{self._mount}/root")
        """The phone's root folder, seen from outside: to look at what is on it, and to put things there."""
        self._adbd: _Inside | None = None
        self._server: _Inside | None = None
        self._lock: _Inside | None = None
        self.start_adbd()
        if beside is None:
            self.start_server()

    def inside(self, *command: str, userland: bool = True) -> list[str]:
        """Return the command line that runs a command in the phone's namespaces; in its userland, or in this machine's."""
        enter = ["nsenter", "--target", str(self._first), "--net", "--mount", "--pid"]
        return [*enter, *(["chroot", str(self._mount / "root")] if userland else []), *command]

    def call(self, *command: str) -> str:
        """Run a command on the phone, without adb, and return what it writes."""
        return run(*self.inside(*command))

    def start_adbd(self) -> None:
        """Start adbd; adb servers of before connect to it again by themselves, after a while."""
        libraries = str(self._libraries)
        program = "/apex/adbd/usr/lib/android-sdk/platform-tools/adbd"
        # Under nohup the tests ignore hang-ups, which would not end this phone's commands then.
        started = ["/usr/bin/env", "--default-signal=HUP"]
        adbd = [*started, f"{libraries}/{self._loader}", "--library-path", f"{libraries}:{libraries}/android", program]
        path = "/system/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"ADBD_PORT": self.serial.rpartition(":")[2], "HOME": "/data", "PATH": path}
        self._adbd = _Inside(self.inside(*adbd), environment, self._folder / "adbd.log")

    def lock(self) -> str:
        """Another way to the phone, once, which asks its owner first; adb's name of it. `allow` is the owner's yes."""
        serial = f"127.0.0.1:{random.randrange(10_000, 20_000)}"
        ports = [each.rpartition(":")[2] for each in (serial, self.serial)]
        script, log = str(Path(__file__).with_name("locked.py")), self._folder / "locked.log"
        self._lock = _Inside(self.inside(sys.executable, script, *ports, userland=False), {}, log)
        while "listening" not in log.read_text():
            assert self._lock.is_running, log.read_text()
            time.sleep(0.02)
        return serial

    def allow(self) -> None:
        """The phone's owner allows this machine to debug it; see `lock`."""
        assert self._lock is not None
        self._lock.signal(signal.SIGUSR1)

    def kill_adbd(self) -> None:
        """The phone vanishes: its connections are closed at once."""
        assert self._adbd is not None
        self._adbd.kill()

    def freeze_adbd(self) -> None:
        """Freeze adbd: nothing answers, and no connection is closed."""
        assert self._adbd is not None
        self._adbd.signal(signal.SIGSTOP)

    def thaw_adbd(self) -> None:
        """The link is alive again, with what was sent meanwhile."""
        assert self._adbd is not None
        self._adbd.go_on()

    def start_server(self) -> None:
        """Start the adb server, which knows no phone until `connect`; it answers when this returns."""
        (self._folder / "adb.sock").unlink(missing_ok=True)
        ready, reply = os.pipe()
        try:
            self._server = _Inside(
                self.inside("adb", "-L", self.server.address, "fork-server", "server", "--reply-fd", str(reply), userland=False),
                {**self.environment, "ADB_SERVER_SOCKET": self.server.address},
                self._folder / "adb.log",
                [reply],
            )
        finally:
            os.close(reply)
        with os.fdopen(ready, "rb") as answer:
            assert answer.read(3) == b"OK\n", (self._folder / "adb.log").read_text()

    def kill_server(self) -> None:
        """The adb server is gone, and what it knew."""
        assert self._server is not None
        self._server.kill()

    @property
    def environment(self) -> dict[str, str]:
        """For an adb that keeps its keys and its log to this phone."""
        return {"PATH": os.environ["PATH"], "HOME": str(self._folder), "TMPDIR": str(self._folder)}

    async def connect(self) -> None:
        """Plugs the phone in."""
        async with asyncio.timeout(_READY_S):
            while True:
                try:
                    await self.server.connect(self.serial)
                    await self.server.run(self.serial, "true", deadline_s=_READY_S)
                    return
                except (AdbRefused, PhoneGone):
                    # adbd does not listen yet, or has not shaken hands, or adb still ends the connection of before.
                    await asyncio.sleep(0.02)

    async def disconnect(self) -> None:
        """Unplugs the phone."""
        await self.server.disconnect(self.serial)

    def add_storage(self, folder: str, size_bytes: int, *, writable: bool = True) -> None:
        """Mounts a small file system at a folder of the phone."""
        self.call("mkdir", "-p", folder)
        self.call("mount", "-t", "tmpfs", "-o", f"size={size_bytes},{'rw' if writable else 'ro'}", "storage", folder)

    def slow_link(self, bits_per_s: int) -> None:
        """From now on the link to the phone carries no more than that, both directions together."""
        shape = ["rate", f"{bits_per_s}bit", "burst", "128kb", "latency", "500ms"]
        run(*self.inside("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *shape, userland=False))

    def close(self) -> None:
        """End every process of the phone, and wait for it."""
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(_READY_S)
        self._keeper.stdout.close()
        for program in (self._adbd, self._server, self._lock):
            if program is not None:
                program.kill()
        if self._vsock is not None:
            self._vsock.close()


def _reserved_port() -> tuple[socket.socket | None, int]:
    """A free port of the virtual machine's sockets, bound so that none listens on it; of TCP a new namespace has all free."""
    while True:
        port = random.randrange(20_000, 60_000)
        try:
            holder = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        except OSError:  # a kernel without them, where adbd has none either
            return None, port
        try:
            holder.bind((socket.VMADDR_CID_ANY, port))
        except OSError:
            holder.close()
        else:
            return holder, port


@asynccontextmanager
async def running_phone(storage_bytes: int = STORAGE_BYTES, beside: AdbPhone | None = None) -> AsyncIterator[AdbPhone]:
    """A phone that is connected to an adb server, its own or that of the phone beside it; nothing of it is left behind."""
    need_adb()
    with tempfile.TemporaryDirectory(prefix="phone-") as folder:
        phone = AdbPhone(Path(folder), storage_bytes, beside)
        try:
            await phone.connect()
            yield phone
        finally:
            phone.close()


@pytest_asyncio.fixture
async def adb_phone() -> AsyncIterator[AdbPhone]:
    """A connected phone of the test's own."""
    async with running_phone() as phone:
        yield phone
