"""The composition root of the server: builds its parts, starts them in order and stops them in reverse."""

from __future__ import annotations

import asyncio
import time
from asyncio import Event
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from etfarm.server import preflight
from etfarm.server.compile.upload_screening import Screening
from etfarm.server.config import LOCAL, Config
from etfarm.server.devices.health.power import PowerCycles
from etfarm.server.devices.retirement import Retirement
from etfarm.server.devices.watch import DeviceWatch
from etfarm.server.jobs.cells.subjects import restore_use
from etfarm.server.jobs.records.history import History
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.verification import find_damaged
from etfarm.server.jobs.waiting_list import WaitingList
from etfarm.server.notices.notices import Notices
from etfarm.server.operation.intake import Intake
from etfarm.server.operation.monitor import Monitor
from etfarm.server.operation.settings import Setting
from etfarm.server.parts import Access, Background, Children, Fleet, Jobs, Storage, now
from etfarm.server.rpc.contract import Servicers, set_serving
from etfarm.server.rpc.door.certificates import Certificates
from etfarm.server.rpc.door.connections import MAX_METADATA_BYTES, Connections, raise_file_limit
from etfarm.server.rpc.door.forwarded import FORWARDED_BYTES, Forwarded
from etfarm.server.rpc.door.interceptor import AuthErrorInterceptor
from etfarm.server.rpc.door.listening import bind, end_calls, guarded_server, port_of, write_address
from etfarm.server.rpc.door.observing import ObservingInterceptor
from etfarm.server.rpc.door.proving import Prover
from etfarm.server.rpc.services.agents import AgentService
from etfarm.server.rpc.services.artifacts import ArtifactService
from etfarm.server.rpc.services.audit import AuditService
from etfarm.server.rpc.services.compile import CompileService
from etfarm.server.rpc.services.devices import DeviceService
from etfarm.server.rpc.services.farm import FarmService
from etfarm.server.rpc.services.jobs import JobService
from etfarm.server.rpc.services.projects import ProjectService
from etfarm.server.rpc.services.reports import ReportService
from etfarm.server.rpc.services.sessions import SessionService
from etfarm.server.rpc.services.tokens import TokenService
from etfarm.server.rpc.services.webhooks import WebhookService
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import farm_pb2
from etfarm.wire.errors import FarmError, error_for
from etfarm.wire.heap import keep_trimmed

if TYPE_CHECKING:
    from etfarm.server.cluster.lead import Lead

log = structlog.get_logger()

_GRACE_S = 1.0
"""Time that open calls have to finish at shutdown."""


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    address: str
    """The address that it listens on."""
    metrics_address: str
    """The address of its metrics; empty without."""
    reload: Callable[[], None]
    """Reads the TLS files again."""
    drain: Callable[[], Coroutine[None, None, None]]
    """Accepts no new work, and returns once nothing runs any more."""
    in_progress: Callable[[], str]
    """Returns what it has in progress, such as "2 cells, 1 call of a session"."""
    end_lead: Callable[[], Coroutine[None, None, None]]
    """Ends all calls as UNAVAILABLE, accepts no more, and writes nothing more."""


@asynccontextmanager
async def running(
    config: Config,
    on_damaged: Callable[[FarmError], None] = lambda error: None,
    settings: Sequence[Setting] = (),
    children: Children | None = None,
    lead: Lead | None = None,
    page_key: str = "",
    suspects: Mapping[str, int] | None = None,
) -> AsyncIterator[Server]:
    """Run a server until the end of the block.

    Args:
        on_damaged: called if the database turns out to be damaged, with the error that the server should exit with.
        settings: the options that `config` follows from, for the server's status.
        children: the child processes, if they were started before gRPC; their owner stops them.
        lead: how the server leads a farm of several servers; None for a server that is alone.
        page_key: the secret of the process's web page; empty without one.
        suspects: the jobs that the death of the data folder's former server counts for, as of `takeups.take_left_in_hand`.

    Raises:
        CANNOT_LISTEN: the address cannot be used.
        EtfarmError: a part cannot start.
    """
    # A server that leads was ready before: what is away now, such as an S3 server, must not end one leader after another.
    jail = await preflight.require_ready(config) if lead is None else None
    raise_file_limit()
    (config.data / "work").mkdir(exist_ok=True)
    storage = Storage.create(config, on_damaged)
    started = children or Children.start(config, None if lead is None else lead.tenure)
    workers, measurement_lock = started.workers, started.measurement_lock
    screening, background = Screening(started.inspectors, storage.store.path, config.operators), Background()
    async with AsyncExitStack() as closing:  # calls these in reverse order
        closing.callback(storage.close)
        if children is None:
            closing.push_async_callback(started.stop)
        closing.push_async_callback(background.close)

        if lead is not None:
            storage.database.guard = lead.fence
        await storage.open()
        background.start(storage.store.tend(), "artifacts-expire")
        background.start(storage.store.blobs.tend(), "artifact-copies")
        access = await Access.load(config, storage)
        fleet = await Fleet.load(config, storage, workers, started.inspectors)
        notices = Notices(storage.database, config.notices, now, version("etfarm"))
        await notices.load()
        jobs = Jobs.create(config, storage, fleet, workers, measurement_lock, screening, notices)
        host = _Host(config, fleet, workers, measurement_lock, jail)
        intake, certificates = Intake(storage.store.room), Certificates(config)
        monitor = Monitor(config, storage, fleet, jobs, workers, intake, version("etfarm"))
        closing.push_async_callback(monitor.close)
        if lead is not None and monitor.metrics is not None:
            monitor.metrics.registry.register(lead.metrics)

        forwarded = Forwarded("" if lead is None else lead.secret, page_key)
        connections = Connections(lambda: access.authentication.asks_for_tokens, time.monotonic)
        interceptor = AuthErrorInterceptor(
            access.authentication, access.projects.resolve, audit=access.audit, connections=connections, forwarded=forwarded,
            prover=Prover(access.tokens, lambda: certificates.sha256),
        )  # fmt: skip
        # What fits a standby has to fit here, too.
        metadata_bytes = MAX_METADATA_BYTES + (0 if lead is None else FORWARDED_BYTES)
        observing = ObservingInterceptor(monitor.metrics, forwarded=forwarded)
        server = guarded_server(
            [observing, interceptor], connections, interceptor.has_token, interceptor.is_urgent, metadata_bytes
        )
        servicers = _servicers(
            config, storage, access, fleet, jobs, screening, host, notices, intake, certificates, monitor, settings, lead
        )
        checks = servicers.add_to(server)
        if lead is not None:
            await lead.take_address()
        credentials = certificates.credentials()
        address = bind(server, config, credentials)
        await monitor.start(background)

        background.start(fleet.reservations.tend(), "reservations")
        background.start(fleet.telemetry.tend(), "telemetry")
        background.start(access.authentication.watch(interceptor.calls.look), "tokens")
        background.start(access.audit.write_on(), "audit")
        background.start(notices.sender.run(), "notices")
        background.start(notices.watch_quarantines(fleet.health.on_quarantined, fleet.registry.known), "quarantines")
        background.start(notices.watch_offline(jobs.placement.devices), "offline-devices")
        background.start(certificates.watch(), "certificates")
        background.start(keep_trimmed(), "heap")
        background.start(jobs.probing.run(), "health-runs")
        background.start(PowerCycles(fleet.registry, fleet.health, config.power, now).run(), "power-cycles")
        if (port := port_of(address)) is not None:
            closing.callback(connections.close)
            connections.start(port, is_encrypted=credentials is not None)
        host.start(background)
        background.start(jobs.keeping.retention.tend(), "retention")
        if config.blobs is None:  # the deletion of an object frees no space on this machine
            background.start(jobs.keeping.relief.tend(), "disk-relief")

        # Order matters: jobs that run on devices must be awaited before their agents can connect.
        await restore_use(jobs.placement, storage.database, now())
        await jobs.hands.begin(suspects or {})
        await jobs.conductor.resume()
        background.start(jobs.hands.forgive(), "suspects")
        await server.start()
        await set_serving(checks)
        monitor.is_started = True
        if config.address_file is not None:
            write_address(config.address_file, address)

        async def drain() -> None:
            intake.is_stopping = True
            await checks.enter_graceful_shutdown()
            await jobs.probing.drain()
            # Sessions may be open for hours; calls that begin from now on are not waited for.
            calls = jobs.sessions.exchanges()
            await asyncio.gather(jobs.conductor.drain(), *([asyncio.wait(calls)] if calls else []))

        def in_progress() -> str:
            cells, calls = len(list(jobs.conductor.runs())), len(jobs.sessions.exchanges())
            counts = [(cells, "cell", "cells"), (calls, "call of a session", "calls of sessions")]
            return (
                ", ".join(f"{count} {singular if count == 1 else plural}" for count, singular, plural in counts if count)
                or "nothing"
            )

        stops = error_for("SERVER_STOPPING", "The server stops.", "Try again once it has started again; jobs are kept.")
        ended = stops if lead is None else lead.ended()
        end = partial(end_calls, server, interceptor.calls, ended, _GRACE_S)

        async def end_lead() -> None:
            if lead is not None:
                lead.fence.close()  # what fails because it no longer waits for the database is not written as a failure
            storage.database.stop_waiting()
            await end()

        try:
            yield Server(address, monitor.address, certificates.reload, drain, in_progress, end_lead)
        finally:
            intake.is_stopping = True
            storage.database.stop_waiting()
            await checks.enter_graceful_shutdown()
            await jobs.probing.drain()
            await jobs.sessions.stop(_GRACE_S)
            await jobs.conductor.stop()
            await jobs.joblog.flush()
            await end()
            await access.audit.close()
            await access.authentication.close()
            if config.address_file is not None:
                config.address_file.unlink(missing_ok=True)


def _servicers(
    config: Config,
    storage: Storage,
    access: Access,
    fleet: Fleet,
    jobs: Jobs,
    screening: Screening,
    host: _Host,
    notices: Notices,
    intake: Intake,
    certificates: Certificates,
    monitor: Monitor,
    settings: Sequence[Setting],
    lead: Lead | None,
) -> Servicers:
    """Return the servicers of the contract, connected to the parts."""
    own_version = version("etfarm")
    retirement = Retirement(fleet.registry, fleet.runs, fleet.identities, access.tokens)
    history, tags = History(storage.database, fleet.registry.devices), Tags(storage.database, now)
    return Servicers(
        artifacts=ArtifactService(
            storage.store, fleet.is_needed, jobs.keeping.collection, partial(find_damaged, storage.database)
        ),
        compile=CompileService(jobs.compiler, screening, storage.store),
        jobs=JobService(
            jobs.journal,
            jobs.joblog,
            jobs.announcer,
            jobs.submission,
            jobs.conductor,
            version=own_version,
            now=now,
            deletion=jobs.keeping.deletion,
            quotas=config.quotas,
            require_open=intake.require_open,
            queue=WaitingList(jobs.placement, time.monotonic),
        ),
        devices=DeviceService(
            fleet.registry,
            access.projects,
            fleet.reservations,
            fleet.telemetry,
            DeviceWatch(fleet.registry, fleet.runs),
            config.quotas,
            fleet.health,
            jobs.probing,
            retirement,
        ),
        sessions=SessionService(jobs.sessions, intake.require_running),
        agents=AgentService(
            fleet.registry,
            fleet.identities,
            fleet.runs,
            jobs.sessions,
            access.tokens,
            fleet.upgrades,
            retirement,
            storage.store,
            fleet.agent_wheel,
            fleet.wheel_version,
            version=own_version,
            clock=time.monotonic,
        ),
        reports=ReportService(jobs.journal, history, tags, jobs.revision, version=own_version),
        farm=FarmService(
            fleet.registry,
            fleet.bundles,
            version=own_version,
            workers_ready=host.ready.is_set,
            live=jobs.conductor.count_live,
            jail=lambda: host.jail,
            retention=jobs.keeping.retention,
            disk=storage.store.room.measure,
            is_stopping=lambda: intake.is_stopping,
            certificate_expires_at=lambda: certificates.expires_at,
            agent_wheel=fleet.agent_wheel,
            settings=[farm_pb2.ServerSetting(name=each.name, value=each.public_text, source=each.source) for each in settings],
            measure=monitor.measure,
            servers=lambda: () if lead is None else lead.servers(),
        ),
        tokens=TokenService(access.tokens, access.authentication, access.audit, access.projects.load),
        projects=ProjectService(access.projects),
        audit=AuditService(access.audit),
        webhooks=WebhookService(notices, jobs.journal),
    )


class _Host:
    """Preparation of the server's machine: warm child processes, their jail, and the runner for its own architecture."""

    def __init__(
        self, config: Config, fleet: Fleet, workers: ChildPool, measurement_lock: MeasurementLock, jail: JailReport | None
    ) -> None:
        self._config = config
        self._bundles = fleet.bundles
        self._workers = workers
        self._measurement_lock = measurement_lock
        self.jail = jail
        """Report on the child processes' jail; None until it is known."""
        self.ready = Event()
        """Set once the child processes are warm; from the start if the first compilation warms them."""

    def start(self, background: Background) -> None:
        """Start warming the child processes, examining their jail, and building the runner if configured."""
        if self._config.prewarm:
            background.start(self._warm(), "workers-ready")
        else:
            self.ready.set()
        background.start(self._examine_jail(), "jail")
        if self._config.build_bundle:
            background.start(self._build_runner(), "bundle-build")
        else:
            self._bundles.settled.set()

    async def _warm(self) -> None:
        async with self._measurement_lock.work():
            await self._workers.ready()
        self.ready.set()

    async def _build_runner(self) -> None:
        async with self._measurement_lock.work():
            await self._bundles.build_own()

    async def _examine_jail(self) -> None:
        if self._config.compile_pool != LOCAL:
            await self._workers.ready()
            self.jail = await self._workers.describe_jail()
            return  # the log has the jail of each node
        self.jail = self.jail or await preflight.find_jail(self._config)
        for measure in self.jail.missing:
            log.warning("a measure of the compile processes' jail is missing", measure=measure.name, why=measure.detail)
