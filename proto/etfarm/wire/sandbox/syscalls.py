"""Wrappers of the Linux calls that confine a process: namespaces, mounts, identity, capabilities, prctl.

Each raises OSError with the call's errno. All act on the calling thread; call them in a process with a single thread.
They work on x86_64 and aarch64 alike, since they go through the C library's functions and never through raw numbers,
except for `mount_setattr`, whose number is the same on both.
Source: unshare(2), setns(2), mount(2), mount_setattr(2), pivot_root(2), capabilities(7), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from pathlib import Path
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
CLONE_NEW_ANY: Final = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
"""Every flag of clone(2) that creates a namespace. CLONE_NEWTIME lies in clone's signal byte: only unshare and clone3 take it."""

CAP_SYS_ADMIN: Final = 21

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 0x2

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_SECCOMP: Final = 22
PR_CAPBSET_DROP: Final = 24
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAP_AMBIENT: Final = 47

_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_SYS_MOUNT_SETATTR: Final = 442
_EINVAL: Final = 22


def libc() -> ctypes.CDLL:
    """Return the C library, whose calls set `ctypes.get_errno()`."""
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int = 0, third: int = 0, fourth: int = 0, fifth: int = 0) -> int:
    """Change a property of this process by the system call `prctl`; return its result."""
    arguments = [ctypes.c_ulong(argument) for argument in (value, third, fourth, fifth)]
    return _checked(libc().prctl(option, *arguments), f"prctl {option}")


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its next children) to new namespaces."""
    _checked(libc().unshare(flags), "unshare")


def setns(descriptor: int, kind: int = 0) -> None:
    """Move this process to the namespace of `descriptor`."""
    _checked(libc().setns(descriptor, kind), "setns")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount `source` on `target` by the system call `mount`."""
    texts = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
    _checked(libc().mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def unmount(target: str | Path, flags: int = MNT_DETACH) -> None:
    """Unmount `target` by the system call `umount2`."""
    _checked(libc().umount2(os.fsencode(target), flags), f"umount {target}")


def restrict_mount(target: str | Path, attributes: int, *, recursive: bool = False) -> None:
    """Set MOUNT_ATTR_* flags of the mount at `target`, and of those below it if `recursive`. Needs Linux 5.12."""
    sizes = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = libc().syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), os.fsencode(target), ctypes.c_uint(flags),
        sizes, ctypes.c_size_t(len(sizes)),
    )  # fmt: skip
    _checked(result, f"mount_setattr {target}")


def change_root(folder: str | Path) -> None:
    """Make `folder`, a mount point of this mount namespace, the root and detach the previous root."""
    os.chdir(folder)
    _checked(libc().pivot_root(b".", b"."), f"pivot_root {folder}")
    # Both roots are mounted at "/" now, the old one on top.
    unmount(".", MNT_DETACH)
    os.chdir("/")


def become(user: int, group: int) -> None:
    """Switch to a user and a group for good and leave all supplementary groups. Needs CAP_SETUID and CAP_SETGID."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def has_capability(capability: int) -> bool:
    """Return whether this process has a capability in its user namespace."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def drop_bounding_set() -> None:
    """Make it impossible to ever gain a capability by exec, if the process has CAP_SETPCAP. Call it before `become`."""
    highest = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(highest + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except PermissionError:
            break  # without CAP_SETPCAP; forbid_new_privileges keeps exec from using the bounding set


def drop_capabilities() -> None:
    """Give up every capability in every set, the bounding set if the process may change it."""
    drop_bounding_set()
    try:
        prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != _EINVAL:  # a kernel without ambient capabilities
            raise
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(libc().capset(header, bytes(24)), "capset")


def forbid_new_privileges() -> None:
    """Make exec ignore setuid bits and file capabilities from now on, in descendants too."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when `parent` dies. Call it last: a change of user clears it."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the new parent of whatever this process's descendants leave behind."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Make this process undumpable: its memory and /proc entries belong to root."""
    prctl(PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Let this process read its own /proc entries again, which a change of user prevents."""
    prctl(PR_SET_DUMPABLE, 1)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return int(result)
