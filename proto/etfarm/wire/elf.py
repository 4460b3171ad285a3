"""Which architecture a program or library is for, by its first bytes: bundles are checked at both ends."""

from __future__ import annotations

import struct
from typing import Final

HEAD_BYTES: Final = 20
"""What `arch_of` needs of a file."""
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
"""e_machine of the ELF header. Source: elf(5)."""


def arch_of(head: bytes) -> str | None:
    """The architecture of a file that begins with `head`, as `uname -m` says it; None where it is no ELF file, or of another."""
    if len(head) < HEAD_BYTES or head[:4] != b"\x7fELF":
        return None
    (machine,) = struct.unpack_from("<H", head, 18)
    return _MACHINES.get(machine)
