"""The farm of a random schedule: a server with TLS and tokens, its agents, two users, and everything that they submitted."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from etfarm.client import AsyncFarm
from etfarm.v1 import job_pb2
from etfarm.wire import recipes
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from tests.fault.engines import Engines
from tests.support import models
from tests.support.credentials import ADMIN, USERS, Credentials
from tests.support.farm import Daemon, FarmProcess, descendants
from tests.support.farm_calls import LIVE, PAUSE_S, FarmCalls, farm_calls, is_away
from tests.support.programs import program
from tests.support.proxy import Link, link_to
from tests.support.receivers import Received, Receiver, receiver
from tests.support.simulated_agent import Act, SimulatedAgent

SIMULATED: Final = 3
"""Number of simulated agents, with two devices each."""
REAL: Final = "real"
PATIENCE_S: Final = 4.0
"""How long the server waits for an agent that is away."""
ODDS: Final = {act: 16 if act is Act.ANSWER else 1 for act in Act}
"""How often simulated agents do what."""


@dataclass
class Submitted:
    """A job that was asked for, and what was seen of it."""

    request_id: str
    what: str
    user: FarmCalls
    """The calls of whom it was submitted by."""
    job: job_pb2.Job | None = None
    refusal: str = ""
    events: list[job_pb2.JobEvent] = field(default_factory=list)
    is_over: bool = False


class World:
    """A farm with simulated agents and a real one behind a link, and everything that was submitted to it.

    Args:
        engines: what a large farm runs on, which also has a second server.
    """

    def __init__(self, folder: Path, seed: int, *, compiles: bool, engines: Engines | None = None) -> None:
        self.draws = random.Random(seed)
        """Draws of the current action."""
        self._acts = random.Random(seed)
        self.compiles = compiles
        self.engines = engines
        serve = ["--patience", str(PATIENCE_S), "--webhook-allow", "127.0.0.1", *(engines.arguments if engines else ())]
        environment = engines.environment if engines else {}
        self.farm = FarmProcess(folder, serve=serve, environment=environment, executes=True)
        self.second = FarmProcess(folder / "second", serve=serve, environment=environment, executes=True) if engines else None
        self.submitted: list[Submitted] = []
        self.processes: dict[int, float] = {}
        """Processes of the farm by id, with the times of their starts."""
        self.timeline: list[str] = []
        self.simulated: list[SimulatedAgent] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls: FarmCalls
        """The calls of the admin, who sees everything."""
        self.users: list[FarmCalls] = []
        """The calls of the users, each in a project of their own."""
        self.libraries: list[AsyncFarm] = []
        """The users' clients, which repeat what should be repeated by themselves."""
        self.client_errors: list[str] = []
        """The errors that users' clients have raised."""
        self.link: Link
        self.real: Daemon
        self.receiver: Receiver
        self.notices: list[Received] = []
        """The notices that have been taken from the receiver."""
        self.live_jobs: set[str] = set()
        """The jobs that are live, as the watch of all jobs has it."""
        self.candidates: dict[str, job_pb2.Candidate] = {}
        self._started_s = time.monotonic()

    async def open(self, closing: AsyncExitStack) -> None:
        """Start the farm with its agents."""
        closing.push_async_callback(asyncio.to_thread, self.farm.stop)
        await asyncio.to_thread(self.farm.restart)
        await asyncio.to_thread(self.farm.create_projects)
        await asyncio.to_thread(self.farm.offer_runner)
        if self.second is not None:
            self.second.folder.mkdir()
            closing.push_async_callback(asyncio.to_thread, self.second.stop)
            await asyncio.to_thread(self.second.restart)
        self.link = closing.enter_context(link_to(self.farm.address))
        self.receiver = closing.enter_context(receiver())
        credentials = Credentials.in_use
        assert credentials is not None
        self.calls = await closing.enter_async_context(farm_calls(self.addresses, credentials.access(self.addresses, ADMIN)))
        for name, project in USERS.items():
            access = credentials.access(self.addresses, name)
            self.users.append(await closing.enter_async_context(farm_calls(self.addresses, access)))
            library = AsyncFarm(self.addresses, token=access.token, tls_ca=access.tls_ca, project=project)
            self.libraries.append(await closing.enter_async_context(library))
        watching = asyncio.create_task(self._watch_all(), name="watch-all")
        closing.push_async_callback(_end, watching)
        server = self.addresses.replace(self.farm.address, self.link.address)
        self.real = await asyncio.to_thread(self.farm.add_agent, "--name", REAL, server=server)
        for number in range(SIMULATED):
            name = f"simulated-{number}"
            agent = SimulatedAgent(
                self.addresses, name, devices=[f"{name}-a", f"{name}-b"], act=self.draw_act, run_s=0.02 * number
            )
            self.simulated.append(await closing.enter_async_context(agent))
        for user in self.users:
            self.candidates["add"] = await user.program(program("add").bytes, "add")
        if self.compiles:
            path = await asyncio.to_thread(models.save, models.conv, self.farm.folder / "conv.pt2")
            candidate = job_pb2.Candidate(name="conv", recipe=recipes.parse("portable").json)
            candidate.model.name = "conv"
            for user in self.users:
                candidate.model.methods["forward"].exported_program.CopyFrom(await user.put(path.read_bytes()))
            self.candidates["conv"] = candidate
        self._started_s = time.monotonic()

    def draw_act(self, _: object) -> Act:
        """Draw what a simulated agent does about an attempt."""
        return self._acts.choices(list(ODDS), list(ODDS.values()))[0]

    def say(self, text: str) -> None:
        """Add a line to the timeline."""
        self.timeline.append(f"{time.monotonic() - self._started_s:7.2f} s  {text}")

    @property
    def live(self) -> list[Submitted]:
        """The jobs that are not known to have ended."""
        return [each for each in self.submitted if not each.is_over]

    @property
    def addresses(self) -> str:
        """The addresses of all servers, as agents and clients take them."""
        return ",".join(farm.address for farm in (self.farm, self.second) if farm is not None)

    @property
    def server(self) -> Daemon:
        """The process of the first server."""
        assert self.farm.server is not None
        return self.farm.server

    def note_processes(self) -> None:
        """Remember the farm's processes, to know later whether all of them have ended."""
        for root in (self.server, self.real, self.second.server if self.second else None):
            if root is None or root.process is None or root.process.poll() is not None:
                continue
            for pid in {root.pid, *descendants(root.pid)}:
                if (start := start_time(pid)) is not None:
                    self.processes[pid] = start

    def draw_id(self) -> str:
        """Draw an id for a request."""
        return uuid.UUID(int=self.draws.getrandbits(128)).hex

    def submit(self, what: str, user: FarmCalls, ask: Callable[[str], Awaitable[job_pb2.Job]], request_id: str = "") -> None:
        """Have a user's job submitted and watched in the background.

        Args:
            request_id: the id if it was drawn before.
        """
        entry = Submitted(request_id or self.draw_id(), what, user)
        self.submitted.append(entry)
        task = asyncio.create_task(self._follow(entry, ask), name=f"follow-{entry.request_id}")
        self.tasks.add(task)

    async def _follow(self, entry: Submitted, ask: Callable[[str], Awaitable[job_pb2.Job]]) -> None:
        try:
            entry.job = await ask(entry.request_id)
            await entry.user.watch(entry.job.id, entry.events)
        except grpc.aio.AioRpcError as error:
            if entry.job is not None:
                raise
            entry.refusal = from_rpc_error(error, server="").reason
        entry.is_over = True

    def bench(self, what: str, model: Path, **options: Any) -> None:
        """Have a user's benchmark submitted and watched by the library in the background."""
        number = self.draws.randrange(len(self.users))
        entry = Submitted("", what, self.users[number])
        self.submitted.append(entry)
        self.tasks.add(asyncio.create_task(self._bench(entry, self.libraries[number], model, options), name=f"bench-{what}"))

    async def _bench(self, entry: Submitted, library: AsyncFarm, model: Path, options: dict[str, Any]) -> None:
        try:
            job = await library.bench(model, **options)
            entry.job = await entry.user.call(entry.user.jobs.Get, job_pb2.GetJobRequest(job_id=job.id))
            async for _ in job.watch():
                pass
            await job.result()
        except EtfarmError as error:
            self.client_errors.append(f"{entry.what}: {error.reason}: {error}")
        if entry.job is not None:
            await entry.user.watch(entry.job.id, entry.events)
        entry.is_over = True

    async def _watch_all(self) -> None:
        """Keep `live_jobs` up to date, over as many streams as necessary."""
        while True:
            try:
                async for change in self.calls.jobs.WatchAll(job_pb2.WatchAllJobsRequest()):
                    if change.snapshot_begins:
                        self.live_jobs.clear()
                    elif change.job_id and change.job_state in LIVE:
                        self.live_jobs.add(change.job_id)
                    else:
                        self.live_jobs.discard(change.job_id)
            except grpc.aio.AioRpcError as error:
                if not is_away(error):
                    raise
            await asyncio.sleep(PAUSE_S)

    def take_notices(self) -> list[Received]:
        """Return all notices that have arrived."""
        while not self.receiver.requests.empty():
            self.notices.append(self.receiver.requests.get())
        return self.notices


async def _end(task: asyncio.Task[None]) -> None:
    """End a task that ends only by an error, which is raised here."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def start_time(pid: int) -> float | None:
    """Return the start of a process that runs; None if it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
