"""The folder that a runner works in, and beside its own files the agent's that it may read: its bundle, its program."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from etfarm.device_agents.runners.bundle import Bundle
from etfarm.wire.errors import FarmError

_PREFIX: Final = ".read-only-"
_READABLE_BY_ALL: Final = stat.S_IROTH


class ForeignFile(FarmError):
    """A runner left something else than a plain file where a result should be."""

    reason = "RUNNER_LEFT_NO_FILE"


class Box:
    """A runner's folder, and a second one with what it may only read.

    A runner with a user of its own has the second inside of the first, where it may change nothing. For a runner with the agent's
    user it lies beside, since what Landlock grants on a folder holds for everything below. All paths are relative to the runner's
    folder: those above may be closed to it.

    Args:
        folder: where it works; it becomes the runner's.
        user: the runner's own user and group; None where it has the agent's.
    """

    def __init__(self, folder: Path, user: int | None) -> None:
        self.folder = folder.absolute()
        self.user = user
        where = self.folder if user is not None else self.folder.parent
        self.shared = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        """What it may read and not write: hard links to files of the agent's cache, which it cannot reach there."""
        self._files: dict[Path, Path] = {}
        self.shared.chmod(0o755)
        if user is not None and folder.stat().st_uid != user:
            # The agent's group, so that an agent whose service has few capabilities can still clear it.
            folder.chmod(0o770)
            os.chown(folder, user, -1)

    def close(self) -> None:
        """Take back what it may read; its own files stay."""
        shutil.rmtree(self.shared, ignore_errors=True)

    def place_bundle(self, bundle: Bundle, emulator: Sequence[str] = ()) -> list[str]:
        """Put a bundle's files into the box; the command line that starts it there."""
        for name in bundle.manifest.files:
            self._place(bundle.folder / name, self.shared / name)
        return Bundle(self.shared, bundle.manifest).command(emulator, working_folder=self.folder)

    def path_for_runner(self, path: Path) -> Path:
        """A file's path as the runner must be given it; one from outside is put into the box first.

        Raises:
            OSError: it cannot be put there.
        """
        path = path.absolute()
        if path.is_relative_to(self.folder):
            return path.relative_to(self.folder)
        if path not in self._files:
            inside = self.shared / f"file-{len(self._files)}"
            self._place(path, inside)
            self._files[path] = Path(os.path.relpath(inside, self.folder))
        return self._files[path]

    def _place(self, source: Path, target: Path) -> None:
        mode = source.stat().st_mode
        if self.user is None or mode & _READABLE_BY_ALL:
            try:
                os.link(source, target)
                return
            except OSError:
                pass  # another file system, or one without links
        shutil.copyfile(source, target)
        target.chmod(0o555 if mode & stat.S_IXUSR else 0o444)


def require_plain_file(path: Path) -> None:
    """Check what a runner wrote before the agent, which may read more than the runner, opens it.

    Raises:
        ForeignFile: it is a link, or anything but a file of its own.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise ForeignFile(f"The runner left no plain file at {path.name}.", "Look for what the program does to its folder.")
