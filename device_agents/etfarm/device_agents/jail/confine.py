"""The launch of confined runners: with their own user if the agent is root, Landlock, seccomp, and no new privileges."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import marshal
import os
import pwd
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.jail.box import Box
from etfarm.device_agents.jail.filters import runner_filters
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.runners.child import Child, LocalChild, Spawn, spawn_here
from etfarm.wire.errors import DeviceError, EtfarmError
from etfarm.wire.private import is_open_to_all
from etfarm.wire.sandbox import landlock, launch

log = logging.getLogger(__name__)

_ANSWER_S: Final = 10.0
_PROCESSES: Final = 4096
"""Maximum number of threads of a user. No runner needs as many; it bounds forks on a kernel without seccomp."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full")
_RANDOM: Final = ("/dev/random", "/dev/urandom")
_MEASURED: Final = (
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/version",
    "/proc/filesystems", "/proc/pressure", "/proc/sys/vm", "/proc/sys/kernel/osrelease",
)  # fmt: skip
"""Kernel files that the runner, XNNPACK, the C library and qemu read; for processes, only the runner's own."""
_HARDWARE: Final = (
    "/sys/devices/system",
    "/sys/devices/soc0",
    "/sys/devices/virtual/thermal",
    "/sys/class/thermal",
    "/sys/firmware/devicetree",
)
_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_ENVIRONMENT: Final = {"LC_ALL": "C.UTF-8", "HOME": ".", "TMPDIR": "."}


class JailIncomplete(DeviceError):
    """A measure that the agent requires for runners and the kernel lacks."""

    reason = "JAIL_INCOMPLETE"


@dataclass(frozen=True)
class Measures:
    """The measures that confine runners on this machine."""

    active: frozenset[str] = frozenset()
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons for which other measures are not available, by name."""

    @property
    def is_complete(self) -> bool:
        """Whether a runner cannot reach other files, other processes, or the network."""
        files = {launch.USER, launch.LANDLOCK} & self.active
        return bool(files) and {launch.SECCOMP, launch.PRIVILEGES, launch.CAPABILITIES} <= self.active

    def __str__(self) -> str:
        summary = [f"runners are confined by {', '.join(sorted(self.active)) or 'nothing'}"]
        return "; ".join(summary + [f"{name} is not available ({why})" for name, why in sorted(self.missing.items())])


class Jail:
    """The confinement of one agent's runners. Call `close` after `keep_ready`.

    Args:
        options: the agent's settings.
        measures: the measures that work on this machine, if they are known already.
    """

    def __init__(self, options: JailOptions, measures: Measures | None = None) -> None:
        self._options = options
        self._measures = measures
        self._is_logged = False
        self._ready: asyncio.Task[LocalChild] | None = None
        self._keeps_ready = False
        # Several agents on one machine start at different positions of the range.
        offset = os.getpid() * 61 % max(1, len(options.users))
        self._users: Iterator[int] = itertools.cycle([*options.users[offset:], *options.users[:offset]])

    async def measures(self) -> Measures:
        """Return the measures that work on this machine; determined once, with a process that confines itself.

        Raises:
            JailIncomplete: a measure that the options require is missing.
        """
        if self._measures is None:
            self._measures = await self._probe()
        if self._options.required and not self._measures.is_complete:
            raise JailIncomplete(
                f"Runners cannot be confined on this machine: {self._measures}.",
                "Start the agent as root or use a kernel with Landlock and seccomp, or leave out --require-jail.",
                missing=",".join(sorted(self._measures.missing)),
            )
        return self._measures

    @contextmanager
    def box(self, folder: Path) -> Iterator[Box]:
        """Provide a runner's folder for as long as the runner lives. Call `measures` first."""
        assert self._measures is not None
        if not self._is_logged:
            log.info("%s", self._measures)
            self._is_logged = True
        box = Box(folder, self._user_of(folder) if launch.USER in self._measures.active else None)
        try:
            yield box
        finally:
            box.close()
            self._prepare()

    def spawn(self, box: Box, programs: Sequence[Path] = ()) -> Spawn:
        """Return a function that starts a confined process in a box.

        Args:
            programs: further files and folders that the process runs or loads, such as an emulator or an interpreter.
        """

        async def start(command: Sequence[str], folder: Path) -> Child:
            measures = await self.measures()
            child = await self._launcher()
            try:
                specification = self._specification(measures, box, command, programs, child.pid)
            except JailIncomplete:
                child.kill()
                await child.wait()
                raise
            # If the launcher has already ended, the end of its stdout shows that.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                child.stdin.write(launch.encode(specification))
                await child.stdin.drain()
            return child

        return start

    async def keep_ready(self) -> None:
        """Keep a launcher process waiting for the next runner from now on, so that the runner starts without delay."""
        self._keeps_ready = True
        self._prepare()

    async def close(self) -> None:
        """End the waiting launcher."""
        self._keeps_ready = False
        if self._ready is not None:
            ready, self._ready = self._ready, None
            with contextlib.suppress(EtfarmError):
                child = await ready
                child.kill()
                await child.wait()

    def _prepare(self) -> None:
        if self._keeps_ready and self._ready is None:
            self._ready = asyncio.create_task(spawn_here(launch.command(), Path("/")), name="launcher")

    async def _launcher(self) -> LocalChild:
        ready, self._ready = self._ready, None
        if ready is not None:
            with contextlib.suppress(EtfarmError):
                child = await ready
                if not child.ended:
                    return child.from_now()
        return await spawn_here(launch.command(), Path("/"))

    async def _probe(self) -> Measures:
        if not self._options.enabled:
            return Measures()
        try:
            child = await spawn_here(launch.command(), Path("/"))
        except EtfarmError as error:
            return Measures(missing={"launcher": error.message})
        answer: dict[str, Any] | None = None
        try:
            users = next(self._users) if os.geteuid() == 0 and self._options.users else None
            probe = _specification(child.pid, "/", ["-"], user=users, rules=[], probe=True)
            async with asyncio.timeout(_ANSWER_S):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    child.stdin.write(launch.encode(probe))
                    await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(8), "little")
                answer = marshal.loads(await child.stdout.readexactly(size))
        except (TimeoutError, asyncio.IncompleteReadError):
            errors = (await child.stderr.read(4096)).decode(errors="replace").strip() if child.ended else ""
            return Measures(missing={"launcher": errors.splitlines()[-1] if errors else "it does not answer"})
        finally:
            child.kill()
            await child.wait()
        missing = dict(answer["missing"])
        if not probe["filters"]:
            missing[launch.SECCOMP] = f"there is no table of system calls for {os.uname().machine}"
        return Measures(frozenset(answer["active"]), missing)

    def _specification(
        self, measures: Measures, box: Box, command: Sequence[str], programs: Sequence[Path], pid: int
    ) -> dict[str, Any]:
        run = [(str(path), landlock.RUN, False) for path in (box.shared, *programs)]
        if programs:
            run += [(path, landlock.RUN, False) for path in _LIBRARIES]
        rules = [*run, (str(box.folder), landlock.WORK, False), *_common_rules()]
        # For example an interpreter in a user's home folder.
        closed = box.user is not None and not all(map(is_open_to_all, programs))
        specification = _specification(
            pid, str(box.folder), command,
            user=box.user, rules=rules if launch.LANDLOCK in measures.active else None, reads_as_root=closed,
        )  # fmt: skip
        if closed and launch.LANDLOCK not in measures.active:
            # With that capability the runner could read every file, and without it the runner cannot start.
            self._refuse_as_root(programs)
            specification["user"] = None
        if self._options.required:
            specification["required"] = sorted(measures.active)
        return specification

    def _refuse_as_root(self, programs: Sequence[Path]) -> None:
        """Refuse, or warn of, a process with the agent's user, which can access the agent's own files.

        Raises:
            JailIncomplete: runners must be confined.
        """
        closed = next(path for path in programs if not is_open_to_all(path))
        error = JailIncomplete(
            f"A runner in Python would have the agent's user and files: other users cannot read {closed}, and there "
            "is no Landlock.",
            "Install etfarm where every user may read it, or use a kernel with Landlock.", missing=launch.LANDLOCK,
        )  # fmt: skip
        if self._options.required:
            raise error
        log.warning("%s", error.message)

    def _user_of(self, folder: Path) -> int:
        """Return the user of the folder's earlier runner, whose files it holds, or else the next user id without an account."""
        owner: int = folder.stat().st_uid
        if owner in self._options.users:
            return owner
        for user in itertools.islice(self._users, len(self._options.users)):
            try:
                pwd.getpwuid(user)
            except KeyError:
                return user
        return next(self._users)


@functools.cache
def python_programs() -> tuple[Path, ...]:
    """Return the files that a Python child loads: this interpreter, and its module folders. Blocks to start an interpreter.

    The module folders of this process may differ: they may include the folder that it was started in.
    """
    command = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"]
    process = subprocess.run(command, env=_ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False)
    listed = json.loads(process.stdout) if process.returncode == 0 else [sys.prefix, sys.base_prefix]
    folders = {Path(name) for name in listed if Path(name).is_absolute() and Path(name).exists()} - {Path("/")}
    return (Path(sys.executable).resolve(), *sorted(folders | {folder.resolve() for folder in folders}))


def _specification(
    pid: int,
    folder: str,
    command: Sequence[str],
    *,
    user: int | None,
    rules: list[tuple[str, int, bool]] | None,
    reads_as_root: bool = False,
    probe: bool = False,
) -> dict[str, Any]:
    limits = [(resource.RLIMIT_CORE, 0)]
    if user is not None:
        limits.append((resource.RLIMIT_NPROC, _PROCESSES))
    return {
        "argv": list(command), "env": dict(_ENVIRONMENT), "folder": folder, "parent": os.getpid(),
        "user": user, "reads_as_root": reads_as_root, "rules": rules, "filters": runner_filters(pid),
        "limits": limits, "required": [], "probe": probe,
    }  # fmt: skip


def _common_rules() -> list[tuple[str, int, bool]]:
    return [
        *((path, landlock.USE, False) for path in _DEVICES),
        *((path, landlock.READ, False) for path in _RANDOM),
        *((path, landlock.READ, True) for path in _MEASURED),
        *((path, landlock.READ, False) for path in _HARDWARE),
    ]
