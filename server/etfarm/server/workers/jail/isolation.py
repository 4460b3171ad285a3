"""The jail of a child: measures that limit what a user's bytes could do if they succeeded in running code.

The child has its own user, mounts (see `file_view`), process and network namespaces, and limits. It has no capabilities and
cannot gain any; a filter refuses system calls that could grant some. Measures that the host does not allow are recorded in
`measures`, except for the network: a child that still has a network loads nothing. `compile.screening` prevents users' bytes
from running code in the first place.

Children are forks of a process that has loaded torch, so tools that wrap a command (bubblewrap) cannot jail them: loading takes
seconds, a fork takes milliseconds.
Source: namespaces(7), capabilities(7), prctl(2), seccomp(2), cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.workers.jail import measures
from etfarm.server.workers.jail.file_view import Action, Step, View
from etfarm.server.workers.jail.measures import JailReport, Progress, jail_incomplete
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.sandbox import cgroups, namespaces, seccomp, syscalls

KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "ATEN_CPU_CAPABILITY")
"""The only environment variables of the daemon that its forkserver and children see; none has tokens or passwords.

ATEN_CPU_CAPABILITY limits the vector instructions that torch computes with.
"""

POLICY: Final = seccomp.Policy().with_denied("memfd_create", error=errno.ENOSYS)
"""The system calls that a child must not use. Memory of memfd_create would be missing from the tree's measured memory."""

_FIRST_USER: Final = 1_900_000_000
_BLOCK: Final = 256
_BLOCKS: Final = 900_000
"""User ids that distributions, systemd and container runtimes do not assign. Source: systemd's UIDS-GIDS.md."""

_OWN_MEMORY_BYTES: Final = 256 << 20
"""Allowance of a tree on top of its limit and the forkserver's pages, for the kernel's memory and file pages."""


def network_not_removed(why: str) -> EtfarmError:
    """Return the error that the child still had a network, so it loaded nothing."""
    return error_for(
        "NETWORK_NOT_REMOVED",
        f"The network of a compile process could not be taken away: {why}. No user's model is loaded like this.",
        "Run the server as root or allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1; on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that permits unshare).",
        why=why,
    )


@dataclass(frozen=True)
class Jail:
    """The jail that the daemon requests for one child; sent as JSON."""

    daemon_network: int
    """`namespaces.network_inode()` of the daemon, which must not be the child's."""
    point: str
    """An existing empty folder that the child's root is mounted on."""
    user: int | None = None
    """User and group id of the child, where the daemon is root; None if no user ids are available."""
    required: bool = False
    """Whether a child that lacks a measure refuses its task."""
    cgroup: str = ""
    """Name of the control groups of this daemon's children."""
    place: cgroups.Place | None = None
    """Parent of these control groups; None if the host allows none."""


@dataclass(frozen=True)
class JailOptions:
    """A server's settings for its children's jails."""

    hidden: tuple[Path, ...] = ()
    """Files and folders that no child may see, even if they are within the code: the data folder, tokens, keys."""
    readable: tuple[Path, ...] = ()
    """Additional files and folders that every child may read, such as libraries in unusual places."""
    required: bool = False
    """Whether a child that lacks a measure refuses its task."""
    first_user: int | None = None
    """First user id for the children of a server that runs as root, one id per concurrent child; None to choose."""


def choose_users(folder: Path, count: int) -> int | None:
    """Return the first of `count` user ids without accounts that no other server is likely to use; None if there are none.

    Args:
        folder: the server's folder, which determines the ids.
    """
    if os.geteuid() != 0:
        return None
    block = zlib.crc32(os.fsencode(folder)) % _BLOCKS
    wanted = _FIRST_USER + block * _BLOCK
    if count <= _BLOCK and has_user(wanted) and has_user(wanted + count - 1):
        return wanted
    # A container's namespace often has 65,536 user ids, of which those right below 65,000 are rarely assigned.
    fallback = 65_000 - count
    return fallback if fallback > 60_000 and has_user(fallback) and has_user(65_000) else None


def clean_environment(folder: Path) -> dict[str, str]:
    """Return an environment without secrets that uses `folder` for home, caches and temporary files."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "USER": "child",
        "LOGNAME": "child",
        # A fork of a process whose torch or BLAS has several threads hangs.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # torch.load must not unpickle code, whatever its arguments are
    }


def enter(
    folder: Path,
    limits: Limits,
    jail: Jail,
    *,
    log: int,
    channel: int,
    shared: Sequence[Step] = (),
    files: Sequence[Path] = (),
    group: cgroups.Group | None = None,
    is_first_process: bool = False,
    watches_memory: bool = False,
) -> JailReport:
    """Enter the jail. The process must be single-threaded and newly forked.

    Args:
        folder: the new working directory, HOME and TMPDIR, and the only writable place besides /tmp.
        log: file descriptor that replaces stdout and stderr for Python, native code and subprocesses.
        channel: the only other descriptor that stays open.
        shared: paths that all children see, from `file_view.plan`.
        files: files of the request, the only files of the daemon that are readable.
        group: control group to join.
        is_first_process: whether the process namespace is the child's own.
        watches_memory: whether the supervisor kills the tree if it exceeds its memory limit.

    Raises:
        NETWORK_NOT_REMOVED: the kernel refused to remove the network, or the check afterwards failed.
        JAIL_INCOMPLETE: a measure is missing and the jail is required.
    """
    _detach(folder, log, channel)
    progress = Progress()
    _join(progress, group, watches_memory=watches_memory)
    _remove_network()
    check_network(jail.daemon_network)
    progress.add(measures.NETWORK, "a network namespace without interfaces")
    user = _select_user(progress, jail, shared)
    if user != os.geteuid():
        os.chown(folder, user, user)
        _open_files(files)
    _isolate(progress, folder, jail, shared, files, user, is_first_process=is_first_process)
    os.chdir(folder)
    _limit(limits, own_user=user == jail.user, progress=progress)
    _drop(progress, user)
    report = progress.report()
    if jail.required and report.missing:
        raise jail_incomplete(report.missing)
    return report


def _detach(folder: Path, log: int, channel: int) -> None:
    os.setsid()
    os.umask(0o022)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, of which one is gone already
        # An open descriptor of a folder outside would let the child leave its root.
        if int(name) > 2 and int(name) not in (log, channel):
            with contextlib.suppress(OSError):
                os.close(int(name))
    environment = clean_environment(folder)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    tempfile.tempdir = None


def _join(progress: Progress, group: cgroups.Group | None, *, watches_memory: bool) -> None:
    try:
        if group is not None:
            group.join()
    except OSError as error:
        progress.fail(measures.MEMORY, str(error))
        return
    version = f"control group, version {group.version}" if group is not None else ""
    if group is not None and group.limits_processes:
        progress.add(measures.PROCESS_LIMIT, version)
    if group is not None and group.limits_memory:
        progress.add(measures.MEMORY, version)
    elif watches_memory:
        progress.add(measures.MEMORY, "the tree's memory is measured every half second")


def check_network(daemon_network: int) -> None:
    """Verify that this process has no network: its namespace differs from the daemon's, and only has a `lo` that is down.

    Raises:
        NETWORK_NOT_REMOVED: the process has a network.
    """
    if network := namespaces.find_network(daemon_network):
        raise network_not_removed(network)


def _remove_network() -> None:
    try:
        namespaces.leave_network()
    except OSError as error:
        raise network_not_removed(f"unshare failed with {os.strerror(error.errno or 0)!r}") from None


def _select_user(progress: Progress, jail: Jail, shared: Sequence[Step]) -> int:
    """Return the user id that the child will have."""
    own = os.geteuid()
    closed = next((step.path for step in shared if step.action is Action.SHOW and not step.is_open), None)
    if own == 0 and closed is not None:
        # An installation with umask 077 is not importable for other users.
        progress.fail(measures.USER, f"the code in {closed} can be read by root only: chmod -R o+rX lets other users read it")
        return own
    if jail.user is not None and own == 0 and has_user(jail.user):
        progress.add(measures.USER, f"user {jail.user}, of this child alone")
        return jail.user
    if own == 0:
        progress.fail(measures.USER, "the server is root, but its namespace has no other user ids")
    else:
        progress.add(measures.USER, f"user {own} in a user namespace of its own")
    return own


def _open_files(files: Sequence[Path]) -> None:
    # For a server with umask 077. Its data folder, which is closed to other users, still protects the files.
    for file in files:
        with contextlib.suppress(OSError):
            mode = file.stat().st_mode
            if stat.S_ISREG(mode) and not mode & 0o004:
                file.chmod(stat.S_IMODE(mode) | 0o044)


def has_user(user: int) -> bool:
    """Return whether this process's user namespace contains the user id."""
    rows = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= user < first + count for first, _, count in rows)


def _isolate(
    progress: Progress,
    folder: Path,
    jail: Jail,
    shared: Sequence[Step],
    files: Sequence[Path],
    user: int,
    *,
    is_first_process: bool,
) -> None:
    apart = syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
    with contextlib.suppress(OSError):  # optional, since seccomp refuses the calls by which children could communicate
        syscalls.unshare(apart)
    if is_first_process:
        progress.add(measures.PROCESSES, "a process namespace")
    else:
        progress.fail(measures.PROCESSES, "the host allows no process namespace")
    with progress.attempt(measures.MOUNTS, "a root of its own: system and code read-only, its folder, its request's files"):
        syscalls.unshare(syscalls.CLONE_NEWNS)
        view = View(Path(jail.point))
        view.build(shared, user)
        view.add_folder(folder)
        view.add_files(files)
        if is_first_process:
            try:
                view.add_own_proc()
            except OSError as error:
                progress.fail(measures.PROCESSES, f"a process namespace, but no /proc of its own: {error}")
                view.add_host_proc()
        else:
            view.add_host_proc()
        view.enter()


def _drop(progress: Progress, user: int) -> None:
    syscalls.drop_bounding_set()
    if os.geteuid() != user:
        syscalls.become(user, user)
        # After a change of user, /proc/self belongs to root; torch and Python read it.
        syscalls.show_memory()
    syscalls.drop_capabilities()
    syscalls.forbid_new_privileges()
    progress.add(measures.PRIVILEGES, "no capabilities, no new privileges")
    with progress.attempt(measures.SECCOMP, f"{len(POLICY.denied)} system calls refused"):
        seccomp.install(POLICY)


def _limit(limits: Limits, *, own_user: bool, progress: Progress) -> None:
    # RLIMIT_AS below the mapped memory would cause a SIGSEGV; RLIMIT_DATA above the current use makes allocations fail.
    own = data_bytes()
    _lower(resource.RLIMIT_DATA, own + limits.memory_bytes, own + limits.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0, 0)
    # The soft limit's SIGXCPU identifies the cause of death; if it is ignored, the hard limit sends SIGKILL.
    _lower(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 5)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes)
    if own_user or _counts_by_namespace():
        # Above the group's limit, because only the group counts refused forks.
        _lower(resource.RLIMIT_NPROC, limits.processes + 16, limits.processes + 16)
        if measures.PROCESS_LIMIT not in progress.measures:
            progress.add(measures.PROCESS_LIMIT, "resource limit of the child's user")
    elif measures.PROCESS_LIMIT not in progress.measures:
        progress.fail(measures.PROCESS_LIMIT, "no control group, and before Linux 5.14 a user's processes are counted together")
    # If the host runs out of memory, the kernel kills this process rather than the daemon.
    Path("/proc/self/oom_score_adj").write_text("800")


def _counts_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts a user's processes in this user namespace only, and not on the whole host."""
    release = os.uname().release.split(".")
    return os.geteuid() != 0 and tuple(int(part) for part in release[:2] if part.isdigit()) >= (5, 14)


def _lower(which: int, soft: int, hard: int) -> None:
    # Keeps a lower limit that the daemon inherited.
    _, before = resource.getrlimit(which)
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(which, (soft, hard))


def tree_bytes(limits: Limits) -> int:
    """Return the memory in bytes that a whole tree may use; pages shared with the forkserver count once they are written."""
    return limits.memory_bytes + data_bytes() + _OWN_MEMORY_BYTES


def data_bytes() -> int:
    """Return VmData of this process in bytes: the private writable memory that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmData in /proc/self/status")
