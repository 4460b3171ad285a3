"""Health runs of a world's device, and the answers of its agent to them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from etfarm.server.jobs.health import program
from etfarm.server.jobs.health.probing import Pauses, Probing
from etfarm.server.jobs.health.run import HealthRuns
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import HealthEventKind, HealthRunTrigger
from etfarm.wire import tensors
from tests.support.cells import Agent, World

RUN, FAULT = HealthEventKind.HEALTH_EVENT_KIND_RUN, HealthEventKind.HEALTH_EVENT_KIND_FAULT
ENROLMENT, PERIODIC, AFTER_FAULT, PROBE = (
    HealthRunTrigger.HEALTH_RUN_TRIGGER_ENROLMENT, HealthRunTrigger.HEALTH_RUN_TRIGGER_PERIODIC,
    HealthRunTrigger.HEALTH_RUN_TRIGGER_FAULT, HealthRunTrigger.HEALTH_RUN_TRIGGER_PROBE,
)  # fmt: skip
PROMPT = Pauses(soon_s=0.01, later_s=0.02, aborted_s=0.05)
DEVICE = common_pb2.FAULT_DEVICE
BROKEN = Error(fault=DEVICE, reason="DEVICE_SELF_TEST_FAILED", message="The runner does not answer.")


def answer(agent: Agent, start: agent_pb2.StartRun, p50_ns: int = 33_000, *, wrong: bool = False, **more: Any) -> None:
    """Answer a health run as a device does that computes, rightly or wrongly."""
    data = bytearray(program.expected_bytes())
    if wrong:
        data[400] ^= 1
    output = tensors.Tensor("y", "float32", (program.ROWS, program.FEATURES), bytes(data))
    result = agent_pb2.CandidateResult(cell_id=start.candidates[0].cell_id, threads=1, **more)
    result.outputs.CopyFrom(agent.uploaded(tensors.encode([output])))
    if start.HasField("measurement"):
        count = 10_000
        samples = array("q", [p50_ns + index % 7 for index in range(count)])
        result.samples.CopyFrom(agent.uploaded(samples.tobytes()))
        result.iterations, result.duration_ns = count, sum(samples)
        result.stop_reason, result.outputs_equal, result.steady = common_pb2.STOP_REASON_ENOUGH, True, True
    deliver(agent, start, agent_pb2.RunResult(candidates=[result]))


async def lead(agent: Agent, p50_ns: int = 33_000, *, wrong: bool = False) -> agent_pb2.StartRun:
    """Lead the next health run of an agent's device to its end; return what the agent was sent."""
    start = await agent.started()
    await settle(agent, start, p50_ns, wrong=wrong)
    return start


async def settle(agent: Agent, start: agent_pb2.StartRun, p50_ns: int = 33_000, *, wrong: bool = False) -> None:
    """Answer a health run, which the server acknowledges."""
    answer(agent, start, p50_ns, wrong=wrong)
    await agent.expect_message("ack", start.attempt_id)


def deliver(agent: Agent, start: agent_pb2.StartRun, result: agent_pb2.RunResult) -> None:
    result.attempt_id, result.device_id = start.attempt_id, start.device_id
    assert agent.world.runs.deliver(result)


@asynccontextmanager
async def probed(
    world: World, measurement_lock: MeasurementLock | None = None, pauses: Pauses = PROMPT
) -> AsyncIterator[Probing]:
    measurement_lock = measurement_lock or MeasurementLock()
    readers = Readers()
    runs = HealthRuns(world.attempts, world.runs, world.store, readers, measurement_lock, Thresholds(), poll_s=0.01)
    created = Probing(world.registry, world.health, world.bundles, world.attempts, runs, measurement_lock, world.now, pauses)
    task = asyncio.create_task(created.run())
    try:
        yield created
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        readers.close()


def state(world: World) -> int:
    return world.registry.get("pi").health.state


async def events(world: World) -> list[Any]:
    listed, _ = await world.health.events("pi", 0, 500)
    return listed
