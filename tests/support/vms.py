"""Emulated Arm machines: boards whose agent dials out to a server here, and phones that adb reaches.

They are synchronous, as the farm of `tests.support.farm` is, so that a fixture of any scope can hold one. No machine reaches
anything but the one port here that it is given, and what listens for it listens on 127.0.0.1 only.
"""

from __future__ import annotations

import base64
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.support.farm import wait_until
from tests.support.images.board import board_image, make_agent_disk
from tests.support.images.disks import make_disk, settings_disk
from tests.support.images.kept import SOURCES
from tests.support.images.kernel import Image
from tests.support.images.phone import phone_image

START_S: Final = 180.0
"""How long a machine may take to a line on its console. It takes 4 s to its shell, where nothing else runs."""
SERVER: Final = "10.0.2.100:5000"
"""Where a machine finds the server: a connection there ends at a port of this one."""
_CPU: Final = "cortex-a72"


def need_machines() -> None:
    """Skips where qemu's system emulation is not installed."""
    if shutil.which("qemu-system-aarch64") is None:
        pytest.skip("needs an emulator: apt-get install qemu-system-arm")


def need_adb() -> None:
    """Skips where adb is not installed."""
    if shutil.which("adb") is None:
        pytest.skip("needs adb: apt-get install adb")


@dataclass(frozen=True)
class Disk:
    """One of a machine's disks."""

    serial: str
    """By which its init knows it."""
    path: Path
    written: bool = False
    """Whether the machine may write it; what it writes is there at the next start."""


class Machine:
    """A qemu process with 2 cpus and 1 GiB. It ends with the process that started it, also when that is killed.

    Args:
        folder: for the console's log and files of this machine.
        image: what it is started from.
        disks: others that its init looks for.
    """

    def __init__(self, folder: Path, image: Image, disks: Sequence[Disk]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "console.log"
        self._image = image
        self._disks = (Disk("root", image.root), *disks)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        self._commands = 0

    @property
    def pid(self) -> int:
        """Of qemu."""
        assert self._process is not None
        return self._process.pid

    @property
    def console(self) -> str:
        """What it has said since it was made, over all starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self, *, wait_for: str) -> None:
        """Switches it on, and waits for a line on the console."""
        assert self._process is None
        self._read = len(self.console)
        with self.log.open("ab") as console:
            self._process = subprocess.Popen(self._command(), stdin=subprocess.PIPE, stdout=console, stderr=subprocess.STDOUT)
        try:
            self.expect(wait_for)
        except BaseException:
            self.power_cut()
            raise

    def power_cut(self) -> None:
        """Switch it off at once; its disks keep what it has written. Has no effect if it is off."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process = None

    def expect(self, text: str, timeout_s: float = START_S) -> str:
        """Wait for a line of the console with `text`, behind the one that was waited for before.

        Raises:
            AssertionError: it does not come in time, or the machine has ended; with the console's last lines.
        """
        until = time.monotonic() + timeout_s
        while True:
            ended = self._process is None or self._process.poll() is not None
            new = self.console[self._read :]
            for line in new.splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                self._read += len(line)
                if text in line:
                    return line.rstrip()
            if ended or time.monotonic() > until:
                why = "the machine ended" if ended else f"{timeout_s:g} s passed"
                last = "\n".join(self.console.splitlines()[-40:])
                raise AssertionError(f"{why} before its console said {text!r}; its last lines:\n{last}")
            time.sleep(0.02)

    def run(self, command: str, timeout_s: float = START_S) -> str:
        """Run a command in the machine's shell, as root, and return what it printed.

        Raises:
            AssertionError: it failed, or did not end in time.
        """
        assert self._process is not None and self._process.stdin is not None
        self._commands += 1
        number = self._commands
        before = self._read
        self._process.stdin.write(f"{number} {command}\n".encode())
        self._process.stdin.flush()
        ended = self.expect(f"#{number}= ", timeout_s)
        mark = f"#{number}| "
        lines = [line.removeprefix(mark) for line in self.console[before:].splitlines() if line.startswith(mark)]
        assert ended.endswith("= 0"), f"{command!r} ended with {ended.partition('= ')[2]}: {lines}"
        return "\n".join(lines)

    def port(self) -> int:
        """Return the port on 127.0.0.1 that leads into the machine; the system chose it."""
        (address,) = {
            connection.laddr
            for connection in psutil.Process(self.pid).net_connections("tcp4")
            if connection.status == psutil.CONN_LISTEN
        }
        assert address.ip == "127.0.0.1"
        return int(address.port)

    def _network(self) -> list[str]:
        """More options of its network, in which nothing else can be reached."""
        return []

    def _command(self) -> list[str]:
        drives: list[str] = []
        for disk in self._disks:
            access = "snapshot=off" if disk.written else "readonly=on"
            drives += ["-drive", f"if=none,id={disk.serial},format=raw,file={disk.path},{access}"]
            drives += ["-device", f"virtio-blk-device,drive={disk.serial},serial={disk.serial}"]
        return [
            # The kernel ends qemu with us, whatever ends us.
            "setpriv", "--pdeathsig", "KILL", "--",
            "qemu-system-aarch64", "-M", "virt", "-cpu", _CPU, "-smp", "2", "-m", "1024", "-nodefaults", "-no-reboot",
            "-display", "none", "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
            "-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs),
            "-append", "console=ttyAMA0 quiet panic=-1",
            "-netdev", ",".join(["user", "id=net", "ipv6=off", "restrict=on", *self._network()]),
            "-device", "virtio-net-device,netdev=net",
            *drives,
        ]  # fmt: skip


class Board(Machine):
    """A board with Debian and Python whose agent, a service that is started again whenever it ends, dials out to a server.

    What it keeps (the agent's data, the machine's id) is on a disk of its own, so one made anew is another machine.

    Args:
        folder: for this board's files.
        server: 127.0.0.1:PORT, the only thing that the board can reach.
        arguments: of `etfarm agent`.
        token: ETFARM_TOKEN of the agent.
    """

    def __init__(self, folder: Path, server: str, *arguments: str, token: str = "") -> None:
        image = board_image()
        self.machine_id = uuid.uuid4().hex
        self._server_port = int(server.rpartition(":")[2])
        self._link = folder / "link"
        """What the relays of its connections look at."""
        self._link.mkdir(parents=True)
        self._relays: list[psutil.Process] = []
        settings = {"ETFARM_SERVER": SERVER, "ETFARM_TOKEN": token, "MACHINE_ID": self.machine_id, "AGENT": shlex.join(arguments)}
        disks = (
            Disk("agent", make_agent_disk(folder / "agent.ext4")),
            Disk("state", make_disk(folder / "state.ext4", 512), written=True),
            Disk("settings", settings_disk(folder / "settings", settings)),
        )
        super().__init__(folder, image, disks)

    def limit(self, bytes_per_s: int | None) -> None:
        """Limit the link to the server from now on; None removes the limit."""
        (self._link / "rate").write_text(str(bytes_per_s or ""))

    def power_cut(self, *, close_connection: bool = False) -> None:
        """Cut the power. By default the server's connection stays open and silent.

        Args:
            close_connection: whether the connection is closed, as by a network that notices the loss.
        """
        if close_connection:
            (self._link / "dark").unlink(missing_ok=True)
        else:
            (self._link / "dark").touch()
        if self._process is not None:
            self._relays += psutil.Process(self.pid).children()
        super().power_cut()

    def close(self) -> None:
        """End the machine and its connections."""
        self.power_cut()
        (self._link / "dark").unlink(missing_ok=True)
        _, alive = psutil.wait_procs(self._relays, timeout=30)
        assert not alive, alive

    def agent(self) -> int:
        """Return the agent's process id in the board; what it starts has greater ones."""
        return min(int(pid) for pid in self.run("busybox pidof python3.11").split())

    def agent_rss_bytes(self) -> int:
        """Return what the agent has in memory."""
        return int(self.run(f"busybox grep VmRSS: /proc/{self.agent()}/status").split()[1]) * 1024

    def _network(self) -> list[str]:
        relay = [sys.executable, "-S", "-E", str(SOURCES.parent / "relay.py")]
        command = shlex.join([*relay, str(self._server_port), str(self._link), str(os.getpid())])
        return [f"guestfwd=tcp:{SERVER}-cmd:{command}".replace(",", ",,")]


@contextmanager
def running_board(folder: Path, server: str, *arguments: str, wait_for: str = "connected to", token: str = "") -> Iterator[Board]:
    """A board that is on, and off afterwards."""
    need_machines()
    board = Board(folder, server, *arguments, token=token)
    try:
        board.start(wait_for=wait_for)
        yield board
    finally:
        board.close()


class PhoneVm(Machine):
    """A phone: Debian's adbd as the user `shell`, /system/bin, /data/local/tmp, on a port of 127.0.0.1 that the system picks.

    What is on /data outlives its power. Whoever connects to adbd is let in: only this machine can.

    Args:
        folder: for this phone's files.
        storage_mb: of /data.
    """

    def __init__(self, folder: Path, *, storage_mb: int = 512) -> None:
        image = phone_image()
        self.serialno = uuid.uuid4().hex[:14].upper()
        """Its ro.serialno."""
        folder.mkdir(parents=True, exist_ok=True)
        disks = (
            Disk("state", make_disk(folder / "data.ext4", storage_mb), written=True),
            Disk("settings", settings_disk(folder / "settings", {"SERIAL": self.serialno})),
        )
        super().__init__(folder, image, disks)

    @property
    def serial(self) -> str:
        """What adb calls it; another one after each start."""
        return f"127.0.0.1:{self.port()}"

    def say(self, command: str, text: str | None) -> None:
        """Make `getprop`, or `dumpsys SERVICE` by the service's name, print a text; with None what the image has."""
        shim = f"/data/shims/{command}"
        self.run(f"rm -f {shim}" if text is None else f"echo {base64.b64encode(text.encode()).decode()} | base64 -d > {shim}")

    def _network(self) -> list[str]:
        return ["hostfwd=tcp:127.0.0.1:0-10.0.2.15:5555"]


class Adb:
    """A real adb server of its own: on a socket in its folder, where its keys are too. It ends with who started it.

    Args:
        folder: of a path so short that a socket's name can be in it.
    """

    def __init__(self, folder: Path) -> None:
        need_adb()
        self.address = f"localfilesystem:{folder / 'adb.sock'}"
        """For ADB_SERVER_SOCKET."""
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "ADB_SERVER_SOCKET": self.address,
            # It would look for emulators on this machine's ports.
            "ADB_LOCAL_TRANSPORT_MAX_PORT": "5554",
        }  # fmt: skip
        self._log = folder / "adb-server.log"
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", "adb", "-L", self.address, "nodaemon", "server"],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        if not wait_until((folder / "adb.sock").exists):
            self.close()
            raise AssertionError(f"the adb server does not come up: {self._log.read_text()}")

    def __call__(self, *arguments: str, serial: str = "", timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        """Run one adb command to its end."""
        which = ["-s", serial] if serial else []
        return subprocess.run(
            ["adb", *which, *arguments], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def connect(self, phone: PhoneVm) -> None:
        """Plugs the phone in: its shell answers when this returns."""
        until = time.monotonic() + START_S
        while True:
            text = self("connect", phone.serial).stdout
            if self("shell", "true", serial=phone.serial).returncode == 0:
                return
            assert time.monotonic() < until, f"{text}; the phone said:\n{phone.console[-3000:]}"
            time.sleep(0.1)

    def disconnect(self, phone: PhoneVm) -> None:
        """Unplugs the phone."""
        self("disconnect", phone.serial)

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()


@dataclass(frozen=True)
class PluggedPhone:
    """A phone, and the adb server that it is connected to."""

    phone: PhoneVm
    adb: Adb


@contextmanager
def running_phone_vm(folder: Path, *, storage_mb: int = 512) -> Iterator[PluggedPhone]:
    """A phone that is on and plugged in; nothing of it runs afterwards."""
    need_machines()
    need_adb()
    phone = PhoneVm(folder / "phone", storage_mb=storage_mb)
    with tempfile.TemporaryDirectory(prefix="adb-") as short:
        adb = Adb(Path(short))
        try:
            phone.start(wait_for="phone: up")
            adb.connect(phone)
            yield PluggedPhone(phone, adb)
        finally:
            phone.power_cut()
            adb.close()


@pytest.fixture(scope="module")
def phone_vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluggedPhone]:
    """A plugged in phone that a module's tests share."""
    with running_phone_vm(tmp_path_factory.mktemp("phone")) as plugged:
        yield plugged
