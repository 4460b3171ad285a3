"""The farm's runner bundles by architecture, and the prebuilt or built bundle for the server's own."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, select

from etfarm.server.access.scope import FARM_HOLDER
from etfarm.server.artifacts.s3.waiting import retry_while_away
from etfarm.server.artifacts.store import Store, artifact_missing
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.errors import BadAnswer
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.wire.bundles import MAX_MANIFEST_BYTES, BundleManifest, NotABundle, check_archive
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import prebuilt_runner

log = structlog.get_logger()

CHECK_TASK: Final = "etfarm.server.devices.bundle_check:check"
_CHECK_S: Final = 120.0
"""Deadline of the child that checks an uploaded bundle, which unpacks to 2 GiB at most."""

Check = Callable[[Path], Awaitable[agent_pb2.RunnerBundle]]
"""A function that returns what the archive in a file is, without its `artifact`; raises NotABundle."""


class Bundles:
    """The farm's runner bundles.

    For each architecture, the newest bundle is used whose ExecuTorch version is the one that the server lowers with, since a
    program and its runtime must match; without such a bundle, the newest of any other version.

    Args:
        own_arch: the server's architecture; this machine's by default.
        run_build: runs `etfarm bundle build` with a folder for temporary files and arguments, and returns its output.
        prebuilt: the archive of a prebuilt bundle; that of the distribution `etfarm-runner` by default.
        check: checks uploaded archives; by default this process does, which suffices for those that it built.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        folder: Path,
        readers: Readers | None = None,
        *,
        own_arch: str | None = None,
        run_build: Callable[..., Awaitable[str]] | None = None,
        prebuilt: Path | None = None,
        check: Check | None = None,
    ) -> None:
        self._readers = readers or Readers()
        self._check = check or self._read
        self._run_build = run_build or run_bundle_build
        self._prebuilt = prebuilt or prebuilt_runner()
        self._store = store
        self._database = database
        self._builds = folder / "bundle"
        """Folder for builds. Only one server uses it, so files that exist at startup are left over from a killed server."""
        self._by_arch: dict[str, agent_pb2.RunnerBundle] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when devices may have another runner than before."""
        self._own_error: EtfarmError | None = None
        self._own_arch = own_arch or platform.machine()
        self._version = version("executorch").partition("+")[0]
        self.settled = asyncio.Event()
        """Set once the build of the bundle for the server's own architecture has finished or failed."""

    @property
    def own_error(self) -> EtfarmError | None:
        """Error of the bundle build for the server's own architecture; None while the bundle exists or is being built."""
        return self._own_error

    @property
    def starting(self) -> str:
        """Description of the build in progress; empty if no build is running."""
        return "" if self.settled.is_set() else f"building the runner bundle for {self._own_arch}"

    async def load(self) -> None:
        """Load the stored bundles, and delete leftovers of a killed server's build.

        A bundle that is damaged in the database is not used until it is added again.
        """
        await asyncio.to_thread(shutil.rmtree, self._builds, ignore_errors=True)
        query = select(schema.bundles).order_by(schema.bundles.c.added_at)
        for row in await self._database.read(lambda connection: connection.execute(query).all()):
            bundle = unseal_or_none(agent_pb2.RunnerBundle, row.body, f"the bundle {row.digest}")
            if bundle is not None and await self._store.has(bundle.artifact.digest):
                self.use(bundle)

    def use(self, bundle: agent_pb2.RunnerBundle) -> None:
        """Use a bundle for its architecture, unless only the former one has the server's ExecuTorch version."""
        former = self._by_arch.get(bundle.arch)
        if former is not None and former.executorch_version == self._version != bundle.executorch_version:
            return
        self._by_arch.pop(bundle.arch, None)  # keeps the dict in insertion order, oldest first
        self._by_arch[bundle.arch] = bundle
        self.on_change()

    def list(self) -> Sequence[agent_pb2.RunnerBundle]:
        """Return the bundle in use for each architecture, newest first."""
        return list(reversed(self._by_arch.values()))

    def get(self, arch: str) -> agent_pb2.RunnerBundle | None:
        """Return the bundle that devices of an architecture use."""
        return self._by_arch.get(arch)

    def is_coming(self, arch: str) -> bool:
        """Return whether the first bundle for an architecture is still being built."""
        return arch == self._own_arch and arch not in self._by_arch and not self.settled.is_set()

    async def demand(self, arch: str) -> agent_pb2.RunnerBundle:
        """Return the bundle for an architecture, waiting while the server's own is being built.

        Raises:
            BUNDLE_MISSING: the farm has no such bundle.
            EtfarmError: building the server's own bundle failed.
        """
        if self.is_coming(arch):
            await self.settled.wait()
        if (bundle := self._by_arch.get(arch)) is not None:
            return bundle
        raise self.missing(arch)

    def missing(self, arch: str) -> EtfarmError:
        """Return the error of an architecture without a bundle: BUNDLE_MISSING, or why the server could not build its own."""
        if arch == self._own_arch and self._own_error is not None:
            return self._own_error
        return error_for(
            "BUNDLE_MISSING",
            f"The farm has no runner bundle for {arch}.",
            f"Build one with `etfarm bundle build --arch {arch} -o FILE` and offer it with `etfarm bundle add FILE`.",
            arch=arch,
        )

    async def add(self, digest: str) -> agent_pb2.RunnerBundle:
        """Offer a stored bundle to devices. Another bundle may take precedence; see `Bundles`.

        Raises:
            ARTIFACT_MISSING: the artifact is not stored.
            NotABundle: agents could not unpack it.
            WrongArch: its programs are for another architecture than its manifest names.
            EtfarmError: it could not be checked.
        """
        return await self._add(digest, self._check)

    async def _read(self, path: Path) -> agent_pb2.RunnerBundle:
        """Return what an archive of this server's own is."""
        return await self._readers.run(lambda: describe(check_archive(path)))

    async def _add(self, digest: str, check: Check) -> agent_pb2.RunnerBundle:
        if not await self._store.has(digest):
            raise artifact_missing(digest)
        await self._store.require_whole([digest])
        path = self._store.path(digest)
        bundle = await check(path)
        bundle.artifact.CopyFrom(common_pb2.Artifact(digest=digest, size_bytes=path.stat().st_size))
        row = {"digest": digest, "arch": bundle.arch, "body": seal(bundle), "added_at": datetime.now(UTC)}

        def write(connection: Connection) -> None:
            changed = {key: row[key] for key in ("body", "added_at")}
            connection.execute(insert(schema.bundles).values(row).on_conflict_do_update(index_elements=["digest"], set_=changed))

        await self._database.write(write)
        # Every device may read the bundle.
        await self._store.hold(FARM_HOLDER, [digest], "farm")
        self.use(bundle)
        return bundle

    async def build_own(self) -> None:
        """Build the bundle for the server's own architecture if it is missing or was built from other sources."""
        try:
            await retry_while_away(self._build_own)
        except EtfarmError as error:
            self._own_error = error
            log.error("no runner bundle", arch=self._own_arch, error=str(error))
        finally:
            self.settled.set()

    async def _build_own(self) -> None:
        known = self._by_arch.get(self._own_arch)
        self._builds.mkdir(exist_ok=True)
        source_digest = await self._run_build(self._builds, "--source-digest")
        if known is not None and self._difference(known, source_digest) is None:
            return
        if self._prebuilt is not None and await self._add_prebuilt(self._prebuilt, source_digest):
            return
        log.info("building the runner bundle", arch=self._own_arch)
        print(f"etfarm serve: building the runner bundle for {self._own_arch}, once", flush=True)
        with tempfile.TemporaryDirectory(dir=self._builds) as folder:
            path = Path(folder) / "bundle.tar.gz"
            await self._run_build(Path(folder), "-o", str(path))
            artifact = await self._store.adopt(path, "farm", holder=FARM_HOLDER)
        bundle = await self._add(artifact.digest, self._read)
        megabytes = bundle.artifact.size_bytes / 1e6
        print(f"etfarm serve: the runner bundle for {bundle.arch} is ready ({megabytes:.1f} MB)", flush=True)

    async def _add_prebuilt(self, path: Path, source_digest: str) -> bool:
        """Offer the prebuilt bundle; return whether it is what a build would yield."""
        try:
            difference = self._difference(await self._read(path), source_digest)
        except EtfarmError as error:
            difference = error.message
        if difference is not None:
            log.warning("the prebuilt runner bundle does not fit", path=str(path), difference=difference)
            print(f"etfarm serve: the bundle of etfarm-runner is not used: {difference}", flush=True)
            return False
        with tempfile.TemporaryDirectory(dir=self._builds) as folder:
            copy = Path(folder) / path.name
            await asyncio.to_thread(shutil.copyfile, path, copy)
            artifact = await self._store.adopt(copy, "farm", holder=FARM_HOLDER)
        await self._add(artifact.digest, self._read)
        log.info("using the prebuilt runner bundle", arch=self._own_arch, digest=artifact.digest)
        return True

    def _difference(self, bundle: agent_pb2.RunnerBundle, source_digest: str) -> str | None:
        return find_difference(bundle, self._own_arch, self._version, source_digest)


def find_difference(bundle: agent_pb2.RunnerBundle, arch: str, executorch_version: str, source_digest: str) -> str | None:
    """Return how a bundle differs from the one that a build would yield; None if it does not."""
    expected = {"arch": arch, "executorch_version": executorch_version, "source_digest": source_digest}
    for name, value in expected.items():
        if (actual := getattr(bundle, name)) != value:
            return f"{name} must be {value}, got {actual}."
    return None


async def run_bundle_build(scratch: Path, *arguments: str) -> str:
    """Run `etfarm bundle build` in a child process that ends when this process does; return its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "etfarm.wire.command", "bundle", "build", "--exit-with-stdin", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(scratch)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        # The child process ends when its stdin is closed, which stays open as long as this process lives.
        out, err, _ = await asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
    except asyncio.CancelledError:
        # Kill the process group, which includes the compilers.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode != 0:
        lines = err.decode(errors="replace").strip().splitlines()
        message = (lines[-1] if lines else f"it ended with {process.returncode}").removeprefix("etfarm: ")
        raise error_for("BUNDLE_BUILD_FAILED", message)
    return out.decode().strip()


async def check_in_child(workers: ChildPool, path: Path) -> agent_pb2.RunnerBundle:
    """Return what an uploaded archive is; a jailed child unpacks it.

    Raises:
        NotABundle: agents would refuse it, or the child cannot unpack it within its limits.
        EtfarmError: as `ChildPool.run`.
    """
    async with await workers.run(CHECK_TASK, path, deadline_s=_CHECK_S, light=True) as finished:
        answer = finished.result
    try:
        return describe(BundleManifest.parse(answer[: MAX_MANIFEST_BYTES + 1]))
    except NotABundle as error:
        raise BadAnswer(f"The check of a bundle answered with none: {error.metadata['why']}.") from None


def describe(manifest: BundleManifest) -> agent_pb2.RunnerBundle:
    """Return the bundle that a manifest describes; `artifact` is not set."""
    return agent_pb2.RunnerBundle(
        arch=manifest.arch, executorch_version=manifest.executorch, source_digest=manifest.source_digest,
        backends=manifest.backends, operators=manifest.operators,
    )  # fmt: skip
