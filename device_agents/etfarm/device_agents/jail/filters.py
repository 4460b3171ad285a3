"""The system calls that are refused to a runner besides those of `etfarm.wire.sandbox.seccomp`: above all, to start or signal
processes.

A runner computes: it reads its files, writes a few into its folder, and has threads. So it may neither fork, nor signal other
processes, nor create links, folders or device files, nor change modes, owners or priorities. A filter adds no cost to a call that
it always allows (the kernel caches those), and a timed pass makes hardly any other calls.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from etfarm.wire.sandbox import seccomp

_NUMBERS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "fork": (57, None), "vfork": (58, None),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "process_mrelease": (448, 448),
    "symlink": (88, None), "symlinkat": (266, 36), "link": (86, None), "linkat": (265, 37),
    "mkdir": (83, None), "mkdirat": (258, 34),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "setpgid": (109, 154), "setsid": (112, 157),
}  # fmt: skip
"""Calls that are refused with any arguments. Source: as `seccomp.NUMBERS`; None where an architecture lacks the call."""
_CLONE: Final = (56, 220)
_KILL: Final = (62, 129)
_TGKILL: Final = (234, 131)
_RT_TGSIGQUEUEINFO: Final = (297, 240)
_PRLIMIT: Final = (302, 261)
_PRCTL: Final = (157, 167)
_FCNTL: Final = (72, 25)
_IOCTL: Final = (16, 29)
_CLONE_THREAD: Final = 0x10000
_PR_SET_PDEATHSIG: Final = 1
_F_SETSIG, _F_SETOWN, _F_SETOWN_EX = 10, 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

_LOAD: Final = 0x20
_EQUALS: Final = 0x15
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_KILL_PROCESS: Final = 0x80000000


def runner_filters(pid: int) -> list[bytes]:
    """Return the filters for the runner with this process id; empty if there is no table of this machine's system calls."""
    machine = platform.machine()
    if machine not in seccomp.ARCHITECTURES or struct.calcsize("P") != 8:
        return []
    return [seccomp.build(seccomp.Policy(), machine), build(pid, machine)]


def build(pid: int, machine: str) -> bytes:
    """Return the filter of the process `pid` on `machine`, as an array of struct sock_filter."""
    column = list(seccomp.ARCHITECTURES).index(machine)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUALS, seccomp.ARCHITECTURES[machine], then=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]

    def refuse(numbers: Sequence[int | None], *body: bytes) -> None:
        """Refuse a call. A `body` that returns decides itself; one that falls through refuses."""
        if (number := numbers[column]) is not None:
            program.extend([_instruction(_EQUALS, number, otherwise=len(body) + 1), *body, _refusal()])

    allow = _instruction(_RETURN, _ALLOW)
    for numbers in _NUMBERS.values():
        refuse(numbers)
    # Only threads. clone3, whose flags a filter cannot read, is refused already.
    refuse(_CLONE, _instruction(_LOAD, _ARGUMENT_0), _instruction(_ANY_BIT, _CLONE_THREAD, otherwise=1), allow)
    for numbers in (_KILL, _TGKILL, _RT_TGSIGQUEUEINFO):
        refuse(numbers, _instruction(_LOAD, _ARGUMENT_0), _instruction(_EQUALS, pid, otherwise=1), allow)
    refuse(
        _PRLIMIT,
        _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_EQUALS, 0, then=1), _instruction(_EQUALS, pid, otherwise=1), allow,
    )  # fmt: skip
    # The runner must not cancel that it ends with the agent.
    refuse(_PRCTL, _instruction(_LOAD, _ARGUMENT_0), _instruction(_EQUALS, _PR_SET_PDEATHSIG, then=1), allow)
    # These name a process that the kernel then signals.
    refuse(
        _FCNTL,
        _instruction(_LOAD, _ARGUMENT_1),
        _instruction(_EQUALS, _F_SETOWN, then=3), _instruction(_EQUALS, _F_SETSIG, then=2),
        _instruction(_EQUALS, _F_SETOWN_EX, then=1), allow,
    )  # fmt: skip
    refuse(
        _IOCTL,
        _instruction(_LOAD, _ARGUMENT_1),
        _instruction(_EQUALS, _FIOSETOWN, then=2), _instruction(_EQUALS, _SIOCSPGRP, then=1), allow,
    )  # fmt: skip
    program.append(allow)
    return b"".join(program)


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)


def _refusal() -> bytes:
    return _instruction(_RETURN, _ERRNO | errno.EPERM)
