"""Cells of language models: refused before work, or sent with a plan to an agent that can measure them."""

from __future__ import annotations

import pytest

from etfarm.server.compile.cache import Outcome
from etfarm.v1 import job_pb2
from etfarm.v1.generation_pb2 import GenerationOptions
from tests.support.cells import World, compiled
from tests.support.generated import facts

GENERATE = job_pb2.Measurement(generation=GenerationOptions(tokens=8, prompt_tokens=[4]))


def compile_language_model(world: World) -> None:
    compilation = compiled()
    compilation.facts.CopyFrom(facts())
    world.compiler.outcome = Outcome(compilation)


async def test_an_agent_gets_the_plan_and_time_for_its_points(world: World) -> None:
    compile_language_model(world)
    _, job, run = await world.running(measurement=GENERATE)
    (candidate,) = run.candidates
    assert candidate.generation.model.decode_method == candidate.method == "forward" and not candidate.HasField("inputs")
    assert [(point.prompt_tokens, point.depth) for point in candidate.generation.points] == [(4, 0), (4, 39)]
    assert candidate.generation.generated_tokens == run.measurement.generation.tokens == 8
    assert run.deadline_s == 600 + 2 * 120 + 2 * (60 + 120), (
        "scores, and two points, each with its limit and what comes before it"
    )
    await world.conductor.cancel(job)


@pytest.mark.remedy("NOT_A_LANGUAGE_MODEL", "GENERATION_NOT_REQUESTED")
@pytest.mark.parametrize(
    ("is_language_model", "measurement", "reason"),
    [(False, GENERATE, "NOT_A_LANGUAGE_MODEL"), (True, job_pb2.Measurement(), "GENERATION_NOT_REQUESTED")],
)
async def test_what_cannot_be_measured_is_refused_before_it_is_placed(
    world: World, is_language_model: bool, measurement: job_pb2.Measurement, reason: str
) -> None:
    if is_language_model:
        compile_language_model(world)
    agent = await world.agent()
    states, (report,) = await world.end(await world.submit(measurement=measurement))
    assert states == ["COMPILING", "FAILED"] and report.error.reason == reason
    assert not report.HasField("attempt")
    compile_language_model(world)
    await world.submit(measurement=GENERATE)
    assert (await agent.started()).candidates[0].HasField("generation")
