"""What only the user of this process may use: data folders, which take the rights of others away, and files with secrets."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from etfarm.wire.errors import UserError

_OTHERS: Final = 0o077
"""The rights of the group and of all other users."""
_ROOT: Final = 0
_OF_ROOT: Final = 0o037
"""What others may not do with a secret of root: its group may read it, as Debian's `ssl-cert` does."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


class FolderNotPrivate(UserError):
    """A folder for private data that other users may change, or that this process cannot close to them."""

    reason = "FOLDER_NOT_PRIVATE"


def close_umask() -> None:
    """Let no other user read what this process creates from now on. Programs that run as another user get explicit rights."""
    os.umask(_OTHERS)


def make_private(folder: Path, marks: Collection[str] | None = None) -> None:
    """Create a folder that only this process's user may enter, or take the rights of others from an existing one.

    Nobody else reaches what is below a closed folder, so that only its own entries are looked at. If it was open until now, all
    folders below it are closed, too: another process may have one of them open.

    Args:
        marks: names of which an open folder must have one, unless it is empty. A wrong option or link must not close `/etc`.
            None if the caller knows that the folder is etfarm's.

    Raises:
        FolderNotPrivate: the folder or an entry of it belongs to another user, it is open and has other files, or its file system
            keeps no rights.
        OSError: it cannot be created or read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _opened(folder) as descriptor:
        require_own(folder)
        entries = list(os.scandir(descriptor))
        for entry in entries:
            _require_own_entry(folder, entry)
        was_open = bool(os.fstat(descriptor).st_mode & _OTHERS)
        names = [entry.name for entry in entries]
        if was_open and names and marks is not None and not any(name in marks for name in names):
            raise FolderNotPrivate(
                f"Other users may enter {folder}, and it has files that are not etfarm's, such as {min(names)!r}.",
                f"Choose another folder, or run `chmod 700 {folder}` if the files in it are for no other user.", folder=folder,
            )  # fmt: skip
        if was_open:
            for _, folders, _, below in os.fwalk(dir_fd=descriptor, onerror=_ignore_foreign):
                for name in folders:
                    _close(below, name)
        for entry in entries:
            _close(descriptor, entry.name)
        if was_open:  # last, so that an interrupted repair is repeated
            _close(descriptor, ".")
            if os.fstat(descriptor).st_mode & _OTHERS:
                raise FolderNotPrivate(
                    f"Other users may enter {folder}, and its file system does not let that change.",
                    "Choose a folder on a file system with permissions, or mount this one for its user alone.", folder=folder,
                )  # fmt: skip


def require_own(folder: Path) -> None:
    """Refuse a folder of another user, who could read and replace what is in it.

    Raises:
        FolderNotPrivate: the folder, or a link at its path, belongs to another user.
        OSError: it cannot be read.
    """
    user = os.geteuid()
    for status, allowed in ((folder.lstat(), (user, _ROOT)), (folder.stat(), (user,))):
        if status.st_uid not in allowed:
            raise _foreign(folder, status.st_uid)


def find_openness(folder: Path) -> str | None:
    """Return which users may enter a folder that should be private, for people; None if it is private, or does not exist.

    Raises:
        FolderNotPrivate: it belongs to another user.
        OSError: it cannot be read.
    """
    if not folder.exists():
        return None
    require_own(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    return f"Other users may enter {folder} (mode {mode:04o})." if mode & _OTHERS else None


def read_secret(path: Path, refuse: Callable[[str, str], Exception], limit_bytes: int = 1 << 20) -> bytes:
    """Return the beginning of a file with a secret, which only this process's user, or root, may read and change.

    Args:
        refuse: returns the error for a message and a remedy.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        require_secret(file.fileno(), path, refuse)
        return file.read(limit_bytes)


def require_secret(descriptor: int, path: Path, refuse: Callable[[str, str], Exception], *, of_any_owner: bool = False) -> None:
    """Refuse an open file with a secret that other users may read or change.

    Args:
        path: where the file is, for people.
        refuse: returns the error for a message and a remedy.
        of_any_owner: whether the file may be that of the user for whom this process, which is root's, prepares something.
    """
    status, user = os.fstat(descriptor), os.geteuid()
    if status.st_uid not in (user, _ROOT) and not (of_any_owner and user == _ROOT):
        raise refuse(
            f"The file {path} has a secret and belongs to user {status.st_uid}, not to this process's user {user}.",
            f"Run `chown {user} {path}`.",
        )
    if status.st_mode & (_OF_ROOT if status.st_uid == _ROOT != user else _OTHERS):
        change = f"chown {user} {path} && " if status.st_uid == _ROOT != user else ""
        raise refuse(f"The file {path} has a secret, and other users may read or change it.", f"Run `{change}chmod 600 {path}`.")


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, _FOLDER)
    except PermissionError:
        require_own(folder)
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _require_own_entry(folder: Path, entry: os.DirEntry[str]) -> None:
    """Refuse what another user has put into the folder. What root has left there is a mount's `lost+found`, or harmless."""
    owner = entry.stat(follow_symlinks=False).st_uid
    if owner not in (os.geteuid(), _ROOT):
        raise _foreign(folder / entry.name, owner)


def _close(below: int, name: str) -> None:
    """Take the rights of others from an entry of a folder, unless it is a link, or another user's."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = os.stat(name, dir_fd=below, follow_symlinks=False).st_mode
        if (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) and mode & _OTHERS:
            # Linux changes no mode without following links, so that the file is opened first.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=below)
            try:
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~_OTHERS)
            finally:
                os.close(descriptor)


def _ignore_foreign(error: OSError) -> None:
    """Pass over folders of children with a user of their own, which are deleted later."""


def _foreign(path: Path, owner: int) -> FolderNotPrivate:
    user = os.geteuid()
    return FolderNotPrivate(
        f"{path} belongs to user {owner}, not to this process's user {user}.",
        f"Run it as that user, choose another folder, or give the folder to this one: `chown -R {user} {path}`.",
        path=path, owner=owner, user=user,
    )  # fmt: skip


def is_open_to_all(path: Path) -> bool:
    """Return whether every user may read a file or folder, and reach it."""
    try:
        mode = path.stat().st_mode
        required = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        return mode & required == required and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)
    except OSError:
        return False
