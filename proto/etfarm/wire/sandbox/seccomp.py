"""System call filters, which restrict a confined process, as classic BPF that the kernel runs. No library needed.

A policy is a deny list: compilers and runners link large libraries (torch, XNNPACK, OpenMP, subprocesses such as flatc), and an
allow list would break them with each release. Refused calls fail with an errno that libraries handle (EPERM, ENOSYS); calls of a
foreign architecture (i386 on x86_64, AArch32 on aarch64) kill the process, since their numbers differ.
Calls that are newer than this table answer ENOSYS.
Source: seccomp(2), Documentation/userspace-api/seccomp_filter.rst, arch/x86/entry/syscalls/syscall_64.tbl,
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from etfarm.wire.sandbox import syscalls
from etfarm.wire.sandbox.bpf import (
    ABOVE,
    ALLOW,
    ANY_BIT,
    ARCHITECTURES,
    ARGUMENT_0,
    ARGUMENT_1,
    EQUALS,
    INSTRUCTION_BYTES,
    LOAD,
    instruction,
    load_call,
    refuse,
)  # fmt: skip

HIGHEST_KNOWN: Final = 466
"""The number of removexattrat, from Linux 6.13. Higher numbers, including those of the x32 ABI, answer ENOSYS."""

NUMBERS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone": (56, 220),
    "clone3": (435, 435),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "personality": (135, 92),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "memfd_secret": (447, 447),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "ioctl": (16, 29),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "memfd_create": (319, 279),
    "rt_sigqueueinfo": (129, 138),
    "process_mrelease": (448, 448),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "fcntl": (72, 25),
}
"""Numbers on x86_64 and aarch64; None if an architecture lacks the call. Each confinement refuses some of them."""

SOCKETS: Final = ("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4")
NAMESPACES: Final = ("unshare", "setns")
MOUNTS: Final = (
    "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "swapon", "swapoff",
)  # fmt: skip
OTHER_PROCESSES: Final = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp", "move_pages",
    "migrate_pages",
)  # fmt: skip
KERNEL: Final = (
    "bpf", "userfaultfd", "perf_event_open", "keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load",
    "create_module", "init_module", "finit_module", "delete_module", "open_by_handle_at", "name_to_handle_at",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "io_submit", "reboot", "acct", "quotactl",
    "quotactl_fd", "syslog", "iopl", "ioperm", "modify_ldt", "settimeofday", "clock_settime", "adjtimex",
    "clock_adjtime", "sethostname", "setdomainname", "vhangup", "lookup_dcookie", "nfsservctl", "uselib", "_sysctl",
    "fanotify_init", "fanotify_mark", "memfd_secret", "mknod", "mknodat",
)  # fmt: skip
IDENTITY: Final = (
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capset",
)  # fmt: skip
SHARED_MEMORY: Final = ("shmget", "shmat", "msgget", "semget", "mq_open")

DENIED: Final[Mapping[str, int]] = {
    name: errno.EPERM
    for group in (SOCKETS, NAMESPACES, MOUNTS, OTHER_PROCESSES, KERNEL, IDENTITY, SHARED_MEMORY)
    for name in group
} | {"clone3": errno.ENOSYS}
"""Calls that every policy refuses by default. clone3 keeps its flags in memory, which a filter cannot read; with ENOSYS the C
library falls back to clone, whose flags are checked."""

_PERSONALITY_QUERY: Final = 0xFFFFFFFF
_INJECTING_IOCTLS: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: they insert input into the terminal that started the farm

_AF_UNIX: Final = 1
_NO_STREAM: Final = 0b110
"""Bits of which every type of socket but SOCK_STREAM has one; datagrams can be sent to other sockets than the connected one."""

_MODE_FILTER: Final = 2


@dataclass(frozen=True)
class Policy:
    """The system calls that a process is refused."""

    denied: Mapping[str, int] = field(default_factory=lambda: dict(DENIED))
    """Names of `NUMBERS` and the errno that each call fails with."""

    allow_unix_socketpair: bool = False
    """Whether socketpair(AF_UNIX) stays possible; it only connects the process with its own descendants."""

    without_unix_sockets: bool = False
    """Whether unix sockets are refused but for pairs of connected streams. Landlock lets a process connect to those in the file
    system: a user's session bus or ssh-agent would act for it outside of its confinement.
    """

    def with_denied(self, *names: str, error: int = errno.EPERM) -> Policy:
        """Return this policy with further calls refused."""
        return replace(self, denied={**self.denied, **dict.fromkeys(names, error)})


class UnsupportedArchitecture(OSError):
    """A machine architecture without a table of system calls."""

    def __init__(self, machine: str) -> None:
        super().__init__(errno.ENOSYS, f"No system call filter for {machine!r}; known: {', '.join(ARCHITECTURES)}")


def build(policy: Policy, machine: str) -> bytes:
    """Return the filter of `policy` as an array of struct sock_filter.

    Raises:
        UnsupportedArchitecture: `machine` is not in `ARCHITECTURES`.
    """
    if machine not in ARCHITECTURES:
        raise UnsupportedArchitecture(machine)
    column = list(ARCHITECTURES).index(machine)
    program = [*load_call(machine), instruction(ABOVE, HIGHEST_KNOWN, otherwise=1), refuse(errno.ENOSYS)]

    def number(name: str) -> int | None:
        return NUMBERS[name][column]

    def checked(name: str, *body: bytes) -> None:
        """Add a call that is decided by its argument; `body` ends in a return on every path."""
        call = number(name)
        if call is not None:
            program.extend([instruction(EQUALS, call, otherwise=len(body)), *body])

    checked(
        "clone",
        instruction(LOAD, ARGUMENT_0),
        instruction(ANY_BIT, syscalls.CLONE_NEW_ANY, otherwise=1), refuse(), ALLOW,
    )  # fmt: skip
    checked(
        "personality",
        instruction(LOAD, ARGUMENT_0),
        instruction(EQUALS, _PERSONALITY_QUERY, then=1), refuse(), ALLOW,
    )  # fmt: skip
    checked(
        "ioctl",
        instruction(LOAD, ARGUMENT_1),
        instruction(EQUALS, _INJECTING_IOCTLS[0], then=1), instruction(EQUALS, _INJECTING_IOCTLS[1], otherwise=1),
        refuse(), ALLOW,
    )  # fmt: skip
    if policy.allow_unix_socketpair:
        checked(
            "socketpair",
            instruction(LOAD, ARGUMENT_0),
            instruction(EQUALS, _AF_UNIX, then=1), refuse(), ALLOW,
        )  # fmt: skip
    if policy.without_unix_sockets:
        checked("socket", instruction(LOAD, ARGUMENT_0), instruction(EQUALS, _AF_UNIX, otherwise=1), refuse(), ALLOW)
        checked("socketpair", instruction(LOAD, ARGUMENT_1), instruction(ANY_BIT, _NO_STREAM, otherwise=1), refuse(), ALLOW)
    for name, error in policy.denied.items():
        checked(name, refuse(error))
    program.append(ALLOW)
    return b"".join(program)


def install(policy: Policy) -> None:
    """Filter this process's system calls, and those of all its descendants, for good.

    The process must have one thread and have called `syscalls.forbid_new_privileges`.

    Raises:
        OSError: the kernel has no seccomp filters, or there is none for this architecture.
    """
    program = build(policy, platform.machine() if struct.calcsize("P") == 8 else "32-bit")
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // INSTRUCTION_BYTES, ctypes.addressof(code))
    filters = ctypes.create_string_buffer(header, len(header))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filters))


def is_available() -> bool:
    """Return whether this kernel and architecture take filters."""
    try:
        return "errno" in _actions() and platform.machine() in ARCHITECTURES
    except OSError:
        return False


def _actions() -> str:
    with open("/proc/sys/kernel/seccomp/actions_avail", encoding="ascii") as actions:  # noqa: PTH123 - used before a chroot too
        return actions.read()
