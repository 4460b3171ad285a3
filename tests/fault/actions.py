"""What happens in a random schedule: jobs, calls about them, and faults. Each returns what it has done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
import psutil

from etfarm.v1 import device_pb2, job_pb2
from etfarm.wire.status import from_rpc_error
from tests.fault.shaken_farm import REAL, World
from tests.support.farm import descendants
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

MAX_LIVE: Final = 30
"""Number of live jobs from which on no more are submitted."""
MEASURED: Final = job_pb2.Measurement(warmup=1, iterations=20, min_time_s=0, max_time_s=5, no_profile=True)

Action = Callable[[World], Awaitable[str]]
ACTIONS: Final[dict[Action, int]] = {}
"""The actions with their odds."""


def action(odds: int, among: dict[Action, int] = ACTIONS) -> Callable[[Action], Action]:
    """Add a function to actions; it returns what it has done, for the timeline."""

    def add(function: Action) -> Action:
        among[function] = odds
        return function

    return add


@action(30)
async def submit_run(world: World) -> str:
    """Submit a job for simulated devices: run or measured, of one or several cells."""
    if len(world.live) >= MAX_LIVE:
        return "no job: enough are live"
    cells, is_measured = world.draws.randint(1, 3), world.draws.random() < 0.5
    spec = job_pb2.JobSpec(
        candidates=[world.candidates["add"]], devices=[job_pb2.DeviceChoice(selector=SELECTOR)] * cells,
        measurement=MEASURED if is_measured else None, priority=world.draws.randint(-2, 2),
    )  # fmt: skip
    if world.draws.random() < 0.25:
        spec.notify_urls.append(world.receiver.url())
    user = world.draws.choice(world.users)
    what = f"{'measure' if is_measured else 'run'} on {cells} simulated devices"
    world.submit(what, user, lambda request_id: user.submit(spec, request_id))
    return what


@action(6)
async def submit_real(world: World) -> str:
    """Submit a measurement for the real device."""
    if len(world.live) >= MAX_LIVE:
        return "no job: enough are live"
    devices = [job_pb2.DeviceChoice(selector=f"name={REAL}")]
    spec = job_pb2.JobSpec(candidates=[world.candidates["add"]], devices=devices, measurement=MEASURED)
    user = world.draws.choice(world.users)
    world.submit("measure on the real device", user, lambda request_id: user.submit(spec, request_id))
    return "measure on the real device"


@action(6)
async def bench(world: World) -> str:
    """Let a user's library run a benchmark on simulated devices, as a script does."""
    if len(world.live) >= MAX_LIVE:
        return "no benchmark: enough are live"
    world.bench("benchmark by the library", program("add").path, devices=[SELECTOR], iterations=20, min_time_s=0.0)
    return "benchmark by the library"


@action(3)
async def submit_compilation(world: World) -> str:
    """Submit a compilation that the cache does not answer."""
    if not world.compiles or len(world.live) >= MAX_LIVE:
        return "no compilation: without compilers, or enough jobs are live"
    spec = job_pb2.JobSpec(candidates=[world.candidates["conv"]], no_cache=True)
    user = world.draws.choice(world.users)
    world.submit("compile", user, lambda request_id: user.submit(spec, request_id))
    return "compile"


@action(6)
async def cancel(world: World) -> str:
    """Cancel a live job."""
    live = [(each.user, each.job.id) for each in world.live if each.job is not None]
    if not live:
        return "nothing to cancel"
    user, job_id = world.draws.choice(live)
    background(world, user.call(user.jobs.Cancel, job_pb2.CancelJobRequest(job_id=job_id)))
    return f"cancel {job_id}"


@action(3)
async def retry(world: World) -> str:
    """Retry a job that has ended, which is refused where nothing failed."""
    ended = [(each.user, each.job.id) for each in world.submitted if each.is_over and each.job is not None]
    if not ended:
        return "nothing to retry"
    user, job_id = world.draws.choice(ended)

    async def ask(request_id: str) -> job_pb2.Job:
        request = job_pb2.RetryJobRequest(request_id=request_id, job_id=job_id)
        answer: job_pb2.Job = await user.call(user.jobs.Retry, request)
        return answer

    world.submit(f"retry of {job_id}", user, ask)
    return f"retry {job_id}"


@action(2)
async def kill_server(world: World) -> str:
    """Kill the server, and start another one."""
    world.note_processes()
    world.farm.kill9()
    await asyncio.sleep(away_s := world.draws.uniform(0.0, 1.0))
    await asyncio.to_thread(world.farm.restart)
    return f"kill -9 of the server, away for {away_s:.1f} s"


@action(1)
async def restart_server(world: World) -> str:
    """Let the server end in order, and start another one."""
    world.note_processes()
    assert await asyncio.to_thread(world.server.stop) == 0, world.server.log.read_text()[-3000:]
    await asyncio.to_thread(world.farm.restart)
    return "restart of the server"


@action(1)
async def kill_draining_server(world: World) -> str:
    """Let the server drain, kill it meanwhile, and start another one."""
    world.note_processes()
    world.server.signal(signal.SIGTERM)
    await asyncio.sleep(draining_s := world.draws.uniform(0.0, 0.5))
    world.farm.kill9()
    await asyncio.to_thread(world.farm.restart)
    return f"kill -9 of the server that drains for {draining_s:.1f} s"


@action(2)
async def stop_server(world: World) -> str:
    """Freeze the server for a while."""
    world.server.signal(signal.SIGSTOP)
    await asyncio.sleep(frozen_s := world.draws.uniform(0.2, 2.0))
    world.server.signal(signal.SIGCONT)
    return f"SIGSTOP of the server for {frozen_s:.1f} s"


@action(3)
async def kill_child(world: World) -> str:
    """Kill a process below the server: a compilation, an analysis, a supervisor or a forkserver."""
    world.note_processes()
    children = sorted(descendants(world.server.pid))
    if not children:
        return "no child to kill"
    return kill(world.draws.choice(children), "a process below the server")


@action(2)
async def kill_agent(world: World) -> str:
    """Kill the real agent, and start it again."""
    world.note_processes()
    world.real.kill9()
    world.real.start()
    return "kill -9 of the real agent"


@action(2)
async def stop_agent(world: World) -> str:
    """Freeze the real agent for a while."""
    world.real.signal(signal.SIGSTOP)
    await asyncio.sleep(frozen_s := world.draws.uniform(0.2, 2.0))
    world.real.signal(signal.SIGCONT)
    return f"SIGSTOP of the real agent for {frozen_s:.1f} s"


@action(2)
async def kill_runner(world: World) -> str:
    """Kill a process below the real agent: a runner, or what waits to become one."""
    world.note_processes()
    below = sorted(descendants(world.real.pid))
    return kill(world.draws.choice(below), "a process below the real agent") if below else "no runner to kill"


@action(3)
async def break_link(world: World) -> str:
    """Cut, stall or slow the link of the real agent for a while."""
    how = world.draws.choice(["cut", "stall", "slow"])
    {"cut": world.link.cut, "stall": world.link.stall, "slow": lambda: world.link.limit(20_000)}[how]()
    await asyncio.sleep(broken_s := world.draws.uniform(0.1, 1.5))
    world.link.heal()
    return f"{how} the link for {broken_s:.1f} s"


@action(4)
async def flap(world: World) -> str:
    """Break a simulated agent's connection, or kill the agent, several times."""
    agent, times = world.draws.choice(world.simulated), world.draws.randint(1, 4)
    is_crash = world.draws.random() < 0.5
    for _ in range(times):
        agent.crash() if is_crash else agent.cut()
        await asyncio.sleep(world.draws.uniform(0.0, 0.3))
    return f"{agent.name} {'dies' if is_crash else 'loses its connection'} {times} times"


@action(2)
async def detach(world: World) -> str:
    """Take a device away from a simulated agent, and bring it back."""
    agent = world.draws.choice(world.simulated)
    device = world.draws.choice(sorted(agent.devices))
    agent.take_away(device)
    await asyncio.sleep(world.draws.uniform(0.0, 0.5))
    agent.bring_back(device)
    return f"{device} is away for a moment"


@action(2)
async def drain(world: World) -> str:
    """Drain a device for a while."""
    device = world.draws.choice([device for agent in world.simulated for device in sorted(agent.devices)])

    async def drained() -> None:
        await world.calls.call(world.calls.devices.Drain, device_pb2.DrainDeviceRequest(device_id=device, reason="a test"))
        await asyncio.sleep(0.5)
        await world.calls.call(world.calls.devices.Drain, device_pb2.DrainDeviceRequest(device_id=device, undrain=True))

    background(world, drained())
    return f"drain {device}"


@action(2)
async def reserve(world: World) -> str:
    """Reserve a device and run a job on it; then release the device, or let the reservation end by itself."""
    duration_s, held_s = world.draws.uniform(1.0, 3.0), world.draws.uniform(0.0, 2.0)
    is_renewed, is_released = world.draws.random() < 0.5, world.draws.random() < 0.5
    user = world.draws.choice(world.users)
    ids, devices = (world.draw_id(), world.draw_id()), user.devices
    request = device_pb2.ReserveDeviceRequest(selector=SELECTOR, duration_s=duration_s, reason="a test", request_id=ids[0])

    async def reserved() -> None:
        held = await user.call(devices.Reserve, request)
        choices = [job_pb2.DeviceChoice(selector=SELECTOR)]
        spec = job_pb2.JobSpec(candidates=[world.candidates["add"]], devices=choices, reservation_id=held.id)
        world.submit("run in a reservation", user, lambda request_id: user.submit(spec, request_id), ids[1])
        if is_renewed:
            await user.call(devices.Renew, device_pb2.RenewReservationRequest(reservation_id=held.id))
        await asyncio.sleep(held_s)
        if is_released:
            await user.call(devices.Release, device_pb2.ReleaseReservationRequest(reservation_id=held.id))

    background(world, reserved())
    return f"reserve a device for {duration_s:.1f} s"


@action(1)
async def mute(world: World) -> str:
    """Let a simulated agent send no heartbeats, or send them again."""
    agent = world.draws.choice(world.simulated)
    agent.is_mute = not agent.is_mute
    return f"{agent.name} {'falls silent' if agent.is_mute else 'is heard again'}"


@action(1)
async def copy_agent(world: World) -> str:
    """Start a copy of a simulated agent, with the same identity and devices."""
    original = world.draws.choice(world.simulated)
    copy = SimulatedAgent(world.addresses, original.name, devices=[device.name for device in original.devices.values()])
    copy.start()
    await asyncio.sleep(world.draws.uniform(0.1, 0.6))
    await copy.stop()
    return f"a copy of {original.name}: {copy.connections} connections, refused for {sorted(set(copy.refusals))}"


def background(world: World, work: Awaitable[object]) -> None:
    """Do something while the schedule goes on. A refusal of a call is not an error: the farm may have been quicker."""

    async def run() -> None:
        try:
            await work
        except grpc.aio.AioRpcError as error:
            world.say(f"refused: {from_rpc_error(error, server='').reason}")

    world.tasks.add(asyncio.create_task(run()))


def kill(pid: int, what: str) -> str:
    """Kill a process of the farm that may just have ended."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())[-60:]
        process.kill()
    except psutil.NoSuchProcess:
        return f"{what} had ended"
    return f"kill -9 of {what}: …{command}"
