"""The composition root: makes every part of a server, starts it in order, ends it in reverse."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from etfarm.server import preflight
from etfarm.server.access.audit import AuditLog, Entry
from etfarm.server.access.identities import Identities
from etfarm.server.access.projects import Projects
from etfarm.server.access.tokens import TOKENS_CHANGED, TokenTable
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.prewarm import PRELOAD as COMPILE_PRELOAD
from etfarm.server.compile.upload_screening import Screening, screen_before_loading
from etfarm.server.config import DATABASE, Config
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.jobs.cells.execution import Execution
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.records.history import History
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.revision import Revision
from etfarm.server.jobs.submission import Submission
from etfarm.server.jobs.takeups import CleanEnd, Takeups
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.findings import Findings
from etfarm.server.rpc.door.accepting import new_server
from etfarm.server.rpc.door.auth import Tokens
from etfarm.server.rpc.door.authentication import Authentication
from etfarm.server.rpc.door.connections import Connections, raise_file_limit, server_options
from etfarm.server.rpc.door.interceptor import Edge
from etfarm.server.rpc.services.agents import AgentService
from etfarm.server.rpc.services.artifacts import ArtifactService
from etfarm.server.rpc.services.audit import AuditService
from etfarm.server.rpc.services.compile import CompileService
from etfarm.server.rpc.services.devices import DeviceService
from etfarm.server.rpc.services.enrolment import Enrolment
from etfarm.server.rpc.services.farm import FarmService
from etfarm.server.rpc.services.jobs import JobService
from etfarm.server.rpc.services.projects import ProjectService
from etfarm.server.rpc.services.reports import ReportService
from etfarm.server.rpc.services.sessions import SessionService
from etfarm.server.rpc.services.tokens import TokenService
from etfarm.server.sessions.sessions import Sessions
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.pool import Workers
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    audit_pb2,
    audit_pb2_grpc,
    compile_pb2,
    compile_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    project_pb2,
    project_pb2_grpc,
    report_pb2,
    report_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    token_pb2,
    token_pb2_grpc,
)  # fmt: skip
from etfarm.wire.channel import SERVER_OPTIONS
from etfarm.wire.errors import FarmError, UserError

log = structlog.get_logger()

PRELOAD = (*COMPILE_PRELOAD, "etfarm.server.reports.analyze:prewarm")
"""What the forkserver loads before it serves: all that a compilation or an analysis would otherwise import."""

_GRACE_S = 1.0
"""How long open calls may take to end at a shutdown."""

SERVICES = tuple(
    service.full_name
    for module in (
        artifact_pb2,
        compile_pb2,
        job_pb2,
        device_pb2,
        session_pb2,
        agent_pb2,
        report_pb2,
        farm_pb2,
        token_pb2,
        project_pb2,
        audit_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The contract's services by full name."""


class CannotListen(UserError):
    """The address is taken, or not this machine's."""

    reason = "CANNOT_LISTEN"


def now() -> datetime:
    """The instant, in UTC."""
    return datetime.now(UTC)


def new_id() -> str:
    """An id that nobody has: 16 hex characters."""
    return uuid.uuid4().hex[:16]


@asynccontextmanager
async def running(config: Config, on_damaged: Callable[[FarmError], None] = lambda error: None) -> AsyncIterator[str]:
    """A server that runs; gives the address that it listens on.

    Args:
        on_damaged: called with the error with which the server should end, when its database turns out to be damaged.

    Raises:
        CannotListen: it cannot be listened on.
        EtfarmError: as the parts say.
    """
    if config.tokens is not None:
        Tokens.read(config.tokens)  # refuses an unusable file before anything is created
    files = raise_file_limit()
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    (config.data / "work").mkdir(exist_ok=True)
    # Before gRPC starts a thread: what it forks must have been single-threaded all along.
    quiet = MeasurementLock()
    jail = await preflight.require_jail(config) if config.is_jail_required else None
    workers = Workers(
        preload=PRELOAD, limits=preflight.limits(config), folder=config.data / "work" / "children", concurrency=config.workers,
        gate=quiet.work, options=preflight.jail_options(config),
    )  # fmt: skip
    workers.start()
    database = Database(config.data / DATABASE)
    database.on_damaged = on_damaged
    clean_end = CleanEnd(config.data)
    readers = Readers()
    background: list[asyncio.Task[None]] = []
    store: Store | None = None
    screening: Screening | None = None
    try:
        await database.open()
        store = Store(config.data / "artifacts", database, config.store_limits)
        background.append(asyncio.create_task(store.tend(), name="artifacts-expire"))
        tokens = TokenTable(database, now)
        await tokens.load()
        authentication = Authentication(config.tokens, tokens, config.data / TOKENS_CHANGED, now)
        audit = AuditLog(database, now, time.monotonic)
        store.integrity.on_damaged = _audit_damage(audit)
        projects = Projects(database, now)
        await projects.load()
        announcer = Announcer()
        journal = Journal(database, announcer, now, config.quotas)
        joblog = JobLog(database, announcer, now)
        bundles = Bundles(store, database, config.data / "work", readers)
        await bundles.load()
        runs = Runs(config.patience_s)
        identities = Identities(database, lambda agent_id: registry.is_agent_known(agent_id), now)
        await identities.load()
        registry = Registry(database, bundles, runs, now, identities.principal_of)
        await registry.load()
        compiler = Compiler(
            workers, store, database, deadline_s=config.compile_deadline_s, stage_deadline_s=config.stage_deadline_s,
            threads=config.threads, operators=config.operators,
        )  # fmt: skip
        screen = partial(screen_before_loading, operators=config.operators)
        analyst = Analyst(Findings(workers, database, now, deadline_s=config.analysis_deadline_s, screen=screen), store)
        placement = Placement(registry, runs)
        execution = Execution(registry, runs, placement, bundles, store, new_id, readers)
        sessions = Sessions(
            registry, runs, placement, bundles, compiler, store, execution, quiet, now=now, new_id=new_id, quotas=config.quotas
        )
        conductor = Conductor(
            journal, joblog, announcer, compiler, execution, analyst, quiet,
            thresholds=config.thresholds, now=now, clock=time.monotonic, new_id=new_id,
        )  # fmt: skip
        revision = Revision(journal, joblog, compiler, execution, analyst, thresholds=config.thresholds)
        screening = Screening(store.path, config.operators)
        submission = Submission(store, registry.devices, compiler.check, new_id, readers, screening)
        ready = asyncio.Event()
        own_version = version("etfarm")

        connections = Connections(lambda: authentication.asks_for_tokens, time.monotonic)
        edge = Edge(authentication, projects.resolve, audit=audit, connections=connections)
        options = dict(SERVER_OPTIONS) | dict(server_options(files))
        server = new_server([edge], list(options.items()))
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(
            ArtifactService(store, partial(_is_needed, runs, registry)), server
        )
        compile_pb2_grpc.add_CompileServiceServicer_to_server(CompileService(compiler), server)
        jobs = JobService(journal, joblog, announcer, submission, conductor, version=own_version, now=now, quotas=config.quotas)
        job_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
        device_pb2_grpc.add_DeviceServiceServicer_to_server(DeviceService(registry, projects), server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(sessions), server)
        enrolment = Enrolment(tokens, registry.is_agent_known)
        agents = AgentService(registry, identities, runs, sessions, enrolment, version=own_version, clock=time.monotonic)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(agents, server)
        reports = ReportService(journal, History(database, registry.devices), Tags(database, now), revision, version=own_version)
        report_pb2_grpc.add_ReportServiceServicer_to_server(reports, server)
        farm = FarmService(
            registry, bundles, version=own_version, workers_ready=ready.is_set, live=conductor.count_live, jail=lambda: jail
        )
        farm_pb2_grpc.add_FarmServiceServicer_to_server(farm, server)
        token_pb2_grpc.add_TokenServiceServicer_to_server(TokenService(tokens, authentication, audit, projects.load), server)
        project_pb2_grpc.add_ProjectServiceServicer_to_server(ProjectService(projects), server)
        audit_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(audit), server)
        healthy = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        reflection.enable_server_reflection([*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)

        address = _bind(server, config)

        async def warm() -> None:
            async with quiet.work():
                await workers.ready()
            ready.set()

        async def build() -> None:
            async with quiet.work():
                await bundles.build_own()

        async def look_at_jail() -> None:
            nonlocal jail
            jail = jail or await preflight.find_jail(config)
            for measure in jail.missing:
                log.warning("a measure of the compile processes' jail is missing", measure=measure.name, why=measure.detail)

        background.append(asyncio.create_task(authentication.watch(edge.calls.end_invalid), name="tokens"))
        background.append(asyncio.create_task(audit.write_on(), name="audit"))
        if not address.startswith("unix:"):
            background.append(asyncio.create_task(connections.watch(int(address.rpartition(":")[2])), name="connections"))
        background.append(asyncio.create_task(warm(), name="workers-ready"))
        background.append(asyncio.create_task(look_at_jail(), name="jail"))
        if config.build_bundle:
            background.append(asyncio.create_task(build(), name="bundle-build"))
        else:
            bundles.settled.set()
        # In this order: what has to work goes before what may measure, and agents find their runs waited for.
        was_clean = clean_end.begin()
        await conductor.resume(None if was_clean else Takeups(database))
        await server.start()
        for service in ("", *SERVICES):
            await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
        _write_address(config.address_file, address)
        try:
            yield address
        finally:
            await healthy.enter_graceful_shutdown()
            sessions.stop()
            await conductor.stop()
            await joblog.flush()
            await server.stop(_GRACE_S)
            await audit.close()
            await authentication.close()
            if config.address_file is not None:
                config.address_file.unlink(missing_ok=True)
    finally:
        for task in background:
            task.cancel()
        for outcome in await asyncio.gather(*background, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a background task failed", error=str(outcome))
        if screening is not None:
            screening.close()
        await workers.stop()
        if store is not None:
            store.close()
        readers.close()
        database.close()
        clean_end.end()


def _audit_damage(audit: AuditLog) -> Callable[[str, int], None]:
    """Return a function that records a quarantined artifact; the store calls it in a verifying thread."""
    loop = asyncio.get_running_loop()

    def record(digest: str, size_bytes: int) -> None:
        entry = Entry("artifact.quarantine", "OK", subject=digest, detail=f"size_bytes={size_bytes}")
        loop.call_soon_threadsafe(audit.record, entry)

    return record


async def _is_needed(runs: Runs, registry: Registry, principal: str, digest: str) -> bool:
    """Return whether an attempt or session on a device of the principal's agents needs the artifact."""
    return await runs.is_permitted(digest, lambda device_id: registry.serves_principal(principal, device_id))


def _bind(server: grpc.aio.Server, config: Config) -> str:
    text = config.listen.text
    try:
        if (identity := config.identity()) is not None:
            (chain, key), client_ca = identity, config.client_ca()
            credentials = grpc.ssl_server_credentials([(key, chain)], client_ca, require_client_auth=client_ca is not None)
            port = server.add_secure_port(text, credentials)
        else:
            if text.startswith("unix:") and (path := Path(text.removeprefix("unix:"))).is_socket():
                path.unlink()  # a former server's; any other file is nobody's to delete
            before = os.umask(0o077)  # a unix socket is never open to other users, not even until its mode could be changed
            try:
                port = server.add_insecure_port(text)
            finally:
                os.umask(before)
    except RuntimeError as error:
        raise CannotListen(f"Cannot listen on {text}: {error}.", "Choose another --listen address.", address=text) from None
    if text.startswith("unix:"):
        Path(text.removeprefix("unix:")).chmod(0o600)
        return text
    return f"{text.rpartition(':')[0]}:{port}"


def _write_address(path: Path | None, address: str) -> None:
    if path is None:
        return
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump({"address": address, "pid": os.getpid()}, file)
    fresh.replace(path)
