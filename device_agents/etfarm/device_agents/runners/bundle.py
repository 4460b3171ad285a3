"""An unpacked runner bundle: the C++ runner, its libraries and its own loader, for one architecture.

It needs nothing but a Linux kernel from the machine that runs it. `etfarm.wire.bundles` describes the archive.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.wire import digest, elf
from etfarm.wire.bundles import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundledFile, BundleManifest, NotABundle, open_archive

log = logging.getLogger(__name__)

CONFINE: Final = "--confine"
"""The option of runners that can confine themselves; see native/PROTOCOL.md."""


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
        _extract(archive, staging)
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
            manifest = BundleManifest.parse(stored.read(MAX_MANIFEST_BYTES))
    except OSError as error:
        raise NotABundle(f"it has no readable {MANIFEST_NAME} ({error.strerror})") from None
    files = {entry.name: entry for entry in os.scandir(folder) if entry.name != MANIFEST_NAME}
    if odd := [name for name, entry in files.items() if not entry.is_file(follow_symlinks=False)]:
        raise NotABundle(f"{odd[0]!r} is damaged", file=odd[0])
    sizes = {name: entry.stat().st_size for name, entry in files.items()}
    # A file of another size is damaged, and may be huge.
    manifest.require_files(
        {
            name: BundledFile(
                digest.of_file(folder / name) if name in manifest.files and manifest.files[name].size == size else "", size
            )
            for name, size in sizes.items()
        }
    )
    for name in (manifest.loader, manifest.entry):
        with (folder / name).open("rb") as program:
            manifest.require_arch(name, program.read(elf.HEAD_BYTES))
    return Bundle(folder, manifest)


def _extract(archive: Path, into: Path) -> None:
    with open_archive(archive) as members:
        for member, content in members:
            with (into / member.name).open("xb") as target:
                shutil.copyfileobj(content, target, 1 << 20)
            (into / member.name).chmod(0o755 if member.mode & 0o100 else 0o644)
