"""The agent's folder on a phone: bundles and programs by digest, carried once, verified before each use, bounded in size.

    /data/local/tmp/etfarm/lock, owner     who serves the phone
    .../bundles/DIGEST/                    an unpacked runner bundle; DIGEST is of its manifest
    .../files/DIGEST                       a program or a data file
    .../runs/NAME/                         where a runner works

Nothing half-written is trusted: a file counts by its sha256 as the phone computes it, whatever its name says.
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
from etfarm.device_agents.runners.bundle import MANIFEST_NAME, Bundle
from etfarm.device_agents.targets.phones.errors import PhoneRefused, PhoneStorageDamaged
from etfarm.wire import digest

log = logging.getLogger(__name__)

ROOT: Final = "/data/local/tmp/etfarm"
_SUM: Final = re.compile(r"([0-9a-f]{64})\s+\*?(.+)")
_ENTRY: Final = re.compile(r"(\d+)\s+(\d+)\s+(\S+)")
_SUM_S: Final = 120.0
"""For hashing all that a run needs: old phones read 50 MB a second."""
_SHELL_S: Final = 20.0
_KIB: Final = 1024


@dataclass(frozen=True)
class _Wanted:
    """A file that should be on the phone."""

    source: Path
    remote: str
    digest: str
    mode: int = 0o644


class PhoneFolder:
    """The folder on one phone, which this agent alone uses.

    Args:
        adb: the server that knows the phone.
        serial: as adb has it.
        limit_bytes: of `bundles` and `files` together; what the next run needs may pass it.
        root: of the folder.
    """

    def __init__(self, adb: AdbServer, serial: str, limit_bytes: int, root: str = ROOT) -> None:
        self._adb = adb
        self._serial = serial
        self._limit_bytes = limit_bytes
        self._transfers = 0
        self.root = root

    @property
    def is_carrying(self) -> bool:
        """Whether a file is on its way. It has the link, and a limit on silence of its own."""
        return self._transfers > 0

    def bundle(self, bundle: Bundle) -> Bundle:
        """The bundle as it lies on the phone: its command line is for there."""
        return Bundle(Path(self.root, "bundles", _bundle_digest(bundle)), bundle.manifest)

    @property
    def files(self) -> str:
        """The folder of programs and data files on the phone."""
        return posixpath.join(self.root, "files")

    def file(self, path: Path) -> str:
        """Where a file of the agent's cache, which has its digest for a name, lies on the phone."""
        return posixpath.join(self.root, "files", path.name)

    def run(self, name: str) -> str:
        """A folder for a runner to work in. It is not made."""
        return posixpath.join(self.root, "runs", name)

    async def open(self) -> None:
        """Makes it, and deletes what an earlier agent was working on.

        Raises:
            PhoneRefused: it cannot be made.
            DeviceError: the phone is gone, or does not answer.
        """
        root = shlex.quote(self.root)
        await self.shell(f"mkdir -p {root}/bundles {root}/files && rm -rf {root}/runs && mkdir {root}/runs", "make its folder")

    async def install(self, bundle: Bundle | None, files: Sequence[Path], on_progress: OnProgress | None = None) -> int:
        """Carries there what is missing or damaged, after it made room; the bytes that were sent.

        Args:
            files: of the agent's cache, each with its digest for a name.

        Raises:
            PhoneFull: it has no room, not even without all that this run does not need.
            PhoneStorageDamaged: what was carried there has another digest there.
            DeviceError: the phone is gone, or does not answer.
        """
        wanted, keep = self._wanted(bundle, files), self._entries(bundle, files)
        there = await self._sums(keep)
        missing = [each for each in wanted if there.get(each.remote) != each.digest]
        if not missing:
            return 0
        await self._evict(keep, self._limit_bytes - sum(each.source.stat().st_size for each in missing))
        with self._carrying():
            sent = await self._push(missing, keep, on_progress)
        there = await self._sums(keep)
        damaged = [each.remote for each in missing if there.get(each.remote) != each.digest]
        if damaged:
            raise PhoneStorageDamaged(self._serial, ", ".join(damaged))
        return sent

    async def pull(self, remote: str, path: Path, on_progress: OnProgress | None = None) -> None:
        """Fetches a file that a runner wrote, and deletes it there.

        Raises:
            DeviceError: it cannot be read, or the phone is gone, or does not answer.
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
        """A command that must succeed there. `what` it is for, after "cannot".

        Raises:
            PhoneRefused: it ended with another exit code than 0.
            DeviceError: the phone is gone, or does not answer.
        """
        done = await self._adb.run(self._serial, command, deadline_s=deadline_s)
        if done.exit_code != 0:
            complaint = (done.stderr or done.stdout).decode(errors="replace").strip() or f"exit code {done.exit_code}"
            raise PhoneRefused(self._serial, what, complaint.splitlines()[-1])
        return done

    def _wanted(self, bundle: Bundle | None, files: Sequence[Path]) -> list[_Wanted]:
        wanted = [_Wanted(path, self.file(path), path.name) for path in files]
        if bundle is None:
            return wanted
        folder, programs = self.bundle(bundle).folder, {bundle.manifest.loader, bundle.manifest.entry}
        for name, file in sorted(bundle.manifest.files.items()):
            mode = 0o755 if name in programs else 0o644
            wanted.append(_Wanted(bundle.folder / name, str(folder / name), file.digest, mode))
        return wanted

    async def _sums(self, entries: Collection[str]) -> Mapping[str, str]:
        """Digests of the files in `entries` that are there, as the phone reads them now. They count as used now."""
        names = sorted(entries)
        files = " ".join(f"{name}/*" if name.startswith("bundles/") else name for name in names)
        # What is not there goes to stderr and into the exit code; what is there counts.
        command = f"cd {shlex.quote(self.root)} && touch -c {' '.join(names)}; sha256sum {files}"
        done = await self._adb.run(self._serial, command, deadline_s=_SUM_S)
        lines = done.stdout.decode(errors="replace").splitlines()
        if done.exit_code == 127:
            raise PhoneRefused(self._serial, "hash a file", done.stderr.decode(errors="replace"))
        sums = [match for line in lines if (match := _SUM.fullmatch(line.strip())) is not None]
        return {posixpath.join(self.root, match[2]): match[1] for match in sums}

    async def _push(self, missing: Sequence[_Wanted], keep: set[str], on_progress: OnProgress | None) -> int:
        total, done, sent = sum(each.source.stat().st_size for each in missing), 0, 0
        for each in missing:

            def report_part(part: int, _: int) -> None:
                if on_progress is not None:
                    on_progress(done + part, total)  # noqa: B023 - called before the loop goes on

            try:
                sent += await self._adb.push(self._serial, each.source, each.remote, each.mode, on_progress=report_part)
            except PhoneFull:
                # Others may have filled it; what this run does not need makes room once.
                if not await self._evict(keep, 0):
                    raise
                sent += await self._adb.push(self._serial, each.source, each.remote, each.mode, on_progress=report_part)
            done += each.source.stat().st_size
        return sent

    def _entries(self, bundle: Bundle | None, files: Sequence[Path]) -> set[str]:
        """What a run needs: `files/DIGEST`, `bundles/DIGEST`."""
        names = {posixpath.join("files", path.name) for path in files}
        return names if bundle is None else names | {posixpath.join("bundles", _bundle_digest(bundle))}

    async def _evict(self, keep: set[str], limit_bytes: int) -> bool:
        """Deletes what was not used for longest until the rest is within the limit; whether anything was deleted."""
        listing = 'for each in bundles/* files/*; do [ -e "$each" ] && echo $(stat -c %Y "$each") $(du -sk "$each"); done; true'
        done = await self.shell(f"cd {shlex.quote(self.root)} && {listing}", "list its folder")
        entries = [
            (int(match[1]), int(match[2]) * _KIB, match[3])
            for line in done.stdout.decode(errors="replace").splitlines()
            if (match := _ENTRY.fullmatch(line.strip())) is not None
        ]
        total, gone = sum(size for _, size, _ in entries), list[str]()
        for _, size, name in sorted(entries):
            if total <= limit_bytes:
                break
            if name not in keep:
                gone.append(name)
                total -= size
        if gone:
            log.info("deleting from the phone %s: %s", self._serial, ", ".join(gone))
            await self.shell(f"cd {shlex.quote(self.root)} && rm -rf {' '.join(map(shlex.quote, gone))}", "delete its old files")
        return bool(gone)


def _bundle_digest(bundle: Bundle) -> str:
    """Names what is in a bundle: the digest of its manifest, which has those of all its files."""
    return digest.of_bytes((bundle.folder / MANIFEST_NAME).read_bytes())
