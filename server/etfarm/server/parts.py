"""The parts of a server, built from its configuration: storage, access, devices and jobs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from etfarm.server import preflight
from etfarm.server.access.audit import AuditLog, Entry
from etfarm.server.access.identities import Identities
from etfarm.server.access.projects import Projects
from etfarm.server.access.tokens import TOKENS_CHANGED, TokenTable
from etfarm.server.artifacts.blobs import ARTIFACTS
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.prewarm import PRELOAD as COMPILE_PRELOAD
from etfarm.server.compile.upload_screening import CHILDREN as INSPECTORS
from etfarm.server.compile.upload_screening import LIMITS as INSPECTORS_LIMITS
from etfarm.server.compile.upload_screening import PRELOAD as INSPECTORS_PRELOAD
from etfarm.server.compile.upload_screening import Screening, screen_before_loading
from etfarm.server.config import DATABASE, LOCAL, Config
from etfarm.server.devices.bundles import Bundles, check_in_child
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.reservations import Reservations
from etfarm.server.devices.runners import known_backends, require_runner
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.telemetry import TelemetryLog
from etfarm.server.devices.upgrades import Upgrades
from etfarm.server.devices.wheels import AgentWheel, version_in_child
from etfarm.server.jobs.cells.analysis import CellAnalysis
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.cells.requirements import Requirements
from etfarm.server.jobs.cells.results import Results
from etfarm.server.jobs.cells.stages import CellStages
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.health.probing import Probing
from etfarm.server.jobs.health.run import HealthRuns
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.revision import Revision
from etfarm.server.jobs.submission import Submission
from etfarm.server.jobs.takeups import Hands, Takeups
from etfarm.server.notices.notices import Notices
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.findings import Findings
from etfarm.server.retention.parts import RetentionParts
from etfarm.server.rpc.door.authentication import Authentication
from etfarm.server.sessions.leasing import Leasing
from etfarm.server.sessions.sessions import Sessions
from etfarm.server.state.databases import create_database
from etfarm.server.state.engine import Database
from etfarm.server.state.steady_clock import SteadyClock
from etfarm.server.workers.child_pool import URGENT, ChildPool
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.pool import Workers
from etfarm.server.workers.reader_threads import Readers
from etfarm.wire.errors import FarmError
from etfarm.wire.shielding import end_tasks

log = structlog.get_logger()

PRELOAD = (*COMPILE_PRELOAD, "etfarm.server.reports.analyze:prewarm")
"""Modules that the forkserver loads: everything that a compilation or analysis imports."""
LIGHT_PRELOAD = ("etfarm.server.compile.inspect.facts", "etfarm.server.reports.analyze", "etfarm.server.devices.bundle_check")
"""Modules for children that need no torch: those that describe a .pte, analyze a run whose model the server does not have, or
check a runner bundle."""


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def new_id() -> str:
    """Return a unique id of 16 hex characters."""
    return uuid.uuid4().hex[:16]


def start_inspectors(config: Config) -> Workers:
    """Return the started pool of children that look at uploads, which is local wherever models are compiled.

    It has its own children, so that no upload waits for a compilation, and the other way around.
    """
    options = preflight.jail_options(config)
    if options.first_user is not None:
        options = replace(options, first_user=options.first_user + config.workers + URGENT)
    inspectors = Workers(
        preload=INSPECTORS_PRELOAD,
        limits=replace(INSPECTORS_LIMITS, reserve_bytes=preflight.reserve_bytes(config)),
        folder=config.data / "work" / "inspectors",
        concurrency=INSPECTORS,
        prewarm=config.prewarm,
        options=options,
    )
    inspectors.start()
    return inspectors


def start_workers(config: Config, measurement_lock: MeasurementLock, tenure: Tenure | None = None) -> ChildPool:
    """Return the started pool of child processes. Call it before gRPC starts threads, since it forks."""
    if config.compile_pool != LOCAL:
        cluster = preflight.cluster_pool(config, config.data / "work" / "children", PRELOAD, measurement_lock.work, tenure=tenure)
        cluster.start()
        return cluster
    workers = Workers(
        preload=PRELOAD,
        light_preload=LIGHT_PRELOAD,
        limits=replace(preflight.limits(config), reserve_bytes=preflight.reserve_bytes(config)),
        folder=config.data / "work" / "children",
        concurrency=config.workers,
        prewarm=config.prewarm,
        gate=measurement_lock.work,
        options=preflight.jail_options(config),
    )
    workers.start()
    return workers


@dataclass(frozen=True)
class Children:
    """The pools of child processes, and the lock that keeps compilations quiet while this machine measures."""

    workers: ChildPool
    """Compilations and analyses."""
    inspectors: Workers
    """Screening and description of uploads."""
    measurement_lock: MeasurementLock

    @classmethod
    def start(cls, config: Config, tenure: Tenure | None = None) -> Children:
        """Start the pools. Call it before gRPC starts threads, since it forks; a pool on a cluster does not.

        Args:
            tenure: of the leader of a farm of several servers, for a pool on a cluster.
        """
        measurement_lock = MeasurementLock()
        return cls(start_workers(config, measurement_lock, tenure), start_inspectors(config), measurement_lock)

    async def stop(self) -> None:
        """End the children, and delete their folders."""
        await self.inspectors.stop()
        await self.workers.stop()


class Background:
    """The tasks that run for the lifetime of the server."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task. Its failure is logged at once."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_log_failure)
        self._tasks.append(task)

    async def close(self) -> None:
        """Cancel the tasks, and wait until they have ended."""
        await end_tasks(*self._tasks)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed", task=task.get_name(), error=str(error), exc_info=error)


@dataclass(frozen=True)
class Storage:
    """The database, the artifact store, and the threads that read them."""

    database: Database
    store: Store
    readers: Readers

    @classmethod
    def create(cls, config: Config, on_damaged: Callable[[FarmError], None]) -> Storage:
        """Create the parts without opening the database.

        Args:
            on_damaged: called with the error if the database turns out to be damaged.
        """
        database = create_database(config.data / DATABASE, config.database, config.database_wait_s)
        database.on_damaged = on_damaged
        bucket = None
        if config.blobs is not None:
            bucket = Bucket(config.blobs, patience_s=config.blobs_wait_s, presign=config.blobs_presign)
        return cls(database, Store(config.data / ARTIFACTS, database, config.store_limits, bucket=bucket), Readers())

    async def open(self) -> None:
        """Open the database, and then the store.

        Raises:
            EtfarmError: the database cannot be used.
        """
        await self.database.open()
        await self.store.open()

    def close(self) -> None:
        """Close the parts, the database last."""
        self.store.close()
        self.readers.close()
        self.database.close()


@dataclass(frozen=True)
class Access:
    """The parts that authorize callers and record their calls."""

    tokens: TokenTable
    authentication: Authentication
    audit: AuditLog
    projects: Projects

    @classmethod
    async def load(cls, config: Config, storage: Storage) -> Access:
        """Load tokens and projects."""
        tokens = TokenTable(storage.database, now)
        await tokens.load()
        authentication = Authentication(config.tokens, tokens, config.data / TOKENS_CHANGED, now)
        audit = AuditLog(storage.database, now, time.monotonic)
        storage.store.integrity.on_damaged = _record_damage(audit)
        projects = Projects(storage.database, now)
        await projects.load()
        storage.store.quotas.own_limit_bytes = projects.storage_limit_bytes
        return cls(tokens, authentication, audit, projects)


@dataclass(frozen=True)
class Fleet:
    """The devices, their agents and runners, and the attempts that run on them."""

    bundles: Bundles
    runs: Runs
    identities: Identities
    registry: Registry
    reservations: Reservations
    telemetry: TelemetryLog
    health: HealthBook
    upgrades: Upgrades
    agent_wheel: AgentWheel | None
    """The wheel to which agents are upgraded by default; None if none is configured."""
    wheel_version: Callable[[Path], Awaitable[str]]
    """Returns the version of an uploaded wheel; raises NotAWheel."""

    @classmethod
    async def load(cls, config: Config, storage: Storage, workers: ChildPool, inspectors: ChildPool) -> Fleet:
        """Load runners and devices; all devices are offline until their agents connect.

        Args:
            workers: its children check bundles.
            inspectors: its children check wheels, which no compilation may keep waiting.
        """
        check = partial(check_in_child, workers)
        bundles = Bundles(storage.store, storage.database, config.data / "work", storage.readers, check=check)
        await bundles.load()
        runs = Runs(config.patience_s)
        identities = Identities(storage.database, lambda agent_id: registry.is_agent_known(agent_id), now)
        await identities.load()
        steady = SteadyClock()
        reservations = Reservations(
            storage.database, lambda: datetime.fromtimestamp(steady(), UTC), new_id, config.max_reservation_s
        )
        health = HealthBook(storage.database, now, config.health)
        await health.load()
        registry = Registry(storage.database, bundles, runs, now, identities.principal_of, reservations.of_device, health.apply)
        await reservations.load()
        await registry.load()
        reservations.on_change(lambda device_ids: registry.changed(*device_ids))
        telemetry = TelemetryLog(storage.database, now)
        registry.on_telemetry(telemetry.record)
        upgrades = Upgrades(registry, runs, new_id)
        await upgrades.release()
        agent_wheel = await asyncio.to_thread(AgentWheel.read, config.agent_wheel) if config.agent_wheel else None

        wheel_version = partial(version_in_child, inspectors)
        fleet = cls(bundles, runs, identities, registry, reservations, telemetry, health, upgrades, agent_wheel, wheel_version)
        storage.store.quotas.has_attempt = lambda principal: any(fleet.is_of(principal, device_id) for device_id in runs.busy())
        return fleet

    def is_of(self, principal: str, device_id: str) -> bool:
        """Return whether a principal's agent serves a device, or announced it last.

        An agent may lose its connection and go on, and fetches before it has connected to the next server.
        """
        # The identity of an admin's agent is not bound.
        bound = self.identities.principal_of(self.registry.agent_of(device_id))
        return self.registry.serves_principal(principal, device_id) or (bound != "" and bound == principal)

    async def is_needed(self, principal: str, digest: str) -> bool:
        """Return whether an upgrade, an attempt or a session on a device of the principal's agents needs the artifact.

        Raises:
            ATTEMPT_NOT_RESUMED: that is not known yet.
        """
        if self.upgrades.offers(principal, digest):
            return True
        return await self.runs.is_permitted(digest, lambda device_id: self.is_of(principal, device_id))


@dataclass(frozen=True)
class Jobs:
    """The parts that lead jobs and sessions from submission to report."""

    announcer: Announcer
    journal: Journal
    joblog: JobLog
    compiler: Compiler
    submission: Submission
    conductor: Conductor
    placement: Placement
    revision: Revision
    sessions: Sessions
    keeping: RetentionParts
    probing: Probing
    hands: Hands

    @classmethod
    def create(
        cls,
        config: Config,
        storage: Storage,
        fleet: Fleet,
        workers: ChildPool,
        measurement_lock: MeasurementLock,
        screening: Screening,
        notices: Notices,
    ) -> Jobs:
        """Create the parts; nothing runs until the conductor resumes jobs."""
        database, store, readers, registry, runs = storage.database, storage.store, storage.readers, fleet.registry, fleet.runs
        announcer = Announcer()
        journal = Journal(database, announcer, now, config.quotas, notices.outbox)
        joblog = JobLog(database, announcer, now)
        compiler = Compiler(
            workers,
            store,
            database,
            deadline_s=config.compile_deadline_s,
            stage_deadline_s=config.stage_deadline_s,
            threads=config.threads,
            operators=config.operators,
        )
        screen = partial(screen_before_loading, operators=config.operators)
        analyst = Analyst(Findings(workers, store, database, now, deadline_s=config.analysis_deadline_s, screen=screen), store)
        analysis = CellAnalysis(analyst, joblog, config.thresholds)
        placement = Placement(registry, runs, now)
        requirements = Requirements(placement.devices_for, fleet.bundles, store, readers)
        attempts = DeviceAttempts(registry, runs, placement, fleet.bundles, new_id, fleet.reservations)
        dispatch = Dispatch(attempts, requirements)
        results = Results(runs, dispatch, store, readers)
        hands = Hands(Takeups(database), config.data)
        stages = CellStages(
            journal,
            joblog,
            announcer,
            compiler,
            requirements,
            dispatch,
            results,
            analysis,
            measurement_lock,
            hands,
            now=now,
            clock=time.monotonic,
            new_id=new_id,
            on_device_fault=fleet.health.record_fault,
        )
        leasing = Leasing(attempts, requirements, fleet.health.record_fault)
        sessions = Sessions(
            registry,
            runs,
            compiler,
            store,
            requirements,
            leasing,
            measurement_lock,
            now=now,
            new_id=new_id,
            quotas=config.quotas,
            reservations=fleet.reservations,
        )
        health_runs = HealthRuns(attempts, runs, store, readers, measurement_lock, config.thresholds)
        return cls(
            announcer=announcer,
            journal=journal,
            joblog=joblog,
            compiler=compiler,
            submission=Submission(
                store,
                placement.devices,
                compiler.check,
                new_id,
                screening,
                readers,
                partial(require_runner, fleet.bundles),
                partial(known_backends, fleet.bundles),
                fleet.reservations,
                notices.require_urls,
            ),
            conductor=Conductor(journal, announcer, stages),
            placement=placement,
            revision=Revision(journal, joblog, compiler, dispatch, analysis, now),
            sessions=sessions,
            keeping=RetentionParts(
                config.data,
                store,
                database,
                (runs.artifacts, sessions.artifacts, fleet.upgrades.wheels),
                config.retention,
                measurement_lock,
                now,
            ),
            probing=Probing(registry, fleet.health, fleet.bundles, attempts, health_runs, measurement_lock, now),
            hands=hands,
        )


def _record_damage(audit: AuditLog) -> Callable[[str, int], None]:
    """Return a function that records a quarantined artifact. The store calls it in a verifying thread."""
    loop = asyncio.get_running_loop()

    def record(digest: str, size_bytes: int) -> None:
        entry = Entry("artifact.quarantine", "OK", subject=digest, detail=f"size_bytes={size_bytes}")
        loop.call_soon_threadsafe(audit.record, entry)

    return record
