"""The command `etfarm serve`, the server daemon.

A server's process serves alone, or stands by until it leads a farm of several servers.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import structlog

from etfarm.server import preflight
from etfarm.server.app import Server, running
from etfarm.server.arguments import config_of, parser
from etfarm.server.artifacts.blobs import ARTIFACTS
from etfarm.server.config import LOCAL, Config
from etfarm.server.jobs.takeups import forget_uncounted
from etfarm.server.operation import logs, settings, stderr_lines, unit, web_page
from etfarm.server.operation.check import check
from etfarm.server.operation.death import Evidence
from etfarm.server.operation.service_manager import ServiceManager
from etfarm.server.operation.settings import Setting
from etfarm.server.parts import Children
from etfarm.server.rpc.door.listening import write_address
from etfarm.server.state.folder import locked, require_restored
from etfarm.server.state.revisions import known_revisions
from etfarm.server.workers.pacing import shorten_thread_switches
from etfarm.wire.channel import parse_address
from etfarm.wire.errors import FarmError
from etfarm.wire.heap import share_one_heap
from etfarm.wire.owner import at_end_of_stdin
from etfarm.wire.private import close_umask
from etfarm.wire.shielding import end_tasks
from etfarm.wire.systemd import without_options


def main(argv: list[str]) -> int:
    """Serve until SIGTERM, SIGINT or, with --exit-with-stdin, the end of stdin."""
    serve = parser()
    arguments, sources = settings.parse(serve, argv, os.environ)
    if arguments.check:
        logs.configure()  # to stderr: stdout has the answer
        return check(sources, partial(config_of, arguments), as_json=arguments.json)
    if arguments.print_unit:
        source = {each.name: each.source for each in sources}
        unit.refuse_secrets(sources)
        options, engines = vars(serve.parse_args(argv)) | {"data": arguments.data}, unit.engines_of(vars(arguments))
        is_chosen = source["data"] != settings.DEFAULT
        text = unit.unit_of_this(
            without_options(argv, serve), options, engines=engines, is_data_chosen=is_chosen, drain_s=arguments.drain_timeout,
            database=unit.database_options(sources, arguments.config),
        )  # fmt: skip
        print(text, end="")
        return 0
    config = config_of(arguments)
    config.check()
    with stderr_lines.as_json() if config.log_format == "json" else nullcontext(sys.stderr) as stream:
        logs.configure(config.log_format, stream)
        share_one_heap()
        shorten_thread_switches()
        close_umask()
        with locked(config.data):
            require_restored(config.data)
            former_address = asyncio.run(Process(config, sources, Evidence(config.data)).run())
    if former_address is not None:
        restart(former_address)
    return 0


if TYPE_CHECKING:
    from etfarm.server.cluster.leadership import Leadership
    from etfarm.server.cluster.member import Member

log = structlog.get_logger()

_GRACE_S: Final = 10.0
"""Time beyond the drain's limit for which the service manager should wait."""
_RESTART_S: Final = 5.0
"""Time that a server which no longer leads has to end its parts before its process starts anew."""


class Process:
    """The process of one server: what makes it stop, and what it reports to the one that started it.

    Args:
        settings: the options that `config` follows from, for the server's status.
        evidence: of the death of the data folder's former server.
    """

    def __init__(self, config: Config, settings: Sequence[Setting], evidence: Evidence) -> None:
        self._config = config
        self._settings = settings
        self._evidence = evidence
        self._suspects = evidence.find_suspects()
        self._page_key = "" if config.web is None else secrets.token_urlsafe(32)
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._damage: list[FarmError] = []
        self._manager = ServiceManager()
        self._reload: Callable[[], None] = lambda: None

    async def run(self) -> str | None:
        """Serve until a signal, and return None; or the address at which the process has to start anew, as it leads no longer."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._reload())
        if self._config.exit_with_stdin:
            at_end_of_stdin(self._end_now)
        watching = asyncio.create_task(self._evidence.watch(), name="evidence")
        try:
            if self._config.database is None:
                await self._serve_alone()
                return None
            return await self._serve_among_others()
        finally:
            watching.cancel()
            if self._damage:
                # Any other error during shutdown is a consequence of the damage.
                raise self._damage[0] from None

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _end_now(self) -> None:
        self._stop_now.set()
        self._stop.set()

    def _on_damaged(self, error: FarmError) -> None:
        self._damage.append(error)
        self._end_now()

    async def _serve_alone(self) -> None:
        async with (
            running(self._config, self._on_damaged, self._settings, page_key=self._page_key, suspects=self._suspects) as server,
            AsyncExitStack() as stack,
        ):
            self._reload = server.reload
            if server.metrics_address:
                print(f"etfarm serve: metrics on {server.metrics_address}", flush=True)
            self._report(server.address, stack)
            await self._serve_page(server.address, stack)
            await self._stop.wait()
            await self._drain(server)

    async def _serve_among_others(self) -> str | None:
        """Forward calls until this server leads, then lead; return its address if it is the leader no longer.

        It takes the lead only when nothing keeps it from leading: a leader that ends at once takes the farm from one that can.
        """
        # Imported only if needed: they need etfarm[scale].
        from etfarm.server.cluster.lead import Lead
        from etfarm.server.cluster.metrics import ClusterMetrics
        from etfarm.server.cluster.standby import standing_by

        config = self._config
        # A forkserver has to start before gRPC does. The nodes of a cluster are the leader's alone.
        children = Children.start(config) if config.compile_pool == LOCAL else None
        async with AsyncExitStack() as stack:
            if children is not None:
                stack.push_async_callback(children.stop)
            member = _member(config, self._suspects)
            metrics = ClusterMetrics(member)
            standby = await stack.enter_async_context(AsyncExitStack())
            address = await standby.enter_async_context(
                standing_by(config, member.leadership, metrics.forwarded, page_key=self._page_key)
            )
            config = replace(config, listen=parse_address(address))
            await stack.enter_async_context(member.joined(config.advertised_at(address)))
            if config.address_file is not None:
                write_address(config.address_file, address)
                stack.callback(config.address_file.unlink, missing_ok=True)
            if config.metrics is not None:
                page = metrics.page(config.metrics_hosts)
                config = replace(config, metrics=parse_address(await page.start(config.metrics)))
                standby.push_async_callback(page.close)
                print(f"etfarm serve: metrics on {config.metrics.text if config.metrics else ''}", flush=True)
            self._report(address, stack)
            following = asyncio.create_task(self._tell_leader(member.leadership), name="status")
            stack.callback(following.cancel)
            # It asks this server, which may have to take the lead before it answers.
            stack.callback(asyncio.create_task(self._serve_page(address, stack), name="web page").cancel)
            leader = member.leadership.leader
            print(f"etfarm serve: forwarding calls to {leader.address if leader else 'the server that will lead'}", flush=True)
            if not await self._is_first(preflight.require_ready(config)):
                return None
            member.apply()
            if not await self._is_first(member.elected()):
                return None
            lead = Lead(member, await member.elected(), standby.aclose, metrics)
            async with running(config, self._on_damaged, self._settings, children, lead, self._page_key) as server:
                self._reload = server.reload
                print("etfarm serve: leading the farm", flush=True)
                following.cancel()
                self._manager.notify(STATUS="leading the farm")
                if await self._is_first(member.lost.wait()):
                    asyncio.get_running_loop().call_later(_RESTART_S, restart, address)
                    await server.end_lead()
                elif not member.has_others():
                    await self._drain(server)
        return address if member.lost.is_set() else None

    async def _is_first(self, event: Coroutine[Any, Any, object]) -> bool:
        """Wait for an event, or for the signal to stop; return whether it was the event. Its error is raised."""
        task = asyncio.create_task(event, name="event of the farm")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        is_first = task.done()
        await end_tasks(task, stop)
        if is_first:
            task.result()
        return is_first

    def _report(self, address: str, stack: AsyncExitStack) -> None:
        """Say where the server listens, to people and to the service manager."""
        if self._config.insecure and not self._config.listen.is_local:
            print("etfarm serve: INSECURE: anybody who reaches this address can run programs on the farm's devices", flush=True)
        print(f"etfarm serve: listening on {address}", flush=True)
        # Loaded modules live as long as the process: a full garbage collection that visits them would delay every call.
        gc.freeze()
        stack.callback(asyncio.create_task(self._manager.keep_alive(), name="watchdog").cancel)
        self._manager.notify(READY=1, STATUS=f"listening on {address}")

    async def _tell_leader(self, leadership: Leadership) -> None:
        """Keep the service manager's status up to date while another server leads, until cancelled."""
        while True:
            changed, leader = leadership.changed(), leadership.leader
            self._manager.notify(STATUS=f"forwarding calls to {leader.address if leader else 'the server that will lead'}")
            await changed

    async def _serve_page(self, address: str, stack: AsyncExitStack) -> None:
        """Start the web page, if configured; end the server if that fails."""
        try:
            page = await stack.enter_async_context(web_page.running(self._config, address, self._page_key))
        except FarmError as error:
            self._on_damaged(error)
            return
        if page:
            print(f"etfarm serve: web page at {page}", flush=True)

    async def _drain(self, server: Server) -> None:
        """Let running work end, until the time limit or a second signal."""
        limit_s, stop_now, manager = self._config.drain_timeout_s, self._stop_now, self._manager
        usec = round((limit_s + _GRACE_S) * 1e6)
        manager.notify(STOPPING=1, STATUS="finishing running work", EXTEND_TIMEOUT_USEC=usec)
        if stop_now.is_set() or not limit_s:
            return
        draining = asyncio.create_task(server.drain(), name="drain")
        now = asyncio.create_task(stop_now.wait(), name="stop now")
        done, _ = await asyncio.wait({draining, now}, timeout=min(0.1, limit_s), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            text = f"finishing {server.in_progress()}, for up to {limit_s:g} s; a second signal stops at once"
            print(f"etfarm serve: {text}", flush=True)
            manager.notify(STATUS=text)
            await asyncio.wait({draining, now}, timeout=limit_s - 0.1, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            log.warning("stopping with work in progress; the next server resumes cells", work=server.in_progress())
        await end_tasks(draining, now)


def _member(config: Config, suspects: Mapping[str, int]) -> Member:
    """Return this server among the servers of its farm."""
    from etfarm.server.cluster.member import Member
    from etfarm.server.cluster.shared_blobs import identify_folder

    assert config.database is not None

    def certificate() -> str:
        identity = config.identity()
        return "" if identity is None else identity[0].decode()

    blobs = identify_folder(config.data / ARTIFACTS) if config.blobs is None else config.blobs.url
    return Member(
        config.database, version("etfarm"), certificate, blobs, known_revisions(), suspects,
        on_counted=partial(forget_uncounted, config.data), asks_for_tokens=config.tokens is not None,
    )  # fmt: skip


def restart(address: str) -> None:
    """Replace this process by a new one with the same command, which stands by at the same address."""
    stderr_lines.restore()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--listen", address])
