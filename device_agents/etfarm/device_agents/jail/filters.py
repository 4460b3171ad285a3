"""The system calls that are refused to a runner besides those of `etfarm.wire.sandbox.seccomp`, mainly process control.

A runner computes: it reads its files, writes a few into its folder, and has threads. So it may neither fork, nor signal other
processes, nor create links, folders or device files, nor change modes, owners or priorities. A filter adds no cost to a call that
it always allows (the kernel caches those), and a timed pass makes hardly any other calls.
"""

from __future__ import annotations

import platform
import struct
from typing import Final

from etfarm.wire.sandbox import bpf, seccomp
from etfarm.wire.sandbox.bpf import ALLOW, ANY_BIT, ARGUMENT_0, ARGUMENT_1, EQUALS, LOAD, instruction

_REFUSED: Final = (
    "fork", "vfork",
    "tkill", "rt_sigqueueinfo", "pidfd_send_signal", "pidfd_open",
    "process_mrelease",
    "symlink", "symlinkat", "link", "linkat",
    "mkdir", "mkdirat",
    "rename", "renameat", "renameat2",
    "chmod", "fchmod", "fchmodat", "fchmodat2",
    "chown", "fchown", "lchown", "fchownat",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "setpriority", "sched_setparam", "sched_setscheduler", "sched_setattr",
    "ioprio_set", "setpgid", "setsid",
)  # fmt: skip
"""Calls that are refused with any arguments."""
_CLONE_THREAD: Final = 0x10000
_PR_SET_PDEATHSIG: Final = 1
_F_SETSIG, _F_SETOWN, _F_SETOWN_EX = 10, 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902


def runner_filters(pid: int) -> list[bytes]:
    """Return the filters for the runner with this process id; empty if there is no table of this machine's system calls."""
    machine = platform.machine()
    if machine not in bpf.ARCHITECTURES or struct.calcsize("P") != 8:
        return []
    return [seccomp.build(seccomp.Policy(), machine), build(pid, machine)]


def build(pid: int, machine: str) -> bytes:
    """Return the filter of the process `pid` on `machine`, as an array of struct sock_filter."""
    column = list(bpf.ARCHITECTURES).index(machine)
    program = bpf.load_call(machine)

    def refuse(name: str, *body: bytes) -> None:
        """Refuse a call. A `body` that returns decides the result itself; if it does not return, the call is refused."""
        if (number := seccomp.NUMBERS[name][column]) is not None:
            program.extend([instruction(EQUALS, number, otherwise=len(body) + 1), *body, bpf.refuse()])

    for name in _REFUSED:
        refuse(name)
    # Allow threads only. clone3, whose flags a filter cannot read, is refused already.
    refuse("clone", instruction(LOAD, ARGUMENT_0), instruction(ANY_BIT, _CLONE_THREAD, otherwise=1), ALLOW)
    for name in ("kill", "tgkill", "rt_tgsigqueueinfo"):
        refuse(name, instruction(LOAD, ARGUMENT_0), instruction(EQUALS, pid, otherwise=1), ALLOW)
    refuse(
        "prlimit64",
        instruction(LOAD, ARGUMENT_0),
        instruction(EQUALS, 0, then=1), instruction(EQUALS, pid, otherwise=1), ALLOW,
    )  # fmt: skip
    # The runner must not undo the setting that ends it with the agent.
    refuse("prctl", instruction(LOAD, ARGUMENT_0), instruction(EQUALS, _PR_SET_PDEATHSIG, then=1), ALLOW)
    # These calls set the process that the kernel then signals.
    refuse(
        "fcntl",
        instruction(LOAD, ARGUMENT_1),
        instruction(EQUALS, _F_SETOWN, then=3), instruction(EQUALS, _F_SETSIG, then=2),
        instruction(EQUALS, _F_SETOWN_EX, then=1), ALLOW,
    )  # fmt: skip
    refuse(
        "ioctl",
        instruction(LOAD, ARGUMENT_1),
        instruction(EQUALS, _FIOSETOWN, then=2), instruction(EQUALS, _SIOCSPGRP, then=1), ALLOW,
    )  # fmt: skip
    program.append(ALLOW)
    return b"".join(program)
