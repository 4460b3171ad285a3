"""The jail of a child: no network, no capabilities, no secrets, limits, its own folder, dead when its parent is.

It takes away what a user's bytes could use if they got to run code. `compile.screen` keeps them from running any.
Files that the daemon's user may read stay readable: run the daemon as a user of its own.
Source: unshare(2), capabilities(7), prctl(2), user_namespaces(7), netdevice(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import tempfile
from pathlib import Path
from typing import Final

from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import FarmError

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION_3: Final = 0x20080522
_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 1

KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
"""All of the daemon's environment that its forkserver and children see. Tokens and passwords are not among it."""


class NetworkNotRemoved(FarmError):
    """The child still had a network, so it loaded nothing."""

    reason = "NETWORK_NOT_REMOVED"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The network of a compile process could not be taken away: {why}. No user's model is loaded like this.",
            "Run the server as root or allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1; in a "
            "container, a seccomp profile that permits unshare).",
            why=why,
        )


def network_namespace() -> int:
    """The inode of this process's network namespace."""
    return Path("/proc/self/ns/net").stat().st_ino


def clean_environment(folder: Path) -> dict[str, str]:
    """An environment without secrets, whose home, caches and temporary files lie in `folder`."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        # A fork of a process whose torch or BLAS has threads hangs.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # torch.load must not unpickle code, whatever its caller says
    }


def enter(folder: Path, limits: Limits, daemon_network: int, log: int) -> None:
    """Shuts this single-threaded, freshly forked process in.

    Args:
        folder: becomes the working directory, HOME and TMPDIR.
        daemon_network: `network_namespace()` of the daemon, which must be another.
        log: file descriptor that stdout and stderr are from now on, for Python, C and subprocesses alike.

    Raises:
        NetworkNotRemoved: the kernel refused or the check afterwards failed.
    """
    os.setsid()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment = clean_environment(folder)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    _remove_network()
    check_network(daemon_network)
    _drop_capabilities()
    _limit(limits)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when `parent`, its parent, dies. After `enter`: a change of credentials clears it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the new parent of whatever its children leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def check_network(daemon_network: int) -> None:
    """Verifies that this process has no way out: another namespace than the daemon's, and only a `lo` that is down.

    Raises:
        NetworkNotRemoved: otherwise.
    """
    if network_namespace() == daemon_network:
        raise NetworkNotRemoved("it is still in the daemon's network namespace")
    names = [name for _, name in socket.if_nameindex()]
    if names not in ([], ["lo"]):
        raise NetworkNotRemoved(f"it has the interfaces {', '.join(names)}")
    if names:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        if struct.unpack("16sH22x", answer)[1] & _IFF_UP:
            raise NetworkNotRemoved("its loopback interface is up")


def _remove_network() -> None:
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET
    if _libc().unshare(flags):
        raise NetworkNotRemoved(f"unshare said {os.strerror(ctypes.get_errno())!r}")
    if flags & _CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _drop_capabilities() -> None:
    # With CAP_SYS_ADMIN a child could walk back into the daemon's network by setns, with CAP_SYS_PTRACE into its memory.
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        _prctl(_PR_CAPBSET_DROP, capability)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    if _libc().capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _limit(limits: Limits) -> None:
    # RLIMIT_AS below what is mapped already would be a SIGSEGV; RLIMIT_DATA on top of it makes allocations fail.
    own = data_bytes()
    _lower(resource.RLIMIT_DATA, own + limits.memory_bytes, own + limits.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0, 0)
    # The soft limit's SIGXCPU is a death that can be told from others; the hard one's SIGKILL comes if it is ignored.
    _lower(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 5)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes)
    # When the host itself runs out of memory, the kernel takes this process rather than the daemon.
    Path("/proc/self/oom_score_adj").write_text("800")


def _lower(which: int, soft: int, hard: int) -> None:
    # A lower limit that the daemon was started under stays.
    _, before = resource.getrlimit(which)
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(which, (soft, hard))


def data_bytes() -> int:
    """VmData of this process: the private writable memory that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmData in /proc/self/status")


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
