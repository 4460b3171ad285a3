"""The confinement of the web page's process, which handles visitors' bytes and tokens and needs little of the host.

Its environment has nothing of the server's but what Python needs. It has a memory limit, no new privileges, a system call filter,
and Landlock: it reads the system and the installed code, writes its own folder, and connects to the farm's port. Where the server
is root it has a user of its own. `etfarm.wire.sandbox.launch` applies all of that before it becomes the page.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from etfarm.server import preflight
from etfarm.server.compile.upload_screening import CHILDREN as INSPECTORS
from etfarm.server.config import Config
from etfarm.server.workers.child_pool import URGENT
from etfarm.server.workers.jail import isolation, measures
from etfarm.server.workers.jail.file_view import SETTINGS, SYSTEM, code_paths
from etfarm.server.workers.jail.measures import Measure
from etfarm.wire.channel import parse_addresses
from etfarm.wire.private import is_open_to_all
from etfarm.wire.sandbox import bpf, landlock, launch, seccomp

FILES: Final = "files"
MEMORY_BYTES: Final = 2 << 30
"""Private memory of the page. It has 100 MiB without visitors; large reports of several visitors at a time take hundreds."""
PROCESSES: Final = 1_024
"""Maximum number of threads and processes of the page's own user."""

_ANSWER_S: Final = 10.0
_OOM_SCORE: Final = b"500"
"""Adjustment with which the kernel, out of memory, kills the page rather than the server."""
_NETWORK: Final = ("hosts", "resolv.conf", "host.conf", "gai.conf", "services", "protocols", "mime.types")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full")
_KERNEL: Final = (
    "/dev/random", "/dev/urandom", "/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime",
    "/proc/version", "/proc/filesystems", "/proc/sys/vm", "/proc/sys/kernel", "/proc/sys/net/core/somaxconn",
)  # fmt: skip
_DENIED: Final = {name: error for name, error in seccomp.DENIED.items() if name not in seccomp.SOCKETS}
POLICY: Final = seccomp.Policy(_DENIED, without_unix_sockets=True).with_denied("memfd_create")
"""The system calls that the page must not use. Memory of memfd_create would not count towards its limit."""


class PageConfinement:
    """The confinement of one server's web page.

    Args:
        config: the server's configuration.
        address: where the server listens.
        measures: the measures that the host allows, if they are known already.
    """

    def __init__(self, config: Config, address: str, measures: tuple[Measure, ...] | None = None) -> None:
        self._hidden = [path.resolve() for path in preflight.jail_options(config).hidden]
        self._address = address
        self.user = _choose_user(config)
        """User and group id of the page; None for the server's own."""
        self._measures = measures

    async def measures(self) -> tuple[Measure, ...]:
        """Return the measures with those that the host does not allow; determined once, by a process that confines itself."""
        if self._measures is None:
            self._measures = _describe(*await _probe(self.user), self.user)
        return self._measures

    async def start(self, command: Sequence[str], folder: Path, files: Sequence[int]) -> asyncio.subprocess.Process:
        """Start the confined page, with pipes for its stdin and stdout.

        Args:
            command: the command line; its program is an absolute path.
            folder: its own folder, which exists.
            files: descriptors that it inherits.
        """
        active = {measure.name for measure in await self.measures() if measure.active}
        process = await asyncio.create_subprocess_exec(
            *launch.command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=files, cwd="/",
            env=_environment(folder),
        )  # fmt: skip
        assert process.stdin is not None
        with suppress(OSError):  # not allowed in every container
            Path(f"/proc/{process.pid}/oom_score_adj").write_bytes(_OOM_SCORE)
        specification = self._specification(command, folder, active)
        if specification["user"] is not None:
            self._admit(specification["user"], folder, files)
        with suppress(BrokenPipeError, ConnectionResetError):  # the end of stdout shows that the launcher has ended
            process.stdin.write(launch.encode(specification))
            await process.stdin.drain()
        return process

    def _admit(self, user: int, folder: Path, files: Sequence[int]) -> None:
        """Give the folder and the inherited files to the page's user, and let it connect to the server's unix socket, if any."""
        os.chown(folder, user, user)
        for file in files:
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.fchown(file, user, user)
        if self._address.startswith("unix:"):
            path = Path(self._address.removeprefix("unix:"))
            os.chown(path, -1, user)
            path.chmod(0o660)

    def _specification(self, command: Sequence[str], folder: Path, active: set[str]) -> dict[str, Any]:
        code = [Path(sys.executable), *code_paths()]
        reached = [*code, folder.parent]
        ports, policy = [], POLICY
        for address in parse_addresses(self._address):
            if address.text.startswith("unix:"):
                policy = replace(POLICY, without_unix_sockets=False)
                reached.append(Path(address.text.removeprefix("unix:")).parent)
            else:
                ports.append(int(address.text.rpartition(":")[2]))
        has_landlock = FILES in active
        user = self.user if measures.USER in active else None
        is_closed = user is not None and not all(map(is_open_to_all, reached))
        if is_closed and not has_landlock:
            user = None  # it could read either everything, or not even its own code
        return _specification(
            command, str(folder), user, list(self._rules(code, folder)) if has_landlock else None, ports, policy,
            reads_as_root=is_closed, environment=_environment(folder),
        )  # fmt: skip

    def _rules(self, code: Sequence[Path], folder: Path) -> Iterator[tuple[str, int, bool]]:
        for path in (*map(Path, SYSTEM), *code):
            yield from ((str(shown), rights, False) for shown, rights in _shown(path.resolve(), self._hidden))
        for name in (*SETTINGS, *_NETWORK):
            yield from ((str(shown), rights, False) for shown, rights in _shown(Path("/etc", name).resolve(), self._hidden))
        for device in _DEVICES:
            yield device, landlock.USE, False
        for file in _KERNEL:
            yield file, landlock.READ, False
        yield "/proc/self", landlock.READ, True
        yield str(folder), landlock.WORK_TREE, False


def _shown(path: Path, hidden: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """Yield what a process may read of a path, and the rights for each part: all of it but the hidden files and folders."""
    if any(each == path or each in path.parents for each in hidden):
        return
    if not any(path in each.parents for each in hidden):
        yield path, landlock.RUN
        return
    yield path, landlock.READ_DIR  # Python's import lists the folder
    for inner in path.iterdir():
        yield from _shown(inner, hidden)


def _choose_user(config: Config) -> int | None:
    if config.jail_user is None or os.geteuid() != 0:
        return isolation.choose_users(config.data / "work" / "page", 1)
    return config.jail_user + config.workers + URGENT + INSPECTORS + URGENT


def _describe(active: set[str], missing: dict[str, str], user: int | None) -> tuple[Measure, ...]:
    """Return the measures for people from the launcher's names."""
    network = "; TCP to the farm's port only" if landlock.abi() >= landlock.NETWORK_ABI else ""
    texts = (
        (measures.USER, launch.USER, f"user {user}, of the page alone"),
        (FILES, launch.LANDLOCK, f"Landlock: system and code read-only, its own folder{network}"),
        (measures.PRIVILEGES, launch.PRIVILEGES, "no new privileges"),
        (measures.SECCOMP, launch.SECCOMP, f"{len(POLICY.denied)} system calls refused"),
    )
    why_no_user = "the server is not root" if os.geteuid() != 0 else "the server's namespace has no other user ids"
    defaults = {launch.USER: why_no_user, launch.SECCOMP: f"there is no table of system calls for {platform.machine()}"}
    taken = [
        Measure(name, step in active, text if step in active else missing.get(step) or defaults.get(step, "not taken"))
        for name, step, text in texts
    ]
    limit = Measure(measures.MEMORY, "launcher" not in missing, missing.get("launcher", f"{MEMORY_BYTES >> 20} MiB"))
    return (*taken, limit)


async def _probe(user: int | None) -> tuple[set[str], dict[str, str]]:
    """Return the measures that work on this host, and why others do not, by their names in `launch`."""
    process = await asyncio.create_subprocess_exec(
        *launch.command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd="/", env=_environment(Path("/"))
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(_ANSWER_S):
            with suppress(OSError):
                process.stdin.write(launch.encode(_specification(["-"], "/", user, [], [], probe=True)))
                await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(8), "little")
            answer = marshal.loads(await process.stdout.readexactly(size))
    except (TimeoutError, asyncio.IncompleteReadError):
        return set(), {"launcher": "the process that confines itself does not answer"}
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return set(answer["active"]), dict(answer["missing"])


def _specification(
    command: Sequence[str],
    folder: str,
    user: int | None,
    rules: list[tuple[str, int, bool]] | None,
    ports: Sequence[int],
    policy: seccomp.Policy = POLICY,
    *,
    reads_as_root: bool = False,
    probe: bool = False,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    limits = [(resource.RLIMIT_CORE, 0), _limit(resource.RLIMIT_DATA, MEMORY_BYTES)]
    if user is not None:
        limits.append(_limit(resource.RLIMIT_NPROC, PROCESSES))
    machine = platform.machine()
    has_filter = machine in bpf.ARCHITECTURES and struct.calcsize("P") == 8
    return {
        "argv": list(command), "env": environment or {}, "folder": folder, "parent": os.getpid(), "user": user,
        "reads_as_root": reads_as_root, "rules": rules, "ports": list(dict.fromkeys(ports)),
        "filters": [seccomp.build(policy, machine)] if has_filter else [], "limits": limits, "required": [], "probe": probe,
    }  # fmt: skip


def _limit(which: int, limit: int) -> tuple[int, int]:
    """Return a resource limit, or the lower one that this process has itself."""
    _, own = resource.getrlimit(which)
    return which, limit if own == resource.RLIM_INFINITY else min(limit, own)


def _environment(folder: Path) -> dict[str, str]:
    """Return the page's environment: nothing of the server's but what Python needs, and its own folder."""
    kept = {name: os.environ[name] for name in isolation.KEPT_VARIABLES if name in os.environ}
    return kept | {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
