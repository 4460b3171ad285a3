"""Checks before the server starts, or applies for the lead of its farm: whether this host and its configuration permit that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts.blobs import ARTIFACTS, MARKS
from etfarm.server.artifacts.file_blobs import require_no_copies
from etfarm.server.artifacts.s3.blobs import require_no_files
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import BlobsAway
from etfarm.server.config import DATABASE, LOCAL, Config
from etfarm.server.rpc.door.token_file import read_tokens
from etfarm.server.state.sqlite import require_unmoved
from etfarm.server.workers.cluster.nodes import Node
from etfarm.server.workers.cluster.pool import ClusterPool, log_node
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.jail.measures import NETWORK, JailReport, jail_incomplete
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire.errors import EtfarmError
from etfarm.wire.private import make_private

log = structlog.get_logger()

SETTLE_S: Final = 60.0
"""Time that the nodes of a cluster may take to be checked."""


def jail_options(config: Config) -> JailOptions:
    """Return the settings of the child processes' jail."""
    secrets = [config.data, config.tokens, config.tls_key, config.tls_cert, config.tls_client_ca]
    secrets += [config.blobs.credentials_file] if config.blobs is not None else []
    return JailOptions(
        hidden=tuple(path.absolute() for path in secrets if path is not None),
        readable=tuple(path.absolute() for path in config.jail_readable),
        required=config.is_jail_required,
        first_user=config.jail_user,
    )


def limits(config: Config) -> Limits:
    """Return the resource limits of each child process."""
    # A compilation, and the runs that try its program, use several thread pools (OpenMP, ATen, XNNPACK).
    processes = max(512, 16 * config.threads)
    return Limits(memory_bytes=config.memory_bytes, cpu_s=config.cpu_s, threads=config.threads, processes=processes)


def reserve_bytes(config: Config) -> int:
    """Return the disk space that children on this machine leave free: they read results, which may use all but the farm's."""
    return min(Limits.reserve_bytes, config.keep_free_bytes)


def cluster_pool(
    config: Config,
    folder: Path,
    preload: Sequence[str],
    gate: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    report: Callable[[Node], None] = log_node,
    tenure: Tenure | None = None,
) -> ClusterPool:
    """Return the pool on the configuration's Ray cluster."""
    return ClusterPool(
        address=config.compile_pool, preload=preload, limits=limits(config), folder=folder, gate=gate,
        required=config.is_jail_required, python=config.compile_python, report=report, tenure=tenure,
    )  # fmt: skip


async def find_nodes(config: Config, within_s: float = SETTLE_S) -> tuple[Node, ...]:
    """Return the nodes of the configuration's Ray cluster with their states, without loading torch there.

    Raises:
        WorkersDown: the cluster cannot be reached, or does not answer within the time.
    """
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="etfarm-nodes-")
    pool = cluster_pool(config, Path(folder), (), report=lambda node: None)
    pool.start()
    try:
        return await pool.settled(within_s)
    finally:
        await pool.stop()


async def find_jail(config: Config) -> JailReport:
    """Return the measures that isolate a real child process on this host. Takes less than a second without loading torch."""
    options = jail_options(config)
    folder = await asyncio.to_thread(_new_folder, config.data / "work")
    workers = Workers(
        preload=(), limits=limits(config), folder=Path(folder), concurrency=1,
        options=JailOptions(options.hidden, options.readable, required=False, first_user=options.first_user),
    )  # fmt: skip
    workers.start()
    try:
        return await workers.describe_jail()
    except EtfarmError as error:
        if error.reason != "NETWORK_NOT_REMOVED":  # the error comes from the child, so its class shows only its fault
            raise
        return JailReport.of_nothing(NETWORK, error.message)
    finally:
        await workers.stop()


def _new_folder(work: Path) -> str:
    """Return a new folder within that of the server's work, where one that is killed may leave it, or in the system's."""
    try:
        return tempfile.mkdtemp(prefix="etfarm-jail-", dir=work)
    except OSError:  # no server has been there, or the disk is full
        return tempfile.mkdtemp(prefix="etfarm-jail-")


async def require_jail(config: Config) -> JailReport:
    """Return `find_jail`'s report if it meets the configuration.

    Raises:
        JAIL_INCOMPLETE: a measure is missing and the configuration requires all of them.
    """
    report = await find_jail(config)
    if config.is_jail_required and report.missing:
        raise jail_incomplete(report.missing)
    return report


async def require_ready(config: Config) -> JailReport | None:
    """Check what a server cannot do without; return the jail of its child processes, if one has run.

    A server that may come to lead others has run one, on its own machine. The S3 server of the artifacts may be away: what needs
    bytes waits for it.

    Raises:
        BlobsUnusable: the artifacts are elsewhere, the S3 server refuses requests, or the bucket's folder is another farm's.
        FARM_MOVED: the farm was moved to another database.
        DATABASE_LOST: the database is empty, and there are artifacts of a farm.
        EtfarmError: another part of the configuration cannot be used.
    """
    if config.tokens is not None:
        read_tokens(config.tokens)
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(config.data / ARTIFACTS, MARKS)
    if config.database is None:
        require_unmoved(config.data / DATABASE)  # to say so first: the artifacts are elsewhere, too
    jail, _ = await asyncio.gather(_find_required_jail(config), _require_blobs(config))
    await require_database(config)
    return jail


async def require_database(config: Config) -> None:
    """Check as `Config.require_database`; a process that is told to end meanwhile does not wait for the database."""
    looked = concurrent.futures.Future[None]()

    def look() -> None:
        looked.set_running_or_notify_cancel()
        try:
            config.require_database()
        except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
            looked.set_exception(error)
        else:
            looked.set_result(None)

    # The event loop's own threads would be waited for.
    threading.Thread(target=look, name="database", daemon=True).start()
    await asyncio.wrap_future(looked)


async def _find_required_jail(config: Config) -> JailReport | None:
    # With a cluster, each node's jail is required.
    is_needed = config.compile_pool == LOCAL and (config.is_jail_required or config.database is not None)
    return await require_jail(config) if is_needed else None


def require_one_place(config: Config) -> None:
    """Check that the data folder has no artifacts that are elsewhere than the configuration says.

    Raises:
        BlobsUnusable: it has files although a bucket is named, or copies although none is.
    """
    folder = config.data / ARTIFACTS
    if config.blobs is None:
        require_no_copies(folder)
    else:
        require_no_files(folder, config.blobs)


async def _require_blobs(config: Config) -> None:
    require_one_place(config)
    if config.blobs is None:
        return
    try:
        await Bucket(config.blobs, patience_s=config.blobs_wait_s).check()
    except BlobsAway as error:
        log.warning("starting without the artifacts' S3 server", error=error.message, remedy=error.remedy)
