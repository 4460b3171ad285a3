"""Detection of a program's or library's architecture from its first bytes, used by server and agents to check bundles."""

from __future__ import annotations

import struct
from typing import Final

HEAD_BYTES: Final = 20
"""Number of bytes of a file that `arch_of` needs."""
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
"""Architectures by e_machine of the ELF header. Source: elf(5)."""


def arch_of(head: bytes) -> str | None:
    """Return the architecture of a file that begins with `head`, named as by `uname -m`; None if it is not a known ELF file."""
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF":
        return None
    (machine,) = struct.unpack_from("<H", head, 18)
    return _MACHINES.get(machine)
