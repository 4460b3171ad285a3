"""The launcher, which confines itself by the specification on stdin, then executes the program: `python -I -S launch.py`.

The program keeps this process's id, parent and streams. The rest of stdin is the program's input.
A measure that the kernel lacks is left out and named on stderr, unless it is required: then the process ends with `REFUSED`.
"""

from __future__ import annotations

import marshal
import os
import sys

if __name__ == "__main__":  # without site-packages, only this package is importable
    sys.path.insert(0, os.path.abspath(__file__ + "/../../../.."))  # noqa: PTH100 - pathlib takes milliseconds to load

import ctypes
import errno
import resource
import signal
import stat
from typing import Any, Final, NoReturn

from etfarm.wire.sandbox import landlock, syscalls

REFUSED: Final = 126
"""Exit code if a required measure failed."""
NOT_STARTED: Final = 127
"""Exit code if the program could not be started."""

USER: Final = "user"
LANDLOCK: Final = "landlock"
SECCOMP: Final = "seccomp"
PRIVILEGES: Final = "no-new-privileges"
CAPABILITIES: Final = "no-capabilities"

_LENGTH_BYTES: Final = 8
_SYS_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER: Final = 1
_SPEC_ALLOW: Final = 1 << 2
_DAC_READ_SEARCH: Final = 2
_PR_SET_KEEPCAPS: Final = 8
_PR_CAP_AMBIENT_RAISE: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522


def command() -> list[str]:
    """Return the command line of this program."""
    return [sys.executable, "-I", "-S", "-B", os.path.abspath(__file__)]  # noqa: PTH100 - pathlib takes milliseconds to load


def encode(specification: dict[str, Any]) -> bytes:
    """Return the bytes that this program expects first on stdin.

    Keys:
        argv, env: command line and environment of the program; its path is relative to `folder`, or absolute.
        folder: the working folder.
        parent: id of the process with which the program ends.
        user: user and group id of the program; None to keep the caller's.
        reads_as_root: whether the program may search and read folders that only root may; needs `user` and Landlock.
        rules: (path, rights, whether to keep it open) for Landlock; None to do without. Missing paths are skipped. An entry of
            /proc that stays open keeps its inode, to which the rule applies.
        ports: TCP ports that the program may connect to, with `rules`; none if the key is absent. With any, it may also bind
            sockets to ports that the system chooses.
        filters: seccomp programs in the order of their installation.
        limits: (resource, limit).
        required: names of measures without which the program does not start.
        probe: write the active measures to stdout and end, without starting a program.
    """
    data = marshal.dumps(specification)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def main() -> NoReturn:
    """Read the specification, confine this process, and execute the program."""
    specification: dict[str, Any] = marshal.loads(_read(int.from_bytes(_read(_LENGTH_BYTES), "little")))
    os.chdir(specification["folder"])
    for which, limit in specification["limits"]:
        resource.setrlimit(which, (limit, limit))
    active, missing = _confine(specification)
    for name, why in missing.items():
        if name in specification["required"]:
            _end(REFUSED, f"{name} is required and not available here: {why}")
        if not specification["probe"]:
            _print_error(f"{name} is not available: {why}")
    if specification["probe"]:
        answer = marshal.dumps({"active": active, "missing": missing})
        os.write(1, len(answer).to_bytes(_LENGTH_BYTES, "little") + answer)
        os._exit(0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these signals, and exec would keep that
    try:
        os.execve(specification["argv"][0], specification["argv"], specification["env"])
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        _end(NOT_STARTED, f"{specification['argv'][0]} cannot be started: {error.strerror} ({name})")


def _confine(specification: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Apply every measure that works; return their names, and the reasons why the others do not work."""
    active: list[str] = []
    missing: dict[str, str] = {}
    rules: landlock.Ruleset | None = None
    if specification["rules"] is not None:
        try:
            rules = landlock.Ruleset()
            for path, rights, stays_open in specification["rules"]:
                _allow(rules, path, rights, stays_open)
            for port in specification.get("ports", ()):
                rules.allow_connections(port)
                rules.allow_any_bind()
        except OSError as error:
            rules, missing[LANDLOCK] = None, str(error)
    if specification["user"] is not None:
        try:
            _become(specification["user"], reads_as_root=specification["reads_as_root"] and rules is not None)
            active.append(USER)
        except OSError as error:
            missing[USER] = str(error)
    keeps_reading = USER in active and specification["reads_as_root"] and rules is not None
    for name, step in (
        (CAPABILITIES, _keep_reading if keeps_reading else syscalls.drop_capabilities),
        (PRIVILEGES, syscalls.forbid_new_privileges),
    ):
        try:
            step()
            active.append(name)
        except OSError as error:
            missing[name] = str(error)
    if rules is not None:
        try:
            rules.restrict()
            active.append(LANDLOCK)
        except OSError as error:
            missing[LANDLOCK] = str(error)
    # After the change of user, which clears it, and before the filter, which refuses it.
    syscalls.die_with_parent(specification["parent"])
    try:
        for program in specification["filters"]:
            _filter(program)
        if specification["filters"]:
            active.append(SECCOMP)
    except OSError as error:
        missing[SECCOMP] = str(error)
    return active, missing


def _allow(rules: landlock.Ruleset, path: str, rights: int, stays_open: bool) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # missing on this machine, or not accessible
    rules.allow(descriptor, rights, is_folder=stat.S_ISDIR(os.fstat(descriptor).st_mode))
    if stays_open:
        os.set_inheritable(descriptor, True)
    else:
        os.close(descriptor)


def _become(user: int, *, reads_as_root: bool) -> None:
    """Switch to the user; with `reads_as_root`, capabilities survive it until `_keep_reading`."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:  # noqa: PTH123
        highest = int(file.read())
    try:
        for capability in range(highest + 1):
            if not (reads_as_root and capability == _DAC_READ_SEARCH):
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
    except PermissionError:
        pass  # without CAP_SETPCAP; without new privileges exec does not use that set
    if reads_as_root:
        syscalls.prctl(_PR_SET_KEEPCAPS, 1)
    syscalls.become(user, user)


def _keep_reading() -> None:
    """Keep only the capability to read root's files, beyond exec too."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    mask = 1 << _DAC_READ_SEARCH
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    if syscalls.libc().capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _DAC_READ_SEARCH)


def _filter(program: bytes) -> None:
    """Install a filter. Without SPEC_ALLOW, kernels before 5.16 would slow down the measured program."""
    code = ctypes.create_string_buffer(program, len(program))

    class Header(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    header = Header(len(program) // 8, ctypes.addressof(code))
    number = _SYS_SECCOMP[os.uname().machine]
    call = syscalls.libc().syscall
    if call(ctypes.c_long(number), ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(_SPEC_ALLOW), ctypes.byref(header)) != 0:
        syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(0)  # the caller did not need the launcher
        data += part
    return data


def _print_error(text: str) -> None:
    os.write(2, f"etfarm: confining a process: {text}\n".encode())


def _end(code: int, text: str) -> NoReturn:
    _print_error(text)
    os._exit(code)


if __name__ == "__main__":
    main()
