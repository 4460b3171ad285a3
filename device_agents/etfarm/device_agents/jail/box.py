"""A runner's working folder, with the files of the agent that the runner may read: its bundle and its program."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from etfarm.device_agents.runners.bundle import Bundle
from etfarm.wire.errors import error_for

_PREFIX: Final = ".read-only-"
_READABLE_BY_ALL: Final = stat.S_IROTH


class Box:
    """A runner's folder, and a second, read-only one with the files that it needs.

    The read-only folder lies inside the runner's folder if the runner has its own user, which cannot write there. It lies beside
    the runner's folder if the runner has the agent's user, since Landlock grants rights on whole trees. All paths are relative to
    the runner's folder, because the runner may not be allowed to search the folders above.

    Args:
        folder: the runner's working folder; its owner becomes `user`.
        user: the runner's own user and group id; None if the runner has the agent's user.
    """

    def __init__(self, folder: Path, user: int | None) -> None:
        self.folder = folder.absolute()
        self.user = user
        parent = self.folder if user is not None else self.folder.parent
        self.shared = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        """The read-only folder, with hard links to files of the agent's cache, which itself is closed to the runner."""
        self._files: dict[Path, Path] = {}
        self.shared.chmod(0o755)
        if user is not None and folder.stat().st_uid != user:
            # The group stays the agent's, so that an agent whose service has few capabilities can still delete the folder.
            folder.chmod(0o770)
            os.chown(folder, user, -1)

    def close(self) -> None:
        """Delete the read-only folder; the runner's own files stay."""
        shutil.rmtree(self.shared, ignore_errors=True)

    def place_bundle(self, bundle: Bundle, emulator: Sequence[str] = ()) -> list[str]:
        """Put a bundle's files into the box. Return the command line that starts the bundle there."""
        for name in bundle.manifest.files:
            self._place(bundle.folder / name, self.shared / name)
        return Bundle(self.shared, bundle.manifest).command(emulator, working_folder=self.folder)

    def path_for_runner(self, path: Path) -> Path:
        """Return the path by which the runner finds a file; a file from outside is put into the box first.

        Raises:
            OSError: the file cannot be put into the box.
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
                pass  # on another file system, or without hard links
        shutil.copyfile(source, target)
        target.chmod(0o555 if mode & stat.S_IXUSR else 0o444)


def require_plain_file(path: Path) -> None:
    """Check that a runner's result is a plain file. Call it before the agent, which may read more than the runner, opens it.

    Raises:
        RUNNER_LEFT_NO_FILE: the path is a symbolic link, has several names, or is not a regular file.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise error_for(
            "RUNNER_LEFT_NO_FILE",
            f"The runner left no regular file at {path.name}.",
            "Check what the program does in its working folder.",
        )
