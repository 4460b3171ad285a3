"""Control groups: limits on the memory and the number of processes of a whole tree, on version 2 and on version 1.

A group is created below a place that this process may write: its own group where version 1 is mounted, a sibling or, where the
group is delegated to it (systemd's Delegate=yes), a part of its own group on version 2.
Source: cgroups(7), Documentation/admin-guide/cgroup-v1/{memory,pids}.rst, cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REMOVE_S: Final = 2.0
"""Seconds for which a group may stay busy after its last process was waited for."""

_UNIFIED: Final = "cgroup2"
_CONTROLLERS: Final = ("memory", "pids")


@dataclass(frozen=True)
class Place:
    """The folders of existing groups below which new groups can be created."""

    version: int
    memory: str | None
    """Folder below which memory can be limited; None if that is impossible."""
    pids: str | None
    """Folder below which the number of processes can be limited; on version 2 it equals `memory`."""
    leaf: str | None = None
    """The group that this process moved itself to, so that its former group can have subgroups with limits; version 2 only."""


def find_place(proc: Path = Path("/proc/self")) -> Place | None:
    """Return where this process can create groups with limits; None if the host does not allow it.

    On version 2 it may move this process to a subgroup of its own group; `leave` undoes that.
    """
    groups = _own_groups((proc / "cgroup").read_text())
    mounts = list(_mounts((proc / "mountinfo").read_text()))
    paths = {name: _first_version(name, groups, mounts) for name in _CONTROLLERS}
    if any(paths.values()):
        return Place(1, paths["memory"], paths["pids"])
    return _second_version(groups, mounts)


def leave(place: Place) -> None:
    """Return this process to the group that `find_place` took it from."""
    if place.leaf is None:
        return
    leaf, own = Path(place.leaf), Path(place.leaf).parent
    with contextlib.suppress(OSError):
        (own / "cgroup.subtree_control").write_text(" ".join(f"-{name}" for name in _CONTROLLERS))
        (own / "cgroup.procs").write_text(str(os.getpid()))
        leaf.rmdir()


class Group:
    """A control group for one tree of processes.

    Args:
        family: name of the group that holds all groups of one owner; created if missing, removed with its last member.
        name: name of this group; must be new.
        memory_bytes, processes: the tree's limits.

    Raises:
        OSError: it cannot be created; its parts are removed again.
    """

    def __init__(self, place: Place, family: str, name: str, *, memory_bytes: int, processes: int) -> None:
        self.version = place.version
        roots = dict.fromkeys(Path(root) for root in (place.memory, place.pids) if root is not None)
        self.folders = [root / family / name for root in roots]
        self.limits_memory = place.memory is not None
        self.limits_processes = place.pids is not None
        try:
            for folder in self.folders:
                _make(folder, controls=place.version == 2)
            if place.memory is not None:
                self._limit_memory(Path(place.memory) / family / name, memory_bytes)
            if place.pids is not None:
                (Path(place.pids) / family / name / "pids.max").write_text(str(processes))
        except OSError:
            self.remove()
            raise

    def _limit_memory(self, folder: Path, memory_bytes: int) -> None:
        if self.version == 1:
            (folder / "memory.limit_in_bytes").write_text(str(memory_bytes))
            optional = {"memory.memsw.limit_in_bytes": str(memory_bytes)}
        else:
            (folder / "memory.max").write_text(str(memory_bytes))
            optional = {"memory.swap.max": "0", "memory.oom.group": "1"}
        for name, value in optional.items():
            with contextlib.suppress(OSError):  # kernels without accounting of swap lack these files
                (folder / name).write_text(value)

    def join(self) -> None:
        """Move this process, and so its later descendants, into the group."""
        for folder in self.folders:
            # 0 denotes the writing process, whatever its id in its process namespace.
            (folder / "cgroup.procs").write_text("0")

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the tree's memory was used up."""
        if self.version == 1:
            return sum(_read(folder / "memory.oom_control").get("oom_kill", 0) for folder in self.folders)
        return sum(_read(folder / "memory.events").get("oom_kill", 0) for folder in self.folders)

    def refused_forks(self) -> int:
        """Return how many forks failed because of the limit on processes."""
        return sum(_read(folder / "pids.events").get("max", 0) for folder in self.folders)

    def remove(self) -> None:
        """Remove the group, whose processes have ended, and its family if this was the last member."""
        for folder in self.folders:
            _remove(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()


def remove_family(place: Place, family: str) -> None:
    """Kill the processes in a family's groups and remove the groups, which a killed owner left behind."""
    for root in dict.fromkeys(Path(root) for root in (place.memory, place.pids) if root is not None):
        for folder in [*(root / family).glob("*/"), root / family]:
            if folder.is_dir():
                _kill(folder)
                _remove(folder)


def _kill(folder: Path) -> None:
    until = time.monotonic() + _REMOVE_S
    while (pids := (folder / "cgroup.procs").read_text().split()) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _remove(folder: Path) -> None:
    until = time.monotonic() + _REMOVE_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                return
            time.sleep(0.005)
        else:
            return


def _make(folder: Path, *, controls: bool) -> None:
    """Create a group below its family. Retry if the family's last member removes the family meanwhile."""
    for _ in range(100):
        with contextlib.suppress(FileExistsError):  # `exist_ok` raises it too, if the family is removed at that moment
            folder.parent.mkdir()
        try:
            if controls:
                (folder.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
            folder.mkdir()
        except FileNotFoundError:
            continue
        return
    raise FileNotFoundError(errno.ENOENT, "the group's family does not stay", str(folder.parent))


def _own_groups(text: str) -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has an empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    return groups


def _mounts(text: str) -> Iterator[tuple[str, set[str], str, Path]]:
    """Yield type, super block options, root and mount point of each mounted hierarchy."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind in ("cgroup", _UNIFIED):
            root, point = before.split(" ")[3:5]
            yield kind, set(options.split(",")), root, Path(point.encode().decode("unicode_escape"))


def _folder(path: str, root: str, point: Path) -> Path | None:
    """Return a group's folder below a mount; None if the mount does not show it."""
    if root == "/":
        return point / path.lstrip("/")
    if path == root or path.startswith(f"{root}/"):
        return point / path[len(root) :].lstrip("/")
    return None


def _first_version(controller: str, groups: dict[str, str], mounts: list[tuple[str, set[str], str, Path]]) -> str | None:
    for kind, options, root, point in mounts:
        if kind == "cgroup" and controller in options and controller in groups:
            folder = _folder(groups[controller], root, point)
            if folder is not None and _is_writable(folder):
                return str(folder)
    return None


def _second_version(groups: dict[str, str], mounts: list[tuple[str, set[str], str, Path]]) -> Place | None:
    for kind, _, root, point in mounts:
        own = _folder(groups[""], root, point) if kind == _UNIFIED and "" in groups else None
        if own is None:
            continue
        # A group beside our own moves no process, but the parent must already delegate its controllers.
        for folder in (own, own.parent):
            if point in (folder, *folder.parents) and _is_writable(folder) and _shares(folder):
                return Place(2, str(folder), str(folder))
        if (leaf := _delegate(own)) is not None:
            return Place(2, str(own), str(own), leaf)
    return None


def _shares(folder: Path) -> bool:
    try:
        return set(_CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split())
    except OSError:
        return False


def _delegate(own: Path) -> str | None:
    """Move this process to a subgroup of its own group, which can then limit other subgroups; return it, or None if refused."""
    leaf = own / f"etfarm-daemon-{os.getpid()}"
    try:
        if not set(_CONTROLLERS) <= set((own / "cgroup.controllers").read_text().split()):
            return None
        leaf.mkdir()
    except OSError:
        return None
    try:
        (leaf / "cgroup.procs").write_text("0")
        (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    except OSError:  # other processes live in the group, or it is not delegated to this user
        with contextlib.suppress(OSError):
            (own / "cgroup.procs").write_text("0")
        _remove(leaf)
        return None
    return str(leaf)


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _read(file: Path) -> dict[str, int]:
    """Return the numbers of a file with one `name number` a line; empty if the file is missing."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
