"""Runner bundles: archives with a runner for one architecture, and the manifest that lists their files. Standard library only.

A bundle is a `.tar.gz` or `.tar.xz` of plain files without folders. `bundle.json` describes what it can run, and lists every
other file with its digest. Servers and agents accept the same archives: what one refuses, the other does not see otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from etfarm.wire import archives, digest, elf
from etfarm.wire.errors import UserError

SCHEMA: Final = "etfarm.bundle/1"
MANIFEST_NAME: Final = "bundle.json"
MAX_MANIFEST_BYTES: Final = 4 << 20
_MAX_BYTES: Final = 2 << 30
"""Unpacked size above which an archive is refused, because it is not an etfarm bundle or is meant to fill the disk."""
_MAX_FILES: Final = 256
_MAX_NAMES: Final = 10_000
"""Maximum number of backends, and of operators."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}", re.ASCII)
"""Names of files, which also become arguments of a phone's shell."""
_NAME: Final = re.compile(r"[!-~]{1,200}", re.ASCII)
"""Names that people see: of versions, backends, operators and options."""
_READ_BYTES: Final = 1 << 20


class NotABundle(UserError):
    """A file that is not a runner bundle, or is damaged."""

    reason = "NOT_A_BUNDLE"

    def __init__(self, why: str, *, file: str = "") -> None:
        super().__init__(
            f"This is not a usable runner bundle: {why}.", "Make one with `etfarm bundle build`.", why=why, file=file
        )


class WrongArch(NotABundle):
    """A bundle with programs for another architecture than the one that its manifest names."""

    reason = "BUNDLE_ARCH_MISMATCH"

    def __init__(self, name: str, arch: str, other: str) -> None:
        super().__init__(f"its manifest names {arch}, and its {name} is a program for {other}", file=name)
        self.metadata["arch"] = arch


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
        return {"schema": SCHEMA, **asdict(replace(self, files=dict(sorted(self.files.items()))))}

    @classmethod
    def parse(cls, text: str | bytes) -> BundleManifest:
        """Return the manifest in a `bundle.json`.

        Raises:
            NotABundle: the text is not a manifest, or lists a name that is not allowed in a flat folder.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            if document["schema"] != SCHEMA:
                raise NotABundle(f"its schema is {str(document['schema'])[:100]!r}, not {SCHEMA!r}")
            manifest = cls(
                arch=_name(document["arch"]),
                executorch=_name(document["executorch"]),
                source_digest=_name(document["source_digest"]),
                backends=_names(document["backends"]),
                operators=_names(document["operators"]),
                files={name: BundledFile(_name(f["digest"]), _size(f["size"])) for name, f in document["files"].items()},
                loader=_name(document["loader"]),
                entry=_name(document["entry"]),
                note=_note(document.get("note", "")),
                options=_names(document.get("options", [])),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise NotABundle(f"its {MANIFEST_NAME} cannot be read ({type(error).__name__}: {str(error)[:200]})") from None
        for name, file in manifest.files.items():
            if not is_file_name(name) or name == MANIFEST_NAME or not digest.is_digest(file.digest):
                raise NotABundle(f"its {MANIFEST_NAME} has an invalid entry for {name[:100]!r}")
        for name in (manifest.loader, manifest.entry):
            if name not in manifest.files:
                raise NotABundle(f"{name!r} is not among its files")
        return manifest

    def require_files(self, files: Mapping[str, BundledFile]) -> None:
        """Compare the files of a bundle with those that the manifest lists.

        Raises:
            NotABundle: a file is missing, unexpected or different.
        """
        if files.keys() != self.files.keys():
            odd = sorted(files.keys() ^ self.files.keys())
            raise NotABundle(f"its files are not those of its {MANIFEST_NAME}: {', '.join(odd[:5])}")
        for name, expected in self.files.items():
            if files[name] != expected:
                raise NotABundle(f"{name!r} is damaged", file=name)

    def require_arch(self, name: str, head: bytes) -> None:
        """Check a program of the bundle by its first `elf.HEAD_BYTES` bytes.

        Raises:
            WrongArch: it is for another architecture.
        """
        arch = elf.arch_of(head)
        if name in (self.loader, self.entry) and arch is not None and arch != self.arch:
            raise WrongArch(name, self.arch, arch)


@contextmanager
def open_archive(archive: Path) -> Iterator[Iterator[tuple[archives.Member, archives.Content]]]:
    """Open a bundle's archive, and yield its files in their order, each name once.

    Raises:
        NotABundle: the archive is damaged, too large, or holds anything else; also while its files are read.
        OSError: it cannot be read.
    """
    with archive.open("rb") as packed:
        try:
            yield _members(packed)
        except archives.BadArchive as error:
            raise NotABundle(str(error), file=archive.name) from error


def _members(packed: BinaryIO) -> Iterator[tuple[archives.Member, archives.Content]]:
    names: set[str] = set()
    for member, content in archives.members(packed, max_bytes=_MAX_BYTES, max_members=_MAX_FILES):
        if not member.is_file or not is_file_name(member.name):
            raise NotABundle(f"it holds {member.name[:100]!r}, which is not a regular file with a plain name")
        if member.name in names:
            raise NotABundle(f"it holds {member.name!r} twice")
        names.add(member.name)
        if member.name == MANIFEST_NAME and member.size_bytes > MAX_MANIFEST_BYTES:
            raise NotABundle(f"its {MANIFEST_NAME} has {member.size_bytes} bytes")
        yield member, content


def check_archive(archive: Path) -> BundleManifest:
    """Return the manifest of an archive that agents can unpack; each of its files is verified, none is written.

    Raises:
        NotABundle: agents would refuse the archive.
        OSError: it cannot be read.
    """
    manifest, files, heads = None, dict[str, BundledFile](), dict[str, bytes]()
    with open_archive(archive) as members:
        for member, content in members:
            if member.name == MANIFEST_NAME:
                manifest = BundleManifest.parse(content.read())
                continue
            hashed = hashlib.sha256(head := content.read(elf.HEAD_BYTES))
            while part := content.read(_READ_BYTES):
                hashed.update(part)
            files[member.name], heads[member.name] = BundledFile(hashed.hexdigest(), member.size_bytes), head
    if manifest is None:
        raise NotABundle(f"it has no {MANIFEST_NAME}")
    manifest.require_files(files)
    for name, head in heads.items():
        manifest.require_arch(name, head)
    return manifest


def read_manifest(archive: Path) -> BundleManifest:
    """Return the manifest of a trusted archive without verifying its files.

    Raises:
        NotABundle: the archive is not an etfarm bundle.
        OSError: it cannot be read.
    """
    with open_archive(archive) as members:
        for member, content in members:
            if member.name == MANIFEST_NAME:
                return BundleManifest.parse(content.read())
    raise NotABundle(f"it has no {MANIFEST_NAME}", file=archive.name)


def is_file_name(name: str) -> bool:
    """Return whether a file of a bundle may have a name."""
    return _FILE_NAME.fullmatch(name) is not None


def _name(value: object) -> str:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise TypeError(f"{str(value)[:100]!r} is not a name")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_NAMES:
        raise TypeError(f"a list of names must have at most {_MAX_NAMES:,}")
    return tuple(map(_name, value))


def _note(value: object) -> str:
    if not isinstance(value, str) or len(value) > 1_000 or not value.isprintable():
        raise TypeError(f"{str(value)[:100]!r} is not a note")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise TypeError(f"{str(value)[:100]!r} is not a size")
    return value
