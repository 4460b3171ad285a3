"""The versions of etfarm that an agent may run: its installation, and wheels that were unpacked beside its data.

Stdlib only: the launcher, which stays in memory, uses it.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from etfarm.wire.atomic_write import write_atomically

STATE_FILE: Final = "state.json"
MAX_BYTES: Final = 512 << 20
"""Maximum size of an unpacked wheel."""
_MAX_FILES: Final = 20_000
_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.!+_-]{0,63}", re.ASCII)


class BadWheel(Exception):
    """A wheel that cannot be unpacked."""


@dataclass(frozen=True)
class Version:
    """One unpacked wheel."""

    folder: str
    """Name of its folder below that of the versions."""
    version: str
    """Its version of etfarm."""
    upgrade_id: str
    """The upgrade that brought it."""
    time_limit_s: float = 60.0
    """How long it may take to connect when it is started for the first time."""


@dataclass(frozen=True)
class State:
    """What runs, and what is tried next."""

    base: str = ""
    """The version of the installation that `current` replaces."""
    current: Version | None = None
    """The wheel that runs; None for the installation."""
    trial: Version | None = None
    """The wheel that the next start tries."""
    outcome: Mapping[str, str] | None = None
    """How the last upgrade ended: `upgrade_id`, `version`, and `error` unless it succeeded."""


class Versions:
    """The folder of an agent's versions.

    Args:
        data: the agent's data folder.
        base: the version of the installation. Wheels that replaced an installation of another version are not used: somebody
            has installed a new one since.
    """

    def __init__(self, data: Path, base: str) -> None:
        self.folder = data / "versions"
        self._base = base

    def read(self) -> State:
        """Return the state; that of a first start if it is missing, damaged, or of another installation."""
        try:
            stored = json.loads((self.folder / STATE_FILE).read_bytes())
            state = State(
                str(stored["base"]), _version(stored["current"]), _version(stored["trial"]), _outcome(stored["outcome"])
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError):
            return State(self._base)
        if state.base != self._base:
            return State(self._base, outcome=state.outcome)
        current = state.current if state.current is not None and self.path(state.current).is_dir() else None
        return replace(state, current=current)

    def write(self, state: State) -> None:
        """Store the state in one step.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self.folder / STATE_FILE, json.dumps(asdict(state)).encode(), durable=True)

    def path(self, version: Version) -> Path:
        """Return the folder of a version, which precedes the installation on Python's path."""
        return self.folder / version.folder

    def unpack(self, wheel: Path, version: str, digest: str) -> str:
        """Unpack a wheel into a folder of its own, and return the folder's name. Blocks.

        Raises:
            BadWheel: it is no wheel, is too large, or has files outside of its folder.
            OSError: it cannot be unpacked.
        """
        if not _VERSION.fullmatch(version):
            raise BadWheel(f"{version[:80]!r} is not a version")
        name = f"{version}-{digest[:12]}"
        part, folder = self.folder / f".{name}.part", self.folder / name
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(part, ignore_errors=True)
        try:
            with zipfile.ZipFile(wheel) as archive:
                _require_plausible(archive)
                archive.extractall(part)
        except (BadWheel, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - zipfile raises what each compression raises
            raise BadWheel(f"it cannot be unpacked: {error}") from None
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return name

    def tidy(self, state: State) -> None:
        """Delete folders that the state does not name. Blocks."""
        used = {version.folder for version in (state.current, state.trial) if version is not None}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_dir() and path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


def _require_plausible(archive: zipfile.ZipFile) -> None:
    entries = archive.infolist()
    if len(entries) > _MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise BadWheel("it is too large")
    for entry in entries:
        parts = Path(entry.filename).parts
        if ".." in parts or Path(entry.filename).is_absolute():
            raise BadWheel(f"it has a file outside of its folder: {entry.filename[:80]!r}")


def _version(stored: Any) -> Version | None:
    if stored is None:
        return None
    folder, version = str(stored["folder"]), str(stored["version"])
    if not folder or Path(folder).name != folder or folder.startswith("."):
        raise ValueError(folder)
    return Version(folder, version, str(stored["upgrade_id"]), float(stored["time_limit_s"]))


def _outcome(stored: Any) -> Mapping[str, str] | None:
    return None if stored is None else {str(key): str(value) for key, value in dict(stored).items()}
