"""What hostile code would try from inside a compile child: each attack is real, bounded, and harmless where it succeeds.

`attack` runs them in a child; each answers "refused: WHY" or says what it achieved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import etfarm.wire.errors
from etfarm.wire.sandbox import seccomp, syscalls

Context = Mapping[str, Any]
Attack = Callable[[Context], object]
Emit = Callable[[bytes], None]

ATTACKS: Final[dict[str, Attack]] = {}

MAX_FORKS: Final = 2000
"""What a fork bomb stops at where nothing else stops it."""


def named(attack: Attack) -> Attack:
    """Add an attack under its function's name."""
    ATTACKS[attack.__name__] = attack
    return attack


@dataclass(frozen=True)
class Request:
    """What `attack` is asked: the targets as JSON, and the one file that the child may read."""

    targets: str
    input: Path


def attack(request: Request, folder: Path, emit: Emit) -> bytes:
    """Task: try every attack; answer with the outcomes by name as JSON."""
    context = {**json.loads(request.targets), "folder": folder}
    return json.dumps({name: _outcome(one, context) for name, one in ATTACKS.items()}).encode()


def _outcome(one: Attack, context: Context) -> str:
    try:
        return f"SUCCEEDED: {one(context)!r}"[:300]
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        return f"refused: {errno.errorcode.get(number, number) if number else error}"


def _call(name: str, *arguments: object) -> int:
    """Make a system call by its number, past every check of a library."""
    number = seccomp.NUMBERS[name][list(seccomp.ARCHITECTURES).index(platform.machine())]
    result = syscalls.libc().syscall(
        ctypes.c_long(number or -1), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


# Files

ATTACKS.update(
    read_the_tokens=lambda context: Path(context["tokens"]).read_text(),
    read_tokens_inside_of_the_code=lambda context: Path(context["tokens_in_code"]).read_text() or _empty(),
    read_another_artifact=lambda context: Path(context["artifact"]).read_bytes(),
    read_another_childs_folder=lambda context: list(Path(context["sibling"]).iterdir()),
    read_the_hosts_accounts=lambda context: Path("/etc/shadow").read_text(),
    find_another_users_files=lambda context: Path(context["home"]).joinpath(".ssh", "id_ed25519").read_text(),
    write_to_the_code=lambda context: Path(etfarm.wire.errors.__file__).open("ab").close(),
    write_to_the_system=lambda context: _touch(Path("/usr/lib/etfarm-was-here")),
    write_to_the_root=lambda context: _touch(Path("/etfarm-was-here")),
    write_to_its_input=lambda context: Path(context["input"]).open("ab").close(),
    give_rights_on_its_input=lambda context: Path(context["input"]).chmod(0o777),
    link_its_input_into_its_folder=lambda context: os.link(context["input"], Path(context["folder"], "linked")),
    write_kernel_settings=lambda context: Path("/proc/sys/kernel/core_pattern").open("r+").close(),
    leave_its_control_group=lambda context: (
        [path.open("a").close() for path in Path("/sys/fs/cgroup").iterdir()] or list(Path("/sys/fs/cgroup").iterdir())
    ),
)


def _empty() -> object:
    raise OSError(errno.ENOENT, "an empty file stands for it")


@named
def list_the_data_folder(context: Context) -> object:
    # What of it is there was made for the way to this child's folder and its request's files.
    seen = {
        path.name for path in Path(context["data"]).rglob("*") if path.is_file() and not path.is_relative_to(context["folder"])
    }
    if others := seen - {Path(context["input"]).name}:
        return others
    raise OSError(errno.ENOENT, "nothing of others")


@named
def write_beside_its_folder(context: Context) -> object:
    folder = Path(context["folder"])
    if folder.parent.stat().st_dev != folder.stat().st_dev:
        raise OSError(errno.ENOENT, "what is beside its folder is not the host's")
    return _touch(folder.parent / "etfarm-was-here")


def _touch(path: Path) -> None:
    path.touch()
    path.unlink()


@named
def open_a_descriptor_of_a_folder(context: Context) -> object:
    result = []
    for descriptor in range(3, 1024):
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if not stat.S_ISSOCK(mode):
            result.append((descriptor, mode))
    if result:
        return result
    raise OSError(errno.EBADF, "no descriptor but the channel")


@named
def fill_the_memory_behind_tmp(context: Context) -> object:
    path = Path("/tmp/much")
    try:
        with path.open("wb") as file:
            for _ in range(10):
                file.write(b"x" * (32 << 20))
    finally:
        path.unlink(missing_ok=True)
    return "320 MiB"


# Processes

ATTACKS.update(
    kill_a_process_of_the_host=lambda context: os.kill(context["victim"], signal.SIGTERM),
    trace_its_supervisor=lambda context: syscalls.libc().ptrace(16, 1, 0, 0) == 0 or _raise(),
    read_its_supervisors_memory=lambda context: Path("/proc/1/mem").open("rb").close(),
    enter_its_supervisors_root=lambda context: list(Path("/proc/1/root/").iterdir()),
    read_its_supervisors_environment=lambda context: Path("/proc/1/environ").read_bytes(),
    take_a_descriptor_of_its_supervisor=lambda context: _call("pidfd_getfd", os.pidfd_open(1), 0, 0),
)


@named
def kill_everything(context: Context) -> object:
    if os.getppid() != 1:
        return "no process namespace: not tried"
    return os.kill(-1, signal.SIGKILL)  # ends all that this child may end: its own descendants, of which there are none


@named
def kill_its_supervisor(context: Context) -> object:
    if os.getppid() != 1:
        return "no process namespace: not tried"
    os.kill(1, signal.SIGKILL)
    raise OSError(errno.EPERM, "it lives: process 1 takes no signal from its namespace")


@named
def see_other_processes(context: Context) -> object:
    others = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()} - {1, os.getpid()}
    return others or _empty()


# Network

ATTACKS.update(
    make_a_pair_of_sockets=lambda context: [end.close() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)],
    see_the_socket_of_a_service=lambda context: Path(context["socket"]).stat(),
    use_io_uring_for_a_socket=lambda context: _call("io_uring_setup", 8, ctypes.create_string_buffer(120)),
)


def _socket(family: int) -> Attack:
    return lambda context: socket.socket(family, socket.SOCK_DGRAM).close()


for _name in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_TIPC"):
    ATTACKS[f"make_a_socket_of_{_name}"] = _socket(getattr(socket, _name))


@named
def connect_its_channel_to_a_socket(context: Context) -> object:
    address = b"\1\0" + os.fsencode(context["socket"]) + b"\0"
    return [_call("connect", descriptor, address, len(address)) for descriptor in _sockets()]


@named
def connect_its_channel_to_an_abstract_socket(context: Context) -> object:
    address = b"\1\0\0" + context["abstract"].encode()
    return [_call("connect", descriptor, address, len(address)) for descriptor in _sockets()]


def _sockets() -> list[int]:
    result = []
    for descriptor in range(1024):
        with contextlib.suppress(OSError):
            result += [descriptor] if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else []
    return result


# Namespaces, privileges, the kernel

ATTACKS.update(
    clone3_with_a_namespace=lambda context: _call(
        "clone3", (ctypes.c_ulonglong * 8)(syscalls.CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD), 64
    ),
    enter_its_supervisors_namespace=lambda context: _call("setns", os.open("/proc/1/ns/mnt", os.O_RDONLY), 0),
    become_root=lambda context: os.setresuid(0, 0, 0),
    become_roots_group=lambda context: os.setresgid(0, 0, 0),
    take_groups=lambda context: os.setgroups([0]),
    take_capabilities=lambda context: _call("capset", b"\x22\x05\x08\x20\0\0\0\0", b"\xff" * 24),
    make_its_code_writable=lambda context: syscalls.mount("", "/usr", flags=syscalls.MS_REMOUNT | syscalls.MS_BIND),
    unmount_what_hides_the_host=lambda context: syscalls.unmount(context["folder"]),
    change_its_root=lambda context: os.chroot(context["folder"]),
    make_a_device=lambda context: os.mknod(Path(context["folder"], "disk"), 0o666 | stat.S_IFBLK, os.makedev(254, 0)),
    open_a_disk=lambda context: (
        [path.open("rb").close() for path in (Path("/dev/vda"), Path("/dev/sda"), Path("/dev/mem")) if path.exists()] or _empty()
    ),
    type_into_the_terminal=lambda context: fcntl.ioctl(0, 0x5412, b"x"),
    raise_its_limits=lambda context: resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    be_the_last_to_die_of_memory=lambda context: Path("/proc/self/oom_score_adj").write_text("-1000"),
    share_memory_with_other_children=lambda context: _call("shmget", 0x0E7FA12, 4096, 0o1600),
    hide_memory_behind_a_descriptor=lambda context: os.close(os.memfd_create("hidden")),
)


def _unshare(flag: int) -> Attack:
    return lambda context: syscalls.unshare(flag)


def _clone(flag: int) -> Attack:
    def attempt(context: Context) -> object:
        pid = _call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        return os.waitpid(pid, 0)

    return attempt


for _name in ("NEWUSER", "NEWNS", "NEWNET", "NEWPID", "NEWIPC", "NEWUTS", "NEWCGROUP"):
    ATTACKS[f"unshare_{_name}"] = _unshare(getattr(syscalls, f"CLONE_{_name}"))
    ATTACKS[f"clone_{_name}"] = _clone(getattr(syscalls, f"CLONE_{_name}"))


@named
def have_capabilities_or_groups_or_no_filter(context: Context) -> object:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    wrong = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[name], 16)}
    wrong |= {} if (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2") else {"filter": status["Seccomp"]}
    # Without root a process cannot leave a group; in the user namespace they are of no use.
    wrong |= {"groups": status["Groups"]} if status["Groups"].strip() and context["is_root"] else {}
    return wrong or _raise()


@named
def mount_a_file_system(context: Context) -> object:
    syscalls.mount("tmpfs", context["folder"], "tmpfs")
    return syscalls.unmount(context["folder"])


def _raise() -> object:
    raise OSError(errno.EPERM, "nothing")


# Attacks that end a child


def fork_a_lot(request: object, folder: Path, emit: Emit) -> bytes:
    """Fork `request` times, or until a fork fails; the forks wait for a pipe that ends with this process."""
    readable, writable = os.pipe()
    forks = request if isinstance(request, int) else MAX_FORKS
    for _ in range(forks):
        if os.fork() == 0:
            os.close(writable)
            os.read(readable, 1)
            os._exit(0)
    return b"%d forks" % forks


def fork_a_lot_and_swallow_it(request: object, folder: Path, emit: Emit) -> bytes:
    """As `fork_a_lot`, by code that does not stop at an error, and dies of another one."""
    try:
        fork_a_lot(request, folder, emit)
    except OSError:
        os.kill(os.getpid(), signal.SIGSEGV)
    return b"not stopped"


def eat_in_many_processes(request: int, folder: Path, emit: Emit) -> bytes:
    """Hold `request` MiB in each of eight processes, each below a process's own limit, for at most half a minute."""
    processes = []
    for _ in range(8):
        readable, writable = os.pipe()
        if os.fork() == 0:
            hoard = b"x" * (request << 20)
            os.write(writable, b"%d" % bool(hoard))
            signal.alarm(30)
            signal.pause()
        os.close(writable)
        processes.append(readable)
    full = [os.read(readable, 1) for readable in processes]
    # Where memory is measured from time to time only, it is by then.
    return b"%d processes" % sum(map(bool, full)) if not _stay(20) else b""


def _stay(seconds: float) -> bool:
    """Wait for a signal; return False after `seconds`."""
    return signal.sigtimedwait([signal.SIGUSR2], seconds) is not None


def eat_shared_memory(request: int, folder: Path, emit: Emit) -> bytes:
    """Hold `request` MiB that no limit of a process counts."""
    hoard = mmap.mmap(-1, request << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    for start in range(0, len(hoard), 1 << 20):
        hoard[start : start + (1 << 20)] = b"x" * (1 << 20)
    return b"not stopped" if not _stay(20) else b""


def leave_traps(request: dict[str, Any], folder: Path, emit: Emit) -> bytes:
    """Leave a link, a hard link, a FIFO where it can, and a folder where files are expected."""
    (folder / "good").write_bytes(b"good")
    (folder / "good").chmod(0o4755)
    (folder / "symlink").symlink_to(request["secret"])
    (folder / "first").write_bytes(b"x")
    os.link(folder / "first", folder / "hardlink")
    (folder / "folder").mkdir()
    if not _made_fifo(folder / "fifo"):
        (folder / "fifo").symlink_to("/proc/self/fd/0")
    return b""


def leave_a_nest(request: int, folder: Path, emit: Emit) -> bytes:
    """Leave `request` folders inside of each other, more than Python recurses, and one without rights."""
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0)
    for _ in range(request):
        Path("deep").mkdir()
        os.chdir("deep")
    return b""


def _made_fifo(path: Path) -> bool:
    try:
        os.mkfifo(path)
    except OSError:
        return False
    return True


def wait_for_ever(request: object, folder: Path, emit: Emit) -> bytes:
    """Write a secret, and stay."""
    (folder / "secret").write_text("a sibling's")
    emit(json.dumps({"folder": str(folder)}).encode())
    signal.pause()
    return b""


def read_text(request: dict[str, Any], folder: Path, emit: Emit) -> bytes:
    """Read the file at `request`'s `path`."""
    try:
        return Path(request["path"]).read_bytes()
    except OSError as error:
        return type(error).__name__.encode()


def print_lines(request: object, folder: Path, emit: Emit) -> bytes:
    """Task: print so many empty lines, as many in one write as a pipe takes."""
    left = int(str(request))
    while left > 0:
        left -= os.write(1, b"\n" * min(left, 1 << 16))
    return b""


def emit_events(request: object, folder: Path, emit: Emit) -> bytes:
    """Task: emit so many events that name no stage."""
    for _ in range(int(str(request))):
        emit(b"[]")
    return b""
