"""Cells of language models: refused before work, or sent with a plan to an agent that can measure them."""

from __future__ import annotations

import pytest

from etfarm.server.compile.cache import Outcome
from etfarm.v1 import job_pb2
from etfarm.v1.generation_pb2 import GenerationOptions
from tests.support.cells import World, compiled
from tests.support.generated import facts

pytestmark = pytest.mark.usefixtures("each_database")

GENERATE = job_pb2.Measurement(generation=GenerationOptions(tokens=8, prompt_tokens=[4]))


def compile_language_model(world: World) -> None:
    compilation = compiled()
    compilation.facts.CopyFrom(facts())
    world.compiler.outcome = Outcome(compilation)


async def test_an_agent_gets_the_plan_and_time_for_its_points(world: World) -> None:
    compile_language_model(world)
    agent = await world.agent()
    job = await world.submit(measurement=GENERATE)
    run = await agent.started()
    (candidate,) = run.candidates
    assert candidate.generation.model.decode_method == candidate.method == "forward" and not candidate.HasField("inputs")
    assert [(point.prompt_tokens, point.depth) for point in candidate.generation.points] == [(4, 0), (4, 39)]
    assert candidate.generation.generated_tokens == run.measurement.generation.tokens == 8
    assert run.deadline_s == 600 + 2 * 120 + 2 * (60 + 120), (
        "scores, and two points, each with its limit and what comes before it"
    )
    await world.conductor.cancel(job)


async def test_another_program_is_refused_before_it_is_placed(world: World) -> None:
    await world.agent()
    states, (report,) = await world.end(await world.submit(measurement=GENERATE))
    assert states == ["COMPILING", "FAILED"] and report.error.reason == "NOT_A_LANGUAGE_MODEL"
    assert not report.HasField("attempt")


async def test_a_language_model_is_not_measured_on_made_up_tokens(world: World) -> None:
    compile_language_model(world)
    await world.agent()
    states, (report,) = await world.end(await world.submit(measurement=job_pb2.Measurement()))
    assert states == ["COMPILING", "FAILED"] and report.error.reason == "GENERATION_NOT_REQUESTED"
