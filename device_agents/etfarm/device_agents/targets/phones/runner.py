"""A runner on a phone: its process behind an adb shell, its files on the phone's own storage."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from etfarm.device_agents.adb import AdbServer, PhoneSilent, ShellProcess
from etfarm.device_agents.runners.child import MAX_LINE_BYTES, Child
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import RunnerProcess
from etfarm.device_agents.runners.protocol import Debugged, Hello, Loaded, OnProgress, Traced
from etfarm.device_agents.targets.phones.errors import PhoneRefused
from etfarm.device_agents.targets.phones.folder import PhoneFolder
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import DeviceError, EtfarmError, error_for

log = logging.getLogger(__name__)

_START_S: Final = 15.0
_KILL_S: Final = 10.0
_LAST_SIGNAL: Final = 64
_MOVED: Final = {"INPUTS": "its inputs", "OUTPUTS": "its outputs"}
"""What is transferred over the link in a stage of the runner, without being part of the program's time."""
_SIGNALLED: Final = 128
"""Offset of a phone's exit codes for signals."""


class PhoneChild:
    """A `Child` on a phone.

    Args:
        adb: the adb server that lists the phone.
        process: the shell that was replaced by the child.
        pid: its process id on the phone.
        folder: its working folder on the phone.
        is_gone: returns whether the phone is known not to answer.
    """

    memory_ran_out: bool | None = None
    """Unknown: Android's own low-memory killer is not part of the kernel, whose counters are not readable either."""

    def __init__(self, adb: AdbServer, process: ShellProcess, pid: int, folder: str, is_gone: Callable[[], bool]) -> None:
        self._adb = adb
        self._is_gone = is_gone
        self._process = process
        self._folder = folder
        self._killing: asyncio.Task[None] | None = None
        self.pid = pid
        self.stdin = process.stdin
        self.stdout = process.stdout
        self.stderr = process.stderr

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._process.ended

    @property
    def lost(self) -> EtfarmError | None:
        """The error of a phone that is gone; otherwise None."""
        return self._process.lost

    def kill(self) -> None:
        """Kill the process; see `Child.kill`."""
        if self._is_gone():
            self._process.kill()
        elif not self._process.ended and self._killing is None:
            self._killing = asyncio.create_task(self._kill(), name=f"killing {self.pid} on {self._process.serial}")

    async def wait(self) -> int | None:
        """Wait for the end; see `Child.wait`."""
        if self._killing is not None:
            await asyncio.wait({self._killing})
        try:
            code = await self._process.wait()
        except DeviceError:
            return None  # `lost` reports it
        return code if code is None or not _SIGNALLED < code <= _SIGNALLED + _LAST_SIGNAL else _SIGNALLED - code

    async def _kill(self) -> None:
        # When a connection ends, adbd sends SIGHUP to its shell, which a program may ignore. The shell led a process group, whose
        # number may belong to another one by now.
        pid, folder = self.pid, shlex.quote(self._folder)
        command = f'[ "$(readlink /proc/{pid}/cwd)" = {folder} ] && {{ kill -9 -{pid} || kill -9 {pid}; }}'
        try:
            await self._adb.run(self._process.serial, command, deadline_s=_KILL_S)
        except EtfarmError as error:
            log.warning("the runner on %s cannot be killed: %s", self._process.serial, error.message)
        finally:
            self._process.kill()


async def spawn(adb: AdbServer, serial: str, is_gone: Callable[[], bool], command: Sequence[str], folder: Path) -> Child:
    """Start `command` on the phone, in a new folder there.

    Args:
        adb: the adb server that lists the phone.
        serial: the phone's serial for adb.
        is_gone: returns whether the phone is known not to answer; nothing waits for it then.
        command: the command line.
        folder: the runner's folder, whose name the folder on the phone gets.

    Raises:
        PhoneRefused: the phone's shell cannot create the folder.
        DeviceError: the phone is disconnected or does not answer.
    """
    quoted = shlex.quote(str(folder))
    # The environment is empty, and the process id is printed first, because exec keeps it. If memory runs out, this process is
    # killed instead of adbd, whose children are otherwise as protected as adbd itself.
    line = (
        f"mkdir -p {quoted} && cd {quoted} || exit 1; {{ echo 800 >/proc/$$/oom_score_adj; }} 2>/dev/null; echo $$; "
        f"exec env -i LC_ALL=C HOME={quoted} TMPDIR={quoted} {' '.join(map(shlex.quote, command))}"
    )
    process = await adb.shell(serial, line, limit=MAX_LINE_BYTES)
    try:
        async with asyncio.timeout(_START_S):
            first = (await process.stdout.readline()).strip()
            if first.isdigit():
                return PhoneChild(adb, process, int(first), str(folder), is_gone)
            complaint = (await process.stderr.read(4096)).decode(errors="replace").strip()
            code = await process.wait()
    except TimeoutError as error:
        process.kill()
        raise PhoneSilent(serial, "starting a runner", _START_S) from error
    except BaseException:
        process.kill()
        raise
    raise PhoneRefused(serial, "make a folder for a runner", complaint or f"exit code {code}")


class PhoneRunner(NativeRunner):
    """A `Runner` on a phone. Its arguments are paths on this machine; files are on the phone already or are copied from there."""

    files: PhoneFolder
    folder: str
    """The runner's working folder on the phone."""
    must_be_confined = False
    """Whether to refuse a runner that does not isolate programs from other processes and the network."""

    def __init__(self, process: RunnerProcess) -> None:
        super().__init__(process)
        self._written: dict[Path, int] = {}
        """Size in bytes of each file that is still on the phone, by its destination on this machine."""
        self._collecting = False

    async def hello(self) -> Hello:
        """Return the runner's identity and what it can run; see `Runner.hello`.

        Raises:
            RUNNER_NOT_CONFINED: the agent requires a confined runner, and this one, or the phone's kernel, does not provide it.
            As `RemoteRunner.hello`.
        """
        hello = await super().hello()
        if self.must_be_confined and "seccomp" not in hello.confined:
            raise error_for(
                "RUNNER_NOT_CONFINED",
                "The runner on the phone must be confined by seccomp, but is confined by "
                f"{', '.join(hello.confined) or 'nothing'} only.",
                "Build a new bundle with `etfarm bundle build`, or start the agent without --require-jail.",
                active=",".join(hello.confined),
            )
        log.debug("the phone's runner is confined by %s", ", ".join(hello.confined) or "nothing")
        return hello

    async def load(self, program: Path, data: Sequence[Path] = ()) -> Loaded:
        """Load installed files; see `Runner.load`."""
        return await super().load(Path(self.files.file(program)), [Path(self.files.file(path)) for path in data])

    async def trace(self, iterations: int, etdump: Path, *, warmup: int = 1, on_progress: OnProgress | None = None) -> Traced:
        """Trace the method; see `Runner.trace`. `collect` then fetches the file."""
        traced = await super().trace(iterations, self._remote_path(etdump), warmup=warmup, on_progress=on_progress)
        self._written[etdump] = traced.etdump_bytes
        return replace(traced, etdump=etdump)

    async def debug(self, etdump: Path, dump: Path, *, max_bytes: int | None = None) -> Debugged:
        """Record intermediate outputs; see `Runner.debug`. `collect` then fetches the files."""
        debugged = await super().debug(self._remote_path(etdump), self._remote_path(dump), max_bytes=max_bytes)
        self._written |= {etdump: debugged.etdump_bytes, dump: debugged.dump_bytes}
        return replace(debugged, etdump=etdump, dump=dump)

    @property
    def moving(self) -> str:
        """What is being transferred; see `RemoteRunner.moving`."""
        return "files that it wrote" if self._collecting else _MOVED.get(self.stage, "")

    @property
    def has_files(self) -> bool:
        """Whether files are still on the phone; see `RemoteRunner.has_files`."""
        return bool(self._written)

    async def collect(self, on_progress: Progressed | None = None) -> None:
        """Fetch the files and delete them on the phone; see `RemoteRunner.collect`.

        Raises:
            DeviceError: they cannot be read, or the phone is disconnected or does not answer.
            OSError: they cannot be written here.
        """
        self._collecting = True
        done, total = 0, sum(self._written.values())
        for path, size in self._written.items():

            def report_part(part: int, _: int) -> None:
                if on_progress is not None:
                    on_progress(done + part, total)  # noqa: B023 - called before the loop goes on

            await self.files.pull(str(self._remote_path(path)), path, report_part)
            done += size
        self._written.clear()
        self._collecting = False

    def _remote_path(self, path: Path) -> Path:
        return Path(self.folder, path.name)


class OwnPhoneRunner(PhoneRunner):
    """A runner that was installed on the phone beforehand."""

    kind: ClassVar[str] = "own"
