"""What hostile code would try from inside of a compile child on a node of a Ray cluster; see `attack_tasks`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from etfarm.wire.sandbox import syscalls
from tests.support.attack_tasks import Attack, Context, Emit, Request, _call, _outcome, _sockets

ATTACKS: Final[dict[str, Attack]] = {}
_STEP_BYTES: Final = 4 << 20


def named(attack: Attack) -> Attack:
    """Add an attack under its function's name."""
    ATTACKS[attack.__name__] = attack
    return attack


def targets_of(folder: Path, pids: Mapping[str, int], token: str) -> dict[str, Any]:
    """Return what the attacks are for.

    Args:
        folder: the cluster's folder, with Ray's session and the node's files of children.
        pids: Ray's processes on the node.
        token: Ray's token.
    """
    return {
        "folder_of_ray": str(folder), "pids": dict(pids), "reversed_token": token[::-1],
        "sockets": [str(path) for path in folder.rglob("*") if path.is_socket()],
        "ports": [
            int(row.split()[1].partition(":")[2], 16)
            for row in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if row.split()[3] == "0A"
        ],
        "abstract": [
            row.split()[-1][1:] for row in Path("/proc/net/unix").read_text().splitlines() if row.split()[-1].startswith("@")
        ],
        "files": [str(path) for path in folder.rglob("etfarm-nodes-*/node-*/files/*")],
        "plasma": [path.name for path in Path("/dev/shm").iterdir()],
        "logs": [str(path) for path in folder.rglob("*.log")][:100],
    }  # fmt: skip


def attack(request: Request, folder: Path, emit: Emit) -> bytes:
    """Task: try every attack; answer with the outcomes by name as JSON."""
    context = {**json.loads(request.targets), "folder": folder, "input": str(request.input)}
    return json.dumps({name: _outcome(one, context) for name, one in ATTACKS.items()}).encode()


def read(request: Path, folder: Path, emit: Emit) -> bytes:
    """Task: return a file, and leave a copy of it."""
    (folder / "copy").write_bytes(request.read_bytes())
    return request.read_bytes()


def _any(reached: object) -> object:
    """Return what an attack has found; raise an error if that is nothing."""
    if reached:
        return reached
    raise OSError(errno.ENOENT, "nothing is there")


def _each(targets: list[Any], one: Any) -> object:
    """Return those targets for which `one` does not fail."""
    reached = []
    assert targets, "an attack without a target"
    for target in targets:
        try:
            one(target)
        except OSError:
            continue
        reached.append(target)
    return _any(reached)


ATTACKS.update(
    read_rays_logs=lambda context: _each(context["logs"], lambda path: Path(path).read_bytes()),
    read_files_of_other_jobs=lambda context: _each(context["files"], lambda path: Path(path).read_bytes()),
    see_rays_sockets=lambda context: _each(context["sockets"], lambda path: Path(path).stat()),
    connect_to_rays_ports=lambda context: _each(
        context["ports"], lambda port: socket.create_connection(("127.0.0.1", port), 1).close()
    ),
    see_ports=lambda context: _any(Path("/proc/net/tcp").read_text().splitlines()[1:]),
    see_the_object_store=lambda context: _any([path.name for path in Path("/dev/shm").iterdir()]),
    open_the_object_store=lambda context: _each(
        [*context["plasma"], "plasma"], lambda name: Path("/dev/shm", name).open("rb").close()
    ),
    signal_rays_processes=lambda context: _each(list(context["pids"].values()), lambda pid: os.kill(pid, signal.SIGCONT)),
    read_rays_environments=lambda context: _each(
        list(context["pids"].values()), lambda pid: Path(f"/proc/{pid}/environ").read_bytes()
    ),
    read_rays_memory=lambda context: _each(
        list(context["pids"].values()), lambda pid: Path(f"/proc/{pid}/mem").open("rb").close()
    ),
    take_rays_descriptors=lambda context: _each(
        list(context["pids"].values()), lambda pid: _call("pidfd_getfd", os.pidfd_open(pid), 3, 0)
    ),
)


@named
def read_rays_variables(context: Context) -> object:
    environment = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    return _any([each for each in (*environment, *os.environ) if each.startswith("RAY") or "TOKEN" in each])


@named
def find_the_token_in_its_memory(context: Context) -> object:
    """The child is a fork of a process that Ray's worker has started."""
    marker = os.urandom(32).hex()
    assert _search(marker[::-1]), "the search does not work"
    return _any(_search(context["reversed_token"]))


def _search(backwards: str) -> list[str]:
    """Return where this process's memory has a text, of which this function makes no copy."""
    pattern = re.compile(b"".join(b"[%c]" % ord(character) for character in reversed(backwards)))
    places = []
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *_ = line.split()
            start, end = (int(each, 16) for each in place.split("-"))
            if not rights.startswith("rw") and "[heap]" not in line:
                continue  # files, and what cannot have been written
            for at in range(start, end, _STEP_BYTES):
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(at)
                    data = memory.read(min(_STEP_BYTES + len(backwards), end - at))
                    places += [hex(at + match.start()) for match in pattern.finditer(data)]
    return places


@named
def see_rays_folder(context: Context) -> object:
    own = Path(context["folder"])
    files = [path for path in Path(context["folder_of_ray"]).rglob("*") if path.is_file() and not path.is_relative_to(own)]
    return _any([str(path) for path in files if not _is_code(path) and str(path) != context["input"]])


def _is_code(path: Path) -> bool:
    return "venv" in path.parts or str(path).endswith(".py")


@named
def connect_to_rays_sockets(context: Context) -> object:
    addresses = [b"\1\0" + os.fsencode(path) + b"\0" for path in context["sockets"]]
    return _each(addresses, lambda address: [_call("connect", each, address, len(address)) for each in _sockets()])


@named
def connect_to_abstract_sockets(context: Context) -> object:
    addresses = [b"\1\0\0" + name.encode() for name in (*context["abstract"], "any")]
    return _each(addresses, lambda address: [_call("connect", each, address, len(address)) for each in _sockets()])


@named
def trace_rays_processes(context: Context) -> object:
    def trace(pid: int) -> None:
        if syscalls.libc().ptrace(16, pid, 0, 0) != 0:
            raise OSError(errno.EPERM, "ptrace")

    return _each(list(context["pids"].values()), trace)


@named
def have_a_descriptor_of_ray(context: Context) -> object:
    links = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links[path.name] = str(path.readlink())
    return _any({name: link for name, link in links.items() if "ray" in link.lower() or "/ry" in link})
