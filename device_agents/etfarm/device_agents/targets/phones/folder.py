"""The agent's folder on a phone: bundles and programs by digest, transferred once, verified before use, limited in size.

    /data/local/tmp/etfarm/lock, owner     the agent that serves the phone
    .../bundles/DIGEST/                    an unpacked runner bundle, named by its manifest's digest
    .../files/DIGEST                       a program or a data file
    .../runs/NAME/                         a runner's working folder

Partially written files are not trusted: a file is identified by the sha256 that the phone computes, not by its name.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.adb import AdbServer, Completed, OnProgress, PhoneFull
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.targets.phones.errors import PhoneRefused, phone_storage_damaged
from etfarm.wire import digest
from etfarm.wire.bundles import MANIFEST_NAME

log = logging.getLogger(__name__)

ROOT: Final = "/data/local/tmp/etfarm"
_SUM: Final = re.compile(r"([0-9a-f]{64})\s+\*?(.+)")
_ENTRY: Final = re.compile(r"(\d+)\s+(\d+)\s+(\S+)")
_SUM_S: Final = 120.0
"""Limit in seconds for hashing all files of a run: old phones read 50 MB a second."""
_SHELL_S: Final = 20.0
_KIB: Final = 1024


@dataclass(frozen=True)
class _RequiredFile:
    """A file that should be on the phone."""

    source: Path
    remote: str
    digest: str
    mode: int = 0o644


class PhoneFolder:
    """The folder on one phone, which this agent alone uses.

    Args:
        adb: the adb server that lists the phone.
        serial: the phone's serial for adb.
        limit_bytes: limit for `bundles` and `files` together; the files of the next run may exceed it.
        root: the folder's path on the phone.
    """

    def __init__(self, adb: AdbServer, serial: str, limit_bytes: int, root: str = ROOT) -> None:
        self._adb = adb
        self._serial = serial
        self._limit_bytes = limit_bytes
        self._transfers = 0
        self.root = root

    @property
    def is_carrying(self) -> bool:
        """Whether a file is being transferred. The transfer occupies the link, and has its own limit on silence."""
        return self._transfers > 0

    def bundle(self, bundle: Bundle) -> Bundle:
        """Return the bundle with its folder on the phone, so that its command line is valid there."""
        return Bundle(Path(self.root, "bundles", _bundle_digest(bundle)), bundle.manifest)

    @property
    def files(self) -> str:
        """The folder of programs and data files on the phone."""
        return posixpath.join(self.root, "files")

    def file(self, path: Path) -> str:
        """Return the path on the phone of a file of the agent's cache, which is named by its digest."""
        return posixpath.join(self.root, "files", path.name)

    def run(self, name: str) -> str:
        """Return the path of a runner's working folder, without creating it."""
        return posixpath.join(self.root, "runs", name)

    async def open(self) -> None:
        """Create the folder, and delete what an earlier agent was working on.

        Raises:
            PhoneRefused: the folder cannot be created.
            DeviceError: the phone is disconnected or does not answer.
        """
        root = shlex.quote(self.root)
        await self.shell(f"mkdir -p {root}/bundles {root}/files && rm -rf {root}/runs && mkdir {root}/runs", "make its folder")

    async def install(self, bundle: Bundle | None, files: Sequence[Path], on_progress: OnProgress | None = None) -> int:
        """Transfer missing or damaged files, after making room; return the number of bytes sent.

        Args:
            bundle: the runner's bundle; None if the phone's own runner is used.
            files: files of the agent's cache, each named by its digest.
            on_progress: takes the progress of the transfer.

        Raises:
            PhoneFull: the phone has no room, even without the files that this run does not need.
            PHONE_STORAGE_DAMAGED: a file on the phone has another digest than the one that was sent.
            DeviceError: the phone is disconnected or does not answer.
        """
        required, keep = self._required_files(bundle, files), self._entries(bundle, files)
        digests = await self._sums(keep)
        missing = [each for each in required if digests.get(each.remote) != each.digest]
        if not missing:
            return 0
        await self._evict(keep, self._limit_bytes - sum(each.source.stat().st_size for each in missing))
        with self._carrying():
            sent = await self._push(missing, keep, on_progress)
        digests = await self._sums(keep)
        damaged = [each.remote for each in missing if digests.get(each.remote) != each.digest]
        if damaged:
            raise phone_storage_damaged(self._serial, ", ".join(damaged))
        return sent

    async def pull(self, remote: str, path: Path, on_progress: OnProgress | None = None) -> None:
        """Fetch a file that a runner wrote, and delete it on the phone.

        Raises:
            DeviceError: the file cannot be read, or the phone is disconnected or does not answer.
            OSError: `path` cannot be written.
        """
        with self._carrying():
            await self._adb.pull(self._serial, remote, path, on_progress=on_progress)
        await self.shell(f"rm -f {shlex.quote(remote)}", "delete a file")

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1

    async def shell(self, command: str, what: str, *, deadline_s: float = _SHELL_S) -> Completed:
        """Run a command that must succeed; `what` is its purpose, which errors state after "cannot".

        Raises:
            PhoneRefused: the command ended with another exit code than 0.
            DeviceError: the phone is disconnected or does not answer.
        """
        completed = await self._adb.run(self._serial, command, deadline_s=deadline_s)
        if completed.exit_code != 0:
            complaint = (completed.stderr or completed.stdout).decode(
                errors="replace"
            ).strip() or f"exit code {completed.exit_code}"
            raise PhoneRefused(self._serial, what, complaint.splitlines()[-1])
        return completed

    def _required_files(self, bundle: Bundle | None, files: Sequence[Path]) -> list[_RequiredFile]:
        required = [_RequiredFile(path, self.file(path), path.name) for path in files]
        if bundle is None:
            return required
        folder, programs = self.bundle(bundle).folder, {bundle.manifest.loader, bundle.manifest.entry}
        for name, file in sorted(bundle.manifest.files.items()):
            mode = 0o755 if name in programs else 0o644
            required.append(_RequiredFile(bundle.folder / name, str(folder / name), file.digest, mode))
        return required

    async def _sums(self, entries: Collection[str]) -> Mapping[str, str]:
        """Return the digests of those files in `entries` that exist, as the phone reads them now, and mark them as used."""
        names = sorted(entries)
        files = " ".join(f"{name}/*" if name.startswith("bundles/") else name for name in names)
        # Missing files are reported on stderr and in the exit code; the existing ones count.
        command = f"cd {shlex.quote(self.root)} && touch -c {' '.join(names)}; sha256sum {files}"
        completed = await self._adb.run(self._serial, command, deadline_s=_SUM_S)
        lines = completed.stdout.decode(errors="replace").splitlines()
        if completed.exit_code == 127:
            raise PhoneRefused(self._serial, "hash a file", completed.stderr.decode(errors="replace"))
        sums = [match for line in lines if (match := _SUM.fullmatch(line.strip())) is not None]
        return {posixpath.join(self.root, match[2]): match[1] for match in sums}

    async def _push(self, missing: Sequence[_RequiredFile], keep: set[str], on_progress: OnProgress | None) -> int:
        total, done, sent = sum(each.source.stat().st_size for each in missing), 0, 0
        for each in missing:

            def report_part(part: int, _: int) -> None:
                if on_progress is not None:
                    on_progress(done + part, total)  # noqa: B023 - called before the loop goes on

            try:
                sent += await self._adb.push(self._serial, each.source, each.remote, each.mode, on_progress=report_part)
            except PhoneFull:
                # Other programs may have filled the storage; delete once what this run does not need.
                if not await self._evict(keep, 0):
                    raise
                sent += await self._adb.push(self._serial, each.source, each.remote, each.mode, on_progress=report_part)
            done += each.source.stat().st_size
        return sent

    def _entries(self, bundle: Bundle | None, files: Sequence[Path]) -> set[str]:
        """Return the entries that a run needs: `files/DIGEST`, `bundles/DIGEST`."""
        names = {posixpath.join("files", path.name) for path in files}
        return names if bundle is None else names | {posixpath.join("bundles", _bundle_digest(bundle))}

    async def _evict(self, keep: set[str], limit_bytes: int) -> bool:
        """Delete the least recently used entries until the rest is within the limit; return whether any was deleted."""
        listing = 'for each in bundles/* files/*; do [ -e "$each" ] && echo $(stat -c %Y "$each") $(du -sk "$each"); done; true'
        done = await self.shell(f"cd {shlex.quote(self.root)} && {listing}", "list its folder")
        entries = [
            (int(match[1]), int(match[2]) * _KIB, match[3])
            for line in done.stdout.decode(errors="replace").splitlines()
            if (match := _ENTRY.fullmatch(line.strip())) is not None
        ]
        total, evicted = sum(size for _, size, _ in entries), list[str]()
        for _, size, name in sorted(entries):
            if total <= limit_bytes:
                break
            if name not in keep:
                evicted.append(name)
                total -= size
        if evicted:
            log.info("deleting from the phone %s: %s", self._serial, ", ".join(evicted))
            await self.shell(
                f"cd {shlex.quote(self.root)} && rm -rf {' '.join(map(shlex.quote, evicted))}", "delete its old files"
            )
        return bool(evicted)


def _bundle_digest(bundle: Bundle) -> str:
    """Return the digest that identifies a bundle's content: that of its manifest, which lists the digests of all its files."""
    return digest.of_bytes((bundle.folder / MANIFEST_NAME).read_bytes())
