"""The file system of a child: a separate root with the system and the code read-only, and the child's folder.

The root is a small tmpfs in the child's mount namespace. Bind mounts provide, at their usual paths, the system's programs and
libraries, Python and the installed code, the child's folder, and the files of its request. Everything else on the host, such as
the daemon's data, home folders and other children's folders, has no path in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from etfarm.wire.sandbox import syscalls

MAX_READABLE: Final = 50_000
"""Maximum number of files of a request. Each is a mount; the kernel allows 100,000 mounts in a namespace."""

SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SETTINGS: Final = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "nsswitch.conf", "locale.alias",
    "ssl/openssl.cnf",
)  # fmt: skip
_KERNEL: Final = ("/sys/devices/system",)  # torch, OpenMP and cpuinfo read the processors' topology
_KERNEL_SETTINGS: Final = ("sys", "sysrq-trigger", "irq", "bus")
"""Parts of /proc whose contents change settings of the whole host."""

_PLUGIN_GROUPS: Final = ("etfarm.recipes", "etfarm.stages")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_LINKS: Final = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_SCRATCH: Final = Path("/tmp")
_NEVER: Final = (Path("/"), _SCRATCH)
"""Folders that are never shown as a whole, even if they are on a path of the code; paths in them are shown individually."""

_SCRATCH_BYTES: Final = 256 << 20
"""Maximum size of /tmp and of /dev/shm, which are in memory. TMPDIR is the child's folder."""

_READ_ONLY: Final = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_NO_PRIVILEGE: Final = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV


def code_paths() -> list[Path]:
    """Return the paths that hold this Python and everything it can import: prefixes, sys.path, editable installs, plug-ins."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path]
    paths += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for finder in sys.meta_path:
        # Editable installs of setuptools map packages to folders with a custom finder.
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", {})
        paths += mapping.values() if isinstance(mapping, dict) else []
    paths += _origins(sorted({name.partition(".")[0] for name in sys.modules}))
    plugins = [entry.module.partition(".")[0] for group in _PLUGIN_GROUPS for entry in entry_points(group=group)]
    paths += _origins(sorted(set(plugins)))
    return list(_existing(Path(path) for path in dict.fromkeys(map(str, paths)) if path.startswith("/")))


def _existing(paths: Iterable[Path]) -> dict[Path, None]:
    """Return the existing paths and their resolved paths."""
    candidates = (path for source in paths for path in (source, source.resolve()) if path not in _NEVER and source.exists())
    return dict.fromkeys(candidates)


def _origins(packages: Iterable[str]) -> Iterator[str]:
    """Yield the locations of top-level packages and modules, without importing any."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError, AttributeError):  # a module without a spec, such as __main__
            continue
        if spec is None:
            continue
        yield from spec.submodule_search_locations or ()
        if spec.has_location and spec.origin and not spec.submodule_search_locations:
            yield spec.origin


class Action(Enum):
    """The treatment of one path of a view."""

    LINK = "link"
    SHOW = "show"
    HIDE = "hide"


@dataclass(frozen=True)
class Step:
    """One path of a view that all children share."""

    action: Action
    path: Path
    is_folder: bool
    target: str = ""
    """Target of a LINK, relative to the root."""
    is_open: bool = True
    """Whether the path's mode lets every user read it."""


def plan(shared: Iterable[Path], hidden: Iterable[Path]) -> list[Step]:
    """Return the steps that show the system and `shared` read-only, except for `hidden`; computed once for many children.

    A folder that contains a hidden path and that other users cannot enter is hidden as well, unless it is itself to be shown.
    Otherwise, a child that runs as another user could not reach its own folder or its request's files below it. It is replaced by
    an empty folder, in which these are mounted.
    """
    steps = []
    wanted: dict[Path, Action] = {}
    for path in map(Path, SYSTEM):
        if path.is_symlink():  # /bin -> usr/bin
            steps.append(Step(Action.LINK, path, False, str(path.resolve()).lstrip("/")))
        elif path.exists():
            wanted[path] = Action.SHOW
    candidates = [*map(Path, _KERNEL), *(Path("/etc") / name for name in SETTINGS)]
    links = {step.path for step in steps}
    wanted |= {path: Action.SHOW for path in _existing([*candidates, *shared]) if not links.intersection(path.parents)}
    private = {path.resolve() for path in hidden}
    if os.geteuid() == 0:  # only root's children are other users
        private |= {above for path in private for above in path.parents if above not in wanted and _is_closed(above)}
    wanted |= dict.fromkeys(private, Action.HIDE)
    shown: dict[Path, Action] = {}
    for path in sorted(wanted, key=lambda path: len(path.parts)):
        # A step is only needed if the action differs from that of the nearest parent.
        nearest = next((shown[above] for above in path.parents if above in shown), Action.HIDE)
        if wanted[path] is not nearest:
            shown[path] = wanted[path]
            steps.append(Step(wanted[path], path, path.is_dir(), is_open=_is_open(path)))
    return [step for step in steps if step.action is not Action.HIDE or step.path.exists()]


def _is_closed(folder: Path) -> bool:
    return folder.exists() and not folder.stat().st_mode & 0o001


def _is_open(path: Path) -> bool:
    if not path.exists():
        return True
    needed = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & needed == needed


class View:
    """A child's root under construction. Create it in the child's mount namespace, with the right to mount there.

    Args:
        point: an existing empty folder to mount the root on.
    """

    def __init__(self, point: Path) -> None:
        self._point = point
        self._read_only: list[Path] = []
        self._visible: dict[Path, Action] = {}
        syscalls.mount("", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        self._mount_empty(Path("/"))

    def build(self, steps: Sequence[Step], user: int) -> None:
        """Show the paths that all children share.

        Args:
            user: user id of the child.
        """
        self._mount_scratch(_SCRATCH)
        self._add_devices()
        for step in steps:
            if step.action is Action.LINK:
                self._inside(step.path).symlink_to(step.target)
                continue
            self._visible[step.path] = step.action
            if step.action is Action.SHOW:
                with contextlib.suppress(FileNotFoundError):  # deleted since the plan was computed
                    self._bind(step.path, _READ_ONLY, is_folder=step.is_folder)
            elif step.is_folder:
                self._mount_empty(step.path)
            else:
                syscalls.mount("/dev/null", self._inside(step.path), flags=syscalls.MS_BIND)
        self._add_accounts(user)

    def add_folder(self, folder: Path) -> None:
        """Show the child's folder, writable. Its path must not contain symbolic links."""
        self._bind(folder, _NO_PRIVILEGE, is_folder=True)

    def add_files(self, files: Sequence[Path]) -> None:
        """Show single files read-only; skip missing ones."""
        for file in files:
            resolved = file.resolve()
            if resolved.exists() and not resolved.is_dir():
                self._bind(resolved, _READ_ONLY, is_folder=False)
                # A path through a link already exists if the link itself is shown.
                if resolved != file and not self._is_shown(file):
                    self._bind(file, _READ_ONLY, is_folder=False)

    def add_own_proc(self) -> None:
        """Mount the /proc of this process's process namespace.

        Raises:
            OSError: the host does not allow it, for example because parts of its /proc are masked.
        """
        target = self._make_point(Path("/proc"), is_folder=True)
        syscalls.mount("proc", target, "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        # If the server is root and its namespace has no other users, the child could change the kernel's settings.
        for name in _KERNEL_SETTINGS:
            if (target / name).exists():
                syscalls.mount(target / name, target / name, flags=syscalls.MS_BIND)
                syscalls.restrict_mount(target / name, _READ_ONLY)

    def add_host_proc(self) -> None:
        """Show the host's /proc."""
        target = self._make_point(Path("/proc"), is_folder=True)
        syscalls.mount("/proc", target, flags=syscalls.MS_BIND | syscalls.MS_REC)

    def enter(self) -> None:
        """Make the view the root of this process and detach the former root."""
        for path in self._read_only:
            syscalls.restrict_mount(self._inside(path), _READ_ONLY)
        syscalls.change_root(self._point)

    def _is_shown(self, path: Path) -> bool:
        nearest = next((self._visible[above] for above in path.parents if above in self._visible), Action.HIDE)
        return nearest is Action.SHOW

    def _bind(self, path: Path, attributes: int, *, is_folder: bool) -> None:
        target = self._make_point(path, is_folder=is_folder)
        syscalls.mount(path, target, flags=syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.restrict_mount(target, attributes, recursive=True)

    def _mount_empty(self, path: Path) -> None:
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", self._inside(path), "tmpfs", flags, "mode=755,size=64m")
        self._read_only.append(path)

    def _mount_scratch(self, path: Path) -> None:
        target = self._make_point(path, is_folder=True)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", target, "tmpfs", flags, f"mode=1777,size={_SCRATCH_BYTES}")

    def _make_point(self, path: Path, *, is_folder: bool) -> Path:
        target = self._inside(path)
        with contextlib.suppress(FileExistsError):
            if is_folder:
                target.mkdir(parents=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch(exist_ok=False)
        return target

    def _inside(self, path: Path) -> Path:
        return self._point / path.relative_to("/")

    def _add_devices(self) -> None:
        for name in _DEVICES:
            target = self._make_point(Path("/dev") / name, is_folder=False)
            syscalls.mount(f"/dev/{name}", target, flags=syscalls.MS_BIND)
            syscalls.restrict_mount(target, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC)
        for name, link in _LINKS.items():
            self._inside(Path("/dev") / name).symlink_to(link)
        self._mount_scratch(Path("/dev/shm"))

    def _add_accounts(self, user: int) -> None:
        """Name the child's user, which libraries look up, and no other account of the host."""
        etc = self._inside(Path("/etc"))
        etc.mkdir(exist_ok=True)
        (etc / "passwd").write_text(f"child:x:{user}:{user}::/tmp:/bin/false\n")
        (etc / "group").write_text(f"child:x:{user}:\n")
