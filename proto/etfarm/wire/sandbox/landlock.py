"""Landlock restrictions, which a process places on its own file access without privileges. Needs Linux 5.13 with Landlock.

A `Ruleset` refuses everything that the kernel's Landlock handles and that no rule allows: files, TCP, and from Linux 6.12 on
abstract unix sockets and signals to processes outside. Operations that an older kernel's Landlock does not handle stay allowed.
Source: Documentation/userspace-api/landlock.rst, include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from etfarm.wire.sandbox import syscalls

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_DIR: Final = 1 << 7
MAKE_REGULAR: Final = 1 << 8
TRUNCATE: Final = 1 << 14

READ: Final = READ_FILE | READ_DIR
"""Rights of a file or folder that is only read."""
RUN: Final = READ | EXECUTE
"""Rights of programs and the libraries that they load."""
USE: Final = READ_FILE | WRITE_FILE
"""Rights of a device such as /dev/null."""
WORK: Final = READ | WRITE_FILE | REMOVE_FILE | MAKE_REGULAR | TRUNCATE
"""Rights of a folder for plain files: no folders, links, sockets or devices can be created in it."""
WORK_TREE: Final = WORK | MAKE_DIR | REMOVE_DIR
"""Rights of a folder for plain files and folders."""

_FILE_RIGHTS: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that a rule for a file, as opposed to a folder, may grant."""
_RIGHTS_BY_ABI: Final = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights that a kernel supports, by the first version of the interface that has them."""
NETWORK_ABI: Final = 4
_ALL_TCP: Final = 0b11
_SCOPE_ABI: Final = 6
_ALL_SCOPES: Final = 0b11
CREATE_RULESET: Final = 444
"""The number of the first of three system calls, equal on all architectures."""
_ADD_RULE, _RESTRICT = 445, 446
_VERSION_QUERY: Final = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_EOPNOTSUPP: Final = 95


def abi() -> int:
    """Return the version of the kernel's Landlock interface; 0 if it is missing or disabled."""
    return max(0, _call(CREATE_RULESET, None, 0, _VERSION_QUERY))


class Ruleset:
    """Rules that this process applies to itself with `restrict`.

    Raises:
        OSError: the kernel has no Landlock.
    """

    def __init__(self) -> None:
        version = abi()
        if version == 0:
            raise OSError(_EOPNOTSUPP, "the kernel has no Landlock, or it is disabled")
        count = max(count for first, count in _RIGHTS_BY_ABI.items() if first <= version)
        self._known = (1 << count) - 1
        attributes = struct.pack("Q", self._known)
        if version >= NETWORK_ABI:
            attributes += struct.pack("Q", _ALL_TCP)
        if version >= _SCOPE_ABI:
            attributes += struct.pack("Q", _ALL_SCOPES)
        self._has_network = version >= NETWORK_ABI
        self._descriptor = _checked(_call(CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")

    def allow(self, descriptor: int, rights: int, *, is_folder: bool) -> None:
        """Grant rights on the file or folder of an open descriptor, and on everything below a folder."""
        rights &= self._known if is_folder else self._known & _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(_call(_ADD_RULE, self._descriptor, _PATH_BENEATH, rule, 0), "landlock_add_rule")

    def allow_connections(self, port: int) -> None:
        """Let the process connect to a TCP port of any host. Before Linux 6.7, it may connect to all of them anyway."""
        self._allow_tcp(_CONNECT_TCP, port)

    def allow_any_bind(self) -> None:
        """Let the process bind TCP sockets to ports that the system chooses, as gRPC does to find out what the host supports."""
        self._allow_tcp(_BIND_TCP, 0)

    def _allow_tcp(self, rights: int, port: int) -> None:
        if self._has_network:
            rule = struct.pack("=QQ", rights, port)
            _checked(_call(_ADD_RULE, self._descriptor, _NET_PORT, rule, 0), "landlock_add_rule")

    def restrict(self) -> None:
        """Confine this process and all its descendants for good. Needs `syscalls.forbid_new_privileges` before."""
        _checked(_call(_RESTRICT, self._descriptor, 0), "landlock_restrict_self")
        os.close(self._descriptor)


def _call(number: int, *arguments: bytes | int | None) -> int:
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(syscalls.libc().syscall(ctypes.c_long(number), *converted))


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
