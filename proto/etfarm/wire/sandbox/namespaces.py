"""Namespaces for a process that forks: a user namespace if the host grants no rights, and a process namespace per fork.

Source: user_namespaces(7), pid_namespaces(7), network_namespaces(7).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from etfarm.wire.sandbox import syscalls

_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 1


def enter_user_namespace() -> None:
    """Move this process to a new user namespace, in which it has every capability and keeps its user and group.

    Raises:
        OSError: the host allows no user namespaces, or the process has several threads.
    """
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def network_inode() -> int:
    """Return the inode of this process's network namespace."""
    return Path("/proc/self/ns/net").stat().st_ino


def leave_network() -> None:
    """Move this process to a new network namespace without any active interface.

    A process without the right to do so enters a new user namespace first.

    Raises:
        OSError: the host allows neither.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
    except PermissionError:
        enter_user_namespace()
        syscalls.unshare(syscalls.CLONE_NEWNET)


def find_network(former: int) -> str:
    """Describe what still connects this process to a network; empty if nothing does.

    Args:
        former: `network_inode` of the namespace that it must have left.
    """
    if network_inode() == former:
        return "it is still in the daemon's network namespace"
    names = [name for _, name in socket.if_nameindex()]
    if names not in ([], ["lo"]):
        return f"it has the interfaces {', '.join(names)}"
    if names:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        if struct.unpack("16sH22x", answer)[1] & _IFF_UP:
            return "its loopback interface is up"
    return ""


class PidNamespaceForks:
    """Forks whose child is the first process of a process namespace: its end ends everything in it.

    Once a process has created a namespace for its children, it must return to its own with setns before it can create another
    one; setns requires rights over its own namespace. A process without them (in a user namespace) forks twice instead.
    """

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(self._own, syscalls.CLONE_NEWPID)
            self._can_return = True
        except OSError:
            self._can_return = False

    def fork(self) -> int:
        """Fork; return 0 in the child. The child is process 1 if the host allows that, otherwise it is an ordinary fork.

        The result in the parent is the id of a process that may be short-lived: do not wait for the child by it.
        """
        if not self._can_return:
            return self._fork_twice()
        try:
            syscalls.unshare(syscalls.CLONE_NEWPID)
        except OSError:
            return self._forked(os.fork())
        try:
            return self._forked(os.fork())
        finally:
            if os.getpid() != 1:
                syscalls.setns(self._own, syscalls.CLONE_NEWPID)

    def _fork_twice(self) -> int:
        between = os.fork()
        if between:
            return between
        try:
            syscalls.unshare(syscalls.CLONE_NEWPID)
        except OSError:
            return self._forked(0)
        if os.fork():
            os._exit(0)
        return self._forked(0)

    def _forked(self, pid: int) -> int:
        if pid == 0:
            os.close(self._own)
        return pid
