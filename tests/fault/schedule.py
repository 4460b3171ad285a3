"""A random schedule of jobs and faults on a real farm with TLS, tokens and two users, and what must hold afterwards.

    python -m tests.fault.schedule --seed 7 --minutes 1 [--large [--nodes]]

A seed draws the actions and the pauses between them; what they hit depends on the machine. A new kind of fault is a function
in `tests.fault.actions` with the decorator `action`.

`--large` is a farm of two servers on PostgreSQL and S3. With `--nodes`, it compiles on two nodes of a Ray cluster. Processes of
the nodes, and whole nodes, are killed in the middle of compilations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Final

from etfarm.v1 import common_pb2, device_pb2, job_pb2
from tests.fault.actions import ACTIONS
from tests.fault.engine_actions import ENGINE_ACTIONS
from tests.fault.engines import Engines, running_engines
from tests.fault.node_actions import NODE_ACTIONS
from tests.fault.shaken_farm import SIMULATED, World, start_time
from tests.support import invariants
from tests.support.credentials import Credentials
from tests.support.farm import wait_until
from tests.support.farm_calls import LIVE
from tests.support.programs import program
from tests.support.runner import runner_archive
from tests.support.simulated_agent import answer_all

PAUSE_S: Final = 0.25
"""Mean pause between two actions."""
SETTLE_S: Final = 120.0
"""Within which every job ends once the faults are over."""
NODES_SETTLE_S: Final = 300.0
"""The same with nodes of a Ray cluster, which the next leader lets load the toolchain."""
NODES: Final = 2
NOTICES_S: Final = 30.0
"""Within which every notice arrives; one that failed is sent again after ten seconds."""
EXPLAINED: Final = frozenset(
    {
        "ATTEMPT_LOST", "CANCELLED", "CANNOT_START_RUNNER", "COMPILE_NODE_LOST", "COMPILER_CRASHED", "DEVICE_OFFLINE",
        "NO_COMPILE_NODE", "PROGRAM_CRASHED", "PROGRAM_FAILED", "RESERVATION_ENDED", "RESULT_IMPLAUSIBLE", "RUNNER_BROKEN",
        "SET_ASIDE",
    }
)  # fmt: skip
"""Reasons for which a cell may fail under these faults."""
BUGS: Final = ("Traceback (most recent call last)", "etfarm has a bug", "could not be handled", "was never retrieved")
"""Texts that no log has."""


async def settle(world: World) -> None:
    """End all faults, and wait until every job has ended."""
    world.say("the faults are over")
    for agent in world.simulated:
        agent.act, agent.is_mute = answer_all, False
        agent.crash()  # what hangs is lost
    has_nodes = world.engines is not None and world.engines.cluster is not None
    async with asyncio.timeout(NODES_SETTLE_S if has_nodes else SETTLE_S):
        waited: set[asyncio.Task[None]] = set()
        while waited != world.tasks:  # one may add another
            waited = set(world.tasks)
            await asyncio.gather(*waited)
    for agent in world.simulated:
        await agent.wait_connected()
    await world.calls.until_online(2 * SIMULATED + 1)


async def check(world: World) -> list[str]:
    """Return what is wrong after all jobs have ended."""
    wrong: list[str] = []
    known = {job.id: job for job in await world.calls.all_jobs()}
    accepted = [each for each in world.submitted if each.job is not None]
    ids = Counter(each.job.id for each in accepted if each.job is not None)
    wrong += [f"job {job_id}: {count} requests were answered with it" for job_id, count in ids.items() if count > 1]
    wrong += [f"job {job_id}: lost" for job_id in ids.keys() - known.keys()]
    # A request that was refused may have been accepted only if its answer was lost, and then its repetition is answered with it.
    wrong += [f"job {job_id}: nobody asked for it" for job_id in known.keys() - ids.keys()]
    jobs = []
    for each in accepted:
        assert each.job is not None
        job: job_pb2.Job = await world.calls.call(world.calls.jobs.Get, job_pb2.GetJobRequest(job_id=each.job.id))
        jobs.append(job)
        again = await each.user.watch(job.id)
        if again != each.events:
            wrong.append(f"job {job.id}: its watcher has seen other events than the journal has")
        wrong += invariants.check_events(job, again)
        wrong += invariants.check_reports(job, await world.calls.reports_of(job.id))
        if job.state in LIVE:
            wrong.append(f"job {job.id}: it is live")
        for cell in job.cells:
            if cell.error.reason and cell.error.reason not in EXPLAINED:
                wrong.append(f"cell {cell.id} of {each.what}: failed for {cell.error.reason}: {cell.error.message}")
    wrong += world.client_errors
    wrong += invariants.check_attempts(jobs)
    wrong += await eventually(lambda: invariants.check_devices(world.calls))
    wrong += await eventually(lambda: unacknowledged(world))
    wrong += await eventually(lambda: still_reserved(world))
    wrong += await eventually(lambda: watched_as_live(world))
    wrong += await eventually(lambda: check_notices(world, jobs), NOTICES_S)
    wrong += await invariants.check_store(world.calls)
    ends = Counter(cell.error.reason or common_pb2.CellState.Name(cell.state) for job in jobs for cell in job.cells)
    refusals = Counter(each.refusal for each in world.submitted if each.refusal)
    world.say(f"{len(jobs)} jobs; cells: {dict(ends)}; refused: {dict(refusals)}; notices: {len(world.notices)}")
    return wrong


async def unacknowledged(world: World) -> list[str]:
    """Return the results that simulated agents still keep, and the attempts that they still run."""
    return [
        f"{agent.name}: it keeps {list(agent.outbox)} and runs {agent.active}"
        for agent in world.simulated
        if agent.outbox or agent.active
    ]


async def still_reserved(world: World) -> list[str]:
    """Return the reservations that have not ended."""
    answer = await world.calls.call(world.calls.devices.ListReservations, device_pb2.ListReservationsRequest())
    return [f"reservation {held.id}: it has not ended" for held in answer.reservations]


async def watched_as_live(world: World) -> list[str]:
    """Return the jobs that have ended, and that the watch of all jobs still has."""
    return [f"job {job_id}: its end is unknown to the watch of all jobs" for job_id in world.live_jobs]


async def check_notices(world: World, jobs: Sequence[job_pb2.Job]) -> list[str]:
    """Return what is wrong with the notices of jobs that asked for one: each has its own, which may arrive several times."""
    deliveries: dict[str, set[str]] = {job.id: set() for job in jobs if job.spec.notify_urls}
    for notice in world.take_notices():
        deliveries.setdefault(json.loads(notice.body)["job"]["id"], set()).add(notice.headers["X-Etfarm-Delivery"])
    return [f"job {job_id}: it has {len(ids)} notices" for job_id, ids in deliveries.items() if len(ids) != 1]


async def eventually(look: Callable[[], Awaitable[list[str]]], within_s: float = 10.0) -> list[str]:
    """Return what is still wrong after a while; empty as soon as nothing is."""
    until = time.monotonic() + within_s
    while (wrong := await look()) and time.monotonic() < until:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.1)
    return wrong


def check_remains(world: World) -> list[str]:
    """Return what is wrong with what a farm leaves behind that has stopped."""
    if world.engines is not None:
        wrong = invariants.check_postgres(world.engines.url)
    else:
        wrong = invariants.check_database(world.farm.folder / "server" / "farm.sqlite")

    def left() -> list[int]:
        return [pid for pid, started in world.processes.items() if start_time(pid) == started]

    if not wait_until(lambda: not left()):
        wrong.append(f"processes are left: {left()}")
    cluster = world.engines.cluster if world.engines is not None else None

    def on_nodes() -> list[int]:
        return [actor.pid for node in cluster.nodes for actor in node.actors()] if cluster is not None else []

    if not wait_until(lambda: not on_nodes()):
        wrong.append(f"actors are left on nodes: {on_nodes()}")
    for path in world.farm.folder.rglob("*.log"):
        text = path.read_text(errors="replace")
        wrong += [f"{path.name}: {text[max(0, place - 200) : place + 2000]}" for bug in BUGS if (place := text.find(bug)) >= 0]
    return wrong


async def run(
    folder: Path,
    seed: int,
    seconds: float,
    *,
    actions: int | None = None,
    compiles: bool = True,
    engines: Engines | None = None,
) -> World:
    """Run the schedule of a seed, for so many seconds or actions at most.

    Args:
        engines: of a large farm with two servers, which have faults as well.

    Raises:
        AssertionError: something does not hold; the message has the timeline, and how to repeat it.
    """
    plan, world = random.Random(seed), World(folder, seed, compiles=compiles, engines=engines)
    odds = ACTIONS | (ENGINE_ACTIONS if engines else {}) | (NODE_ACTIONS if engines and engines.cluster else {})
    wrong: list[str] = []
    cause: BaseException | None = None
    try:
        async with AsyncExitStack() as closing:
            await world.open(closing)
            until = time.monotonic() + seconds
            while time.monotonic() < until and (actions is None or len(world.timeline) < actions):
                act, number = plan.choices(list(odds), list(odds.values()))[0], plan.getrandbits(64)
                # A generator of its own for each action: what one of them meets does not change the next ones.
                world.draws = random.Random(number)
                world.say(await act(world))
                await asyncio.sleep(plan.expovariate(1 / PAUSE_S))
            await settle(world)
            wrong += await check(world)
            world.note_processes()
        wrong += check_remains(world)
    except Exception as error:  # noqa: BLE001 - raised below, with the timeline
        wrong.append(f"{type(error).__name__}: {error}")
        cause = error
    if wrong:
        live = [f"{each.what}: {each.job.id if each.job else 'not answered'}, {len(each.events)} events" for each in world.live]
        repeat = f"python -m tests.fault.schedule --seed {seed} --minutes {seconds / 60:g}"
        repeat += f"{'' if world.compiles else ' --no-compile'}{' --large' if world.engines else ''}"
        repeat += " --nodes" if world.engines and world.engines.cluster else ""
        raise AssertionError(
            "\n".join([f"seed {seed}", *world.timeline, "", *live, "", *wrong, "", f"Repeat with: {repeat}"])
        ) from cause
    return world


def main() -> int:
    """Run one seed; return 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.schedule", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--minutes", type=float, default=0.25)
    parser.add_argument("--no-compile", action="store_true", help="no compilations, for which each server loads torch")
    parser.add_argument("--large", action="store_true", help="two servers on PostgreSQL and S3, which have faults as well")
    parser.add_argument("--nodes", action="store_true", help="with --large: compilations on two nodes of a Ray cluster")
    parser.add_argument("--folder", type=Path, help="where the farm's data and logs stay; default: a temporary folder")
    options = parser.parse_args()
    if options.nodes and (options.no_compile or not options.large):
        parser.error("--nodes requires --large, and excludes --no-compile.")
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    program("add")
    runner_archive()
    with tempfile.TemporaryDirectory(prefix="etfarm-schedule-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # The S3 server is started by an event loop of its own.
            engines_of = running_engines(NODES if options.nodes else 0) if options.large else nullcontext()
            with Credentials(folder).used(), engines_of as engines:
                work = run(folder, seed, options.minutes * 60, compiles=not options.no_compile, engines=engines)
                world = asyncio.run(work)
        except AssertionError as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(error)
            return 1
    print("\n".join(world.timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
