"""A runner bundle: one archive with the C++ runner, its libraries and its own loader, for one architecture.

The archive is a `.tar.gz` or `.tar.xz` without folders. `bundle.json` describes its content and what it can run, and lists every
other member with its digest. The bundle needs nothing but a Linux kernel from the machine that runs it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from etfarm.wire import archives, digest, elf
from etfarm.wire.errors import UserError

log = logging.getLogger(__name__)

SCHEMA: Final = "etfarm.bundle/1"
MANIFEST_NAME: Final = "bundle.json"
CONFINE: Final = "--confine"
"""The option of runners that can confine themselves; see native/PROTOCOL.md."""
_MAX_BYTES: Final = 2 << 30
"""Unpacked size above which an archive is refused, because it is not an etfarm bundle or is meant to fill the disk."""
_MAX_FILES: Final = 256
_MAX_NAME_BYTES: Final = 255
"""Maximum length of a file name on Linux's file systems."""
_MAX_MANIFEST_BYTES: Final = 4 << 20


class NotABundle(UserError):
    """A file that is not a runner bundle, or is damaged."""

    reason = "NOT_A_BUNDLE"

    def __init__(self, why: str, *, file: str = "") -> None:
        super().__init__(
            f"This is not a usable runner bundle: {why}.", "Make one with `etfarm bundle build`.", why=why, file=file
        )


@dataclass(frozen=True)
class BundledFile:
    """One member of a bundle."""

    digest: str
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class BundleManifest:
    """The content of `bundle.json`."""

    arch: str
    """`x86_64` or `aarch64`."""
    executorch: str
    """ExecuTorch's version without its local part."""
    source_digest: str
    """Digest of the runner's sources and of how they are compiled."""
    backends: tuple[str, ...]
    """Usable delegates; empty, like `operators`, if the bundle could not be run when it was built."""
    operators: tuple[str, ...]
    files: Mapping[str, BundledFile]
    loader: str
    """The member that starts the others: the dynamic loader of the bundled libc."""
    entry: str
    """The runner itself."""
    note: str = ""
    """Why a field above is empty."""
    options: tuple[str, ...] = ()
    """Options that the runner supports and that not every runner has, such as CONFINE."""

    def to_json(self) -> dict[str, object]:
        """Return the manifest as `bundle.json` holds it."""
        return {
            "schema": SCHEMA,
            "arch": self.arch,
            "executorch": self.executorch,
            "source_digest": self.source_digest,
            "backends": list(self.backends),
            "operators": list(self.operators),
            "files": {name: {"digest": file.digest, "size": file.size} for name, file in sorted(self.files.items())},
            "loader": self.loader,
            "entry": self.entry,
            "note": self.note,
            "options": list(self.options),
        }

    @classmethod
    def parse(cls, text: str | bytes) -> BundleManifest:
        """Return the manifest in a `bundle.json`.

        Raises:
            NotABundle: the text is not a manifest, or lists a name that is not allowed in a flat folder.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            if document["schema"] != SCHEMA:
                raise NotABundle(f"its schema is {document['schema']!r}, not {SCHEMA!r}")
            manifest = cls(
                arch=_text(document["arch"]),
                executorch=_text(document["executorch"]),
                source_digest=_text(document["source_digest"]),
                backends=tuple(_text(name) for name in document["backends"]),
                operators=tuple(_text(name) for name in document["operators"]),
                files={name: BundledFile(_text(f["digest"]), int(f["size"])) for name, f in document["files"].items()},
                loader=_text(document["loader"]),
                entry=_text(document["entry"]),
                note=_text(document.get("note", "")),
                options=tuple(_text(name) for name in document.get("options", ())),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise NotABundle(f"its {MANIFEST_NAME} cannot be read ({error})") from None
        for name, file in manifest.files.items():
            if not _is_plain(name) or not digest.is_digest(file.digest) or file.size < 0:
                raise NotABundle(f"its {MANIFEST_NAME} has an invalid entry for {name!r}")
        for name in (manifest.loader, manifest.entry):
            if name not in manifest.files:
                raise NotABundle(f"{name!r} is not among its files")
        return manifest


@dataclass(frozen=True)
class Bundle:
    """An unpacked, verified bundle in `folder`."""

    folder: Path
    manifest: BundleManifest

    def command(self, emulator: Sequence[str] = (), *, working_folder: Path | None = None) -> list[str]:
        """Return the command line that starts the runner: in any working folder, or with relative paths in `working_folder` only.

        `emulator` goes in front, for example `("/usr/bin/qemu-aarch64-static", "-cpu", "cortex-a76")`; its path is
        absolute, since a runner's environment has no PATH.
        """
        folder = self.folder.absolute()
        if working_folder is not None:
            folder = Path(os.path.relpath(folder, working_folder))
        loader, entry = folder / self.manifest.loader, folder / self.manifest.entry
        return [*emulator, str(loader), "--library-path", str(folder), str(entry)]


def read_manifest(archive: Path) -> BundleManifest:
    """Return the manifest of a bundle that is not unpacked.

    Raises:
        NotABundle: the archive is not an etfarm bundle.
        OSError: it cannot be read.
    """
    try:
        with archive.open("rb") as packed:
            for member, content in archives.members(packed, max_bytes=_MAX_BYTES, max_members=_MAX_FILES):
                if member.name == MANIFEST_NAME:
                    return BundleManifest.parse(content.read(_MAX_MANIFEST_BYTES))
    except archives.BadArchive as error:
        raise NotABundle(str(error), file=archive.name) from error
    raise NotABundle(f"it has no {MANIFEST_NAME}", file=archive.name)


def unpack(archive: Path, folder: Path) -> Bundle:
    """Unpack `archive` into `folder`, which appears complete and verified or not at all.

    An existing `folder` is opened instead and its files are verified again; a damaged one is deleted and unpacked anew. Blocks:
    call it in a thread from async code.

    Raises:
        NotABundle: the archive is not an etfarm bundle, or a file has another digest than the manifest states.
        OSError: the disk is full, read-only or broken.
    """
    if folder.exists():
        try:
            return open_folder(folder)
        except (NotABundle, OSError) as error:
            log.warning("the bundle in %s was damaged on this disk (%s); it is unpacked again", folder, error)
            shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        try:
            with archive.open("rb") as packed:
                _extract(packed, staging)
        except archives.BadArchive as error:
            raise NotABundle(str(error), file=archive.name) from error
        bundle = open_folder(staging)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            # Another process unpacked the same bundle meanwhile; its files are as good once they are verified.
            if not folder.exists():
                raise
            return open_folder(folder)
        return Bundle(folder, bundle.manifest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def open_folder(folder: Path) -> Bundle:
    """Open the bundle that is unpacked in `folder`; every file is verified.

    Raises:
        NotABundle: a file is missing, unexpected or different from the manifest.
        OSError: a file cannot be read.
    """
    try:
        with (folder / MANIFEST_NAME).open("rb") as stored:
            manifest = BundleManifest.parse(stored.read(_MAX_MANIFEST_BYTES))
    except OSError as error:
        raise NotABundle(f"it has no readable {MANIFEST_NAME} ({error.strerror})") from None
    present = {entry.name for entry in os.scandir(folder)} - {MANIFEST_NAME}
    if present != set(manifest.files):
        odd = sorted(present ^ set(manifest.files))
        raise NotABundle(f"its files are not those of its {MANIFEST_NAME}: {', '.join(odd[:5])}")
    for name, expected in manifest.files.items():
        path = folder / name
        if path.is_symlink() or path.stat().st_size != expected.size or digest.of_file(path) != expected.digest:
            raise NotABundle(f"{name!r} is damaged", file=name)
    for name in (manifest.loader, manifest.entry):
        with (folder / name).open("rb") as program:
            arch = elf.arch_of(program.read(elf.HEAD_BYTES))
        if arch is not None and arch != manifest.arch:
            raise NotABundle(f"it says that it is for {manifest.arch}, but its {name} is a program for {arch}", file=name)
    return Bundle(folder, manifest)


def _extract(packed: BinaryIO, into: Path) -> None:
    """Extract plain files with plain names only, so that an archive cannot write outside `into`."""
    for member, content in archives.members(packed, max_bytes=_MAX_BYTES, max_members=_MAX_FILES):
        if not member.is_file or not _is_plain(member.name):
            raise NotABundle(f"it holds {member.name[:100]!r}, which is not a regular file")
        if (into / member.name).exists():
            raise NotABundle(f"it holds {member.name!r} twice")
        with (into / member.name).open("xb") as target:
            shutil.copyfileobj(content, target, 1 << 20)
        (into / member.name).chmod(0o755 if member.mode & 0o100 else 0o644)


def _is_plain(name: str) -> bool:
    return 0 < len(os.fsencode(name)) <= _MAX_NAME_BYTES and name not in (".", "..") and "/" not in name and "\0" not in name


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
