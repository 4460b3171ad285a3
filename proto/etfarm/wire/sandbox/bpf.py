"""Instructions of classic BPF, as seccomp filters use them on x86_64 and aarch64.

Source: linux/bpf_common.h, linux/seccomp.h, linux/audit.h.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the architectures that a filter can be built for, by platform.machine()."""

LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUALS: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
ABOVE: Final = 0x25  # BPF_JMP | BPF_JGT | BPF_K
ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K

NUMBER, ARCHITECTURE, ARGUMENT_0, ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in struct seccomp_data; of an argument, its low word: both architectures are little-endian."""

INSTRUCTION_BYTES: Final = 8
"""Size of a struct sock_filter."""
_RETURN_ALLOW: Final = 0x7FFF0000
_RETURN_KILL_PROCESS: Final = 0x80000000
_RETURN_ERRNO: Final = 0x00050000


def instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return a struct sock_filter.

    Args:
        code: the operation, such as `EQUALS`.
        value: its operand.
        then: instructions that a jump skips if its condition holds.
        otherwise: instructions that a jump skips if its condition does not hold.
    """
    return struct.pack("HBBI", code, then, otherwise, value)


def refuse(error: int = errno.EPERM) -> bytes:
    """Return the instruction that lets the call fail with `error`."""
    return instruction(RETURN, _RETURN_ERRNO | error)


def load_call(machine: str) -> list[bytes]:
    """Return the first instructions of a filter: load the call's number, and kill a process of a foreign architecture.

    The numbers of a foreign architecture (i386 on x86_64, AArch32 on aarch64) differ, so no table applies to it.
    """
    return [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUALS, ARCHITECTURES[machine], then=1),
        instruction(RETURN, _RETURN_KILL_PROCESS),
        instruction(LOAD, NUMBER),
    ]


ALLOW: Final = instruction(RETURN, _RETURN_ALLOW)
"""The instruction that allows the call."""
