"""The pause that users feel when a part of a farm fails:

    python -m tests.bench.pauses [FAULT ...] [--rounds 3]

The farm is a company's: two servers that are restarted when they end, on PostgreSQL and S3, with TLS, tokens, and two users in
two projects. Their clients benchmark a small program again and again. The pause of a fault is the longest time that a job took
from the fault on, or, where something is away for a while, from the moment at which it is there again, minus a job's usual time.
The limits are meant for a machine with two idle cores. An error of a client, or of a job, is a failure of the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from etfarm.client import AsyncFarm
from etfarm.v1 import farm_pb2
from etfarm.wire.errors import EtfarmError
from tests.fault.engines import Engines, running_engines
from tests.support.credentials import ADMIN, USERS, Credentials
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

AGENTS, CLIENTS_OF_A_USER = 4, 2
BOARD: Final = "board"
AWAY_S: Final = 3.0
"""How long a database or bucket is away."""
BEFORE_S, AFTER_S = 3.0, 4.0
"""Time for which clients work before a fault, and after the jobs that felt it."""
LEAVE_S: Final = 15.0
"""How long a leader stands still."""


@dataclass
class Company:
    """The farm, and the durations of its users' jobs."""

    servers: list[FarmProcess]
    engines: Engines
    calls: FarmCalls
    jobs: list[tuple[float, float]] = field(default_factory=list)
    """Starts and ends of the jobs that have ended, in seconds of the monotonic clock."""
    live: dict[int, float] = field(default_factory=dict)
    """Starts of the jobs that have not ended, by client."""
    failures: list[str] = field(default_factory=list)

    async def work(self, number: int, library: AsyncFarm, selector: str) -> None:
        """Benchmark again and again, as a user's script does."""
        while True:
            began = self.live[number] = time.monotonic()
            try:
                job = await library.bench(program("add").path, devices=[selector], iterations=5, warmup=1, min_time_s=0.0)
                self.failures += [str(report.error) for report in (await job.result()).reports if report.error is not None]
            except EtfarmError as error:
                self.failures.append(f"{error.reason}: {error}")
            self.jobs.append((began, time.monotonic()))
            del self.live[number]

    async def leader(self) -> FarmProcess:
        """Return the server that leads."""
        info: farm_pb2.ServerInfo = await self.calls.call(self.calls.farm.GetServerInfo, farm_pb2.GetServerInfoRequest())
        leads = next(server.address for server in info.servers if server.leads)
        return next(server for server in self.servers if server.address == leads)

    async def end_leader(self, number: signal.Signals) -> float:
        """End the leader by a signal, and let its supervisor restart it."""
        leader = await self.leader()
        assert leader.server is not None and leader.server.process is not None
        leader.server.signal(number)
        at = time.monotonic()
        await asyncio.to_thread(leader.server.process.wait)
        await asyncio.to_thread(leader.restart)
        return at


Fault = Callable[[Company], Awaitable[float]]
FAULTS: Final[dict[str, tuple[Fault, float]]] = {}
"""The faults with the limits of their pauses in seconds. Each returns the moment that its pause begins at."""


def fault(limit_s: float) -> Callable[[Fault], Fault]:
    """Add a function to the faults."""

    def add(function: Fault) -> Fault:
        FAULTS[getattr(function, "__name__", "")] = function, limit_s
        return function

    return add


@fault(5.0)
async def leader_killed(company: Company) -> float:
    return await company.end_leader(signal.SIGKILL)


@fault(3.0)
async def leader_terminated(company: Company) -> float:
    return await company.end_leader(signal.SIGTERM)


@fault(6.0)
async def leader_stopped(company: Company) -> float:
    leader = await company.leader()
    assert leader.server is not None
    leader.server.signal(signal.SIGSTOP)
    at = time.monotonic()
    await asyncio.sleep(LEAVE_S)
    leader.server.signal(signal.SIGCONT)
    return at


@fault(5.0)
async def both_killed(company: Company) -> float:
    """Kill both servers; the pause begins when both listen again."""
    for server in company.servers:
        server.kill9()
    await asyncio.gather(*(asyncio.to_thread(server.restart) for server in company.servers))
    return time.monotonic()


@fault(2.0)
async def database_killed(company: Company) -> float:
    await asyncio.to_thread(company.engines.postgres.stop, signal.SIGQUIT)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(company.engines.postgres.start)
    return time.monotonic()


@fault(2.0)
async def database_stopped(company: Company) -> float:
    company.engines.postgres.freeze()
    await asyncio.sleep(AWAY_S)
    company.engines.postgres.thaw()
    return time.monotonic()


@fault(2.0)
async def bucket_killed(company: Company) -> float:
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        company.engines.bucket.cut(method)
    await asyncio.sleep(AWAY_S)
    company.engines.bucket.heal()
    return time.monotonic()


@fault(2.0)
async def bucket_stopped(company: Company) -> float:
    company.engines.bucket.stall()
    await asyncio.sleep(AWAY_S)
    company.engines.bucket.heal()
    return time.monotonic()


@fault(2.0)
async def agent_killed(company: Company) -> float:
    """Kill the board's agent; the pause begins when its supervisor has started it again."""
    (board,) = company.servers[0].agents
    board.kill9()
    board.start()
    at = time.monotonic()
    await asyncio.to_thread(board.expect, "connected to")
    return at


@fault(3.0)
async def rolling_restart(company: Company) -> float:
    """Restart the standby, and then the leader, as an upgrade does."""
    leader = await company.leader()
    (standby,) = (server for server in company.servers if server is not leader)
    assert standby.server is not None
    await asyncio.to_thread(standby.server.stop)
    await asyncio.to_thread(standby.restart)
    return await company.end_leader(signal.SIGTERM)


async def pause_of(company: Company, name: str) -> float:
    """Let something fail; return the pause of it in seconds."""
    await asyncio.sleep(BEFORE_S)
    usual_s = statistics.median(end - start for start, end in company.jobs[-50:])
    at = await FAULTS[name][0](company)
    while any(start <= at for start in company.live.values()):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)
    await asyncio.sleep(AFTER_S)
    return max(end - max(start, at) for start, end in company.jobs if end > at) - usual_s


async def bench(folder: Path, engines: Engines, names: list[str], rounds: int) -> dict[str, Any]:
    """Return the pauses by fault."""
    servers = [FarmProcess(folder / name, serve=engines.arguments, executes=True) for name in ("first", "second")]
    async with AsyncExitStack() as closing:
        for server in servers:
            server.folder.mkdir()
            closing.push_async_callback(asyncio.to_thread, server.stop)
            await asyncio.to_thread(server.restart)
            if server is servers[0]:
                await asyncio.to_thread(server.create_projects)
        addresses, credentials = ",".join(server.address for server in servers), Credentials.in_use
        assert credentials is not None
        await asyncio.to_thread(servers[0].offer_runner)
        await asyncio.to_thread(servers[0].add_agent, "--name", BOARD, server=addresses)
        for number in range(AGENTS):
            await closing.enter_async_context(SimulatedAgent(addresses, f"simulated-{number}", run_s=0.05))
        calls = await closing.enter_async_context(farm_calls(addresses, credentials.access(addresses, ADMIN)))
        company, clients = Company(servers, engines, calls), []
        for name, project in USERS.items():
            access = credentials.access(addresses, name)
            library = AsyncFarm(addresses, token=access.token, tls_ca=access.tls_ca, project=project)
            await closing.enter_async_context(library)
            for selector in [*[SELECTOR] * CLIENTS_OF_A_USER, f"name={BOARD}"]:
                clients.append(asyncio.create_task(company.work(len(clients), library, selector)))
        try:
            pauses = {name: [await pause_of(company, name) for _ in range(rounds)] for name in names}
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    limits = {name: FAULTS[name][1] for name in names}
    return {
        "jobs": len(company.jobs), "failures": company.failures, "usual_s": statistics.median(e - s for s, e in company.jobs),
        "pauses_s": pauses, "limits_s": limits,
        "within_limits": not company.failures and all(statistics.median(pauses[name]) <= limits[name] for name in names),
    }  # fmt: skip


def main() -> int:
    """Run the bench, and print its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pauses", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"default: all of {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.faults) - FAULTS.keys():
        parser.error(f"There is no fault {', '.join(sorted(unknown))}. Choose from {', '.join(FAULTS)}.")
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="etfarm-pauses-")))
        closing.enter_context(Credentials(folder).used())
        engines = closing.enter_context(running_engines())
        result = asyncio.run(bench(folder, engines, options.faults or [*FAULTS], options.rounds))
    print(json.dumps(result, indent=1))
    return 0 if result["within_limits"] else 1


if __name__ == "__main__":
    sys.exit(main())
