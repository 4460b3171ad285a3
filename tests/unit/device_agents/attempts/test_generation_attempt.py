"""Attempts that generate text, on the real runner."""

from __future__ import annotations

import json
from array import array
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from etfarm.device_agents.attempts.generation import GenerationAttempt, validate_plan
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.errors import InputMismatch
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import OnLog
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import agent_pb2, generation_pb2, job_pb2
from etfarm.wire import tensors
from tests.support.attempts import Board, new_attempt
from tests.support.programs import Program, program
from tests.support.runner import arrays, runner_archive

MORE = pytest.mark.slow(reason="each starts a runner, and the quick ring has one of them")
PROMPT = 12
GENERATED = 8


def plan_of(**changes: Any) -> generation_pb2.GenerationPlan:
    """Two points, of which the second begins in the middle of the prompt of the first."""
    model = generation_pb2.LanguageModel(
        prefill_method="forward", decode_method="forward", token_input=0, position_input=1,
        positions=generation_pb2.POSITION_INPUT_START, max_prompt_tokens=63, dynamic_prompt=True, max_context_tokens=64,
        vocab_size=96,
    )  # fmt: skip
    points = [(PROMPT, 0), (4, PROMPT - 4)]
    plan = generation_pb2.GenerationPlan(
        model=model, generated_tokens=GENERATED, repetitions=3, warmup=1, seed=7, max_time_s=60, trace_iterations=6,
        points=[generation_pb2.GenerationPoint(prompt_tokens=prompt, depth=depth) for prompt, depth in points],
    )  # fmt: skip
    plan.MergeFrom(generation_pb2.GenerationPlan(**changes))
    return plan


async def result_of(
    board: Board,
    model: Program,
    plan: generation_pb2.GenerationPlan,
    *,
    repeat: int = 1,
    target: type[Machine] = Machine,
) -> tuple[agent_pb2.CandidateResult, list[agent_pb2.RunProgress]]:
    """Return the result of an attempt with one candidate, and its progress."""
    bundle = agent_pb2.RunnerBundle(artifact=board.blobs.put(runner_archive().read_bytes()))
    candidate = agent_pb2.RunCandidate(
        cell_id="cell", program=board.blobs.program(model.bytes), bundle=bundle, generation=plan, threads=1
    )
    measurement = job_pb2.Measurement(repeat=repeat, generation=generation_pb2.GenerationOptions(tokens=GENERATED))
    start = agent_pb2.StartRun(attempt_id="a", candidates=[candidate], deadline_s=60, measurement=measurement)
    progress: list[agent_pb2.RunProgress] = []
    attempt = new_attempt(board, start, progress.append, kind=GenerationAttempt, target=target)
    (result,) = (await attempt.run()).candidates
    return result, progress


def rows(board: Board, digest_of_rows: str, code: str) -> list[list[int]]:
    values = array(code, board.blobs.blobs[digest_of_rows]).tolist()
    return [values[start : start + GENERATED] for start in range(0, len(values), GENERATED)]


async def test_an_attempt_returns_the_times_of_every_token(board: Board) -> None:
    model = program("decoder_start")
    result, progress = await result_of(board, model, plan_of())
    assert not result.HasField("error"), result.error
    (expected,) = arrays(model.expected)
    (generation,) = result.generations
    assert [(each.prompt_tokens, each.depth, each.repetitions) for each in generation.points] == [(PROMPT, 0, 3), (4, 8, 3)]
    assert rows(board, generation.tokens.digest, "i") == 6 * [expected[:GENERATED].tolist()]
    times = rows(board, generation.token_ns.digest, "q")
    prefills = [each for point in generation.points for each in point.prefill_ns]
    assert len(times) == len(prefills) == 6
    for row, prefill_ns in zip(times, prefills, strict=True):
        assert 0 < prefill_ns <= row[0] and min(row) > 0

    assert result.load.load_ns and result.load.load_method_ns and result.load.first_run_ns
    assert result.memory.peak_rss_bytes and len(result.memory.planned_bytes) == 1
    assert result.warmup == 2 and result.warmup_ns and result.duration_ns
    assert result.telemetry.HasField("before") and result.telemetry.HasField("after")
    parts = [point.telemetry for point in generation.points]
    assert result.telemetry.wall_time_ns == sum(part.wall_time_ns for part in parts) > 0
    assert result.telemetry.cpu_time_ns == sum(part.cpu_time_ns for part in parts)
    assert not generation.telemetry.series and generation.load == result.load
    names = [phase.phase for phase in result.phases if not phase.phase.startswith("WAIT_FOR_")]
    assert names == ["FETCH", "LOAD", "LOAD_METHOD", "GENERATE", "TRACED", "UPLOAD"]
    assert all(each.done <= each.total for each in progress if each.phase == "GENERATE" and each.HasField("total"))
    assert not any(result.HasField(name) for name in ("samples", "outputs", "etdump", "repeatability"))
    assert not (board.folder / "run").exists()


@MORE
async def test_prefill_and_decode_are_traced_apart(board: Board) -> None:
    result, _ = await result_of(board, program("decoder_start"), plan_of(traced_point=1))
    (generation,) = result.generations
    prefill, decode = generation.prefill, generation.decode
    assert (prefill.tokens, prefill.position) == (4, 8) and (decode.tokens, decode.position) == (1, 12)
    for traced in (prefill, decode):
        assert len(traced.traced_ns) >= 6 and min(traced.traced_ns) > 0
        assert traced.telemetry.wall_time_ns >= sum(traced.traced_ns)
        assert len(board.blobs.blobs[traced.etdump.digest]) > 1000
    assert prefill.etdump.digest != decode.etdump.digest


@MORE
async def test_methods_that_share_state_are_measured_and_traced(board: Board) -> None:
    model = program("decoder_shared")
    plan = plan_of()
    plan.model.prefill_method, plan.model.decode_method = "prefill", "decode"
    result, _ = await result_of(board, model, plan)
    assert not result.HasField("error"), result.error
    (expected,) = arrays(model.expected)
    (generation,) = result.generations
    assert rows(board, generation.tokens.digest, "i") == 6 * [expected[:GENERATED].tolist()]
    # Activations and shared state of both.
    assert len(result.memory.planned_bytes) == 4
    assert (generation.prefill.tokens, generation.decode.tokens) == (PROMPT, 1)


@MORE
@pytest.mark.parametrize("kind", ["start", "short"])
async def test_an_encoder_and_an_embedding_are_measured_and_traced(board: Board, kind: str) -> None:
    plan = plan_of()
    plan.model.prefill_method = plan.model.decode_method = "text_decoder"
    plan.model.flow.embedding_method = "token_embedding"
    plan.model.flow.encoders.add(method="vision_encoder", positions=16)
    result, _ = await result_of(board, program(f"flow_{kind}"), plan)
    assert not result.HasField("error"), result.error
    (generation,) = result.generations
    tokens = rows(board, generation.tokens.digest, "i")
    assert tokens[:3] == 3 * tokens[:1] and tokens[3:] == 3 * tokens[3:4], "equal in all repetitions"
    for point in generation.points:
        assert [part.method for part in point.parts] == ["vision_encoder", "token_embedding", "text_decoder"]
        assert [part.decode_executions for part in point.parts] == [0, GENERATED - 1, GENERATED - 1]
        for repetition, prefill_ns in enumerate(point.prefill_ns):
            assert 0 < sum(part.prefill_ns[repetition] for part in point.parts) <= prefill_ns
    assert (generation.prefill.tokens, generation.prefill.position) == (PROMPT, 16)
    assert (generation.decode.tokens, generation.decode.position) == (1, 16 + PROMPT)
    assert len(result.memory.planned_bytes) == 3
    (encoder,) = generation.encoders
    assert (encoder.method, encoder.trace.tokens, encoder.trace.position) == ("vision_encoder", 16, 0)
    assert len(encoder.trace.traced_ns) >= 6 and min(encoder.trace.traced_ns) > 0
    etdumps = {each.etdump.digest for each in (encoder.trace, generation.prefill, generation.decode)}
    assert len(etdumps) == 3 and etdumps <= set(board.blobs.blobs)


@MORE
async def test_an_encoder_runs_on_the_image_that_it_is_given(board: Board) -> None:
    model, plan = program("flow_start"), plan_of()
    (picture, _), (expected,) = model.inputs, arrays(model.expected)
    plan.model.prefill_method = plan.model.decode_method = "text_decoder"
    plan.model.flow.embedding_method = "token_embedding"
    encoded = board.blobs.put(tensors.encode([picture]))
    plan.model.flow.encoders.add(method="vision_encoder", positions=16, inputs=encoded)
    result, _ = await result_of(board, model, plan)
    assert not result.HasField("error"), result.error
    (generation,) = result.generations
    tokens = rows(board, generation.tokens.digest, "i")
    first = next(place for place, point in enumerate(plan.points) if not point.depth)
    assert tokens[3 * first : 3 * first + 3] == 3 * [expected[:GENERATED].tolist()], "eager PyTorch's tokens after the image"


@MORE
async def test_a_program_of_single_tokens_has_no_traced_prefill(board: Board) -> None:
    plan = plan_of()
    plan.model.max_prompt_tokens, plan.model.dynamic_prompt = 1, False
    result, _ = await result_of(board, program("decoder_static"), plan)
    (generation,) = result.generations
    assert not generation.HasField("prefill") and generation.decode.tokens == 1


@MORE
async def test_each_run_is_a_process_of_its_own_and_the_last_one_traces(board: Board) -> None:
    result, progress = await result_of(board, program("decoder_start"), plan_of(), repeat=2)
    assert not result.HasField("error"), result.error
    assert [each.HasField("decode") for each in result.generations] == [False, True]
    assert [len(each.points) for each in result.generations] == [2, 2]
    assert all(each.load.load_method_ns for each in result.generations)
    assert result.generations[0].tokens == result.generations[1].tokens
    assert any(each.message.startswith("run 2 of 2") for each in progress)


@MORE
async def test_a_point_that_fails_does_not_end_the_others(board: Board) -> None:
    plan = plan_of()
    # More than the program's own context.
    plan.model.max_context_tokens = 128
    plan.points[0].prompt_tokens = 63
    result, _ = await result_of(board, program("decoder_start"), plan)
    (generation,) = result.generations
    assert generation.points[0].error.reason == "PROGRAM_FAILED"
    assert (generation.points[0].repetitions, generation.points[1].repetitions) == (0, 3)
    assert len(rows(board, generation.tokens.digest, "i")) == 3
    assert not result.HasField("error") and not generation.HasField("decode")


@MORE
async def test_a_candidate_without_any_result_fails(board: Board) -> None:
    plan = plan_of()
    plan.model.position_input = 5
    result, _ = await result_of(board, program("decoder_start"), plan)
    assert result.error.reason == "INPUT_MISMATCH" and not result.generations


def scripted(
    machine: Machine, folder: Path, cases: dict[str, str], commands: list[str]
) -> AbstractAsyncContextManager[RemoteRunner]:
    """Start a runner that is a shell script: `hello` and `self_test` work, and `cases` are its further commands."""
    hello = {
        "protocol": 1, "executorch": "1.5.1", "arch": machine.device.arch, "backends": [], "operators": [], "confined": [],
        **({"commands": commands} if commands else {}),
    }  # fmt: skip
    answers = {"hello": hello, "self_test": {"passed": []}}
    lines = {name: f"echo '{json.dumps({'event': 'result', 'command': name} | answer)}'" for name, answer in answers.items()}
    own = " ".join(f"{name}) {line};;" for name, line in (lines | cases).items())
    folder.mkdir(parents=True, exist_ok=True)
    return NativeRunner.start(["/bin/sh", "-c", f"while read command rest; do case $command in {own} esac; done"], folder)


class EarlierMachine(Machine):
    """A machine whose runner lists no commands, as far as an attempt without a program gets."""

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        return scripted(self, folder, {}, [])


class CannotScore(Machine):
    """A machine whose runner generates text, and does not score tokens."""

    starts = 0
    commands: tuple[str, ...] = ("generate",)

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        self.starts += 1
        if self.starts <= 2:  # the bundle is tested at its first use
            return super().start_runner(bundle, folder, on_log)
        threads = json.dumps({"event": "result", "command": "threads", "threads": 1})
        cases = {"threads": f"echo '{threads}'", "load": "kill -s ABRT $$"}
        return scripted(self, folder, cases, list(self.commands))


class CrashesInScore(CannotScore):
    """A machine whose runner ends abnormally when it is to score tokens."""

    commands = ("generate", "score")


@pytest.mark.remedy("SCORING_UNSUPPORTED")
@MORE
async def test_given_tokens_are_scored_in_a_process_after_the_others(board: Board) -> None:
    plan = plan_of(score={"tokens": [5, 6, 7, 8], "window": 64, "logits_after": [1, 3], "max_time_s": 60})
    model = program("decoder_start")
    earlier, _ = await result_of(board, model, plan, target=CannotScore)
    assert earlier.generations[0].score.error.reason == "SCORING_UNSUPPORTED"
    result, _ = await result_of(board, model, plan)
    assert not result.HasField("error"), result.error
    (generation,) = result.generations
    assert not generation.score.HasField("error"), generation.score.error
    assert (generation.score.tokens, generation.score.vocabulary) == (4, 96)
    assert len(board.blobs.blobs[generation.score.values.digest]) == 4 * 8 + 2 * 96 * 4
    assert generation.HasField("decode") and len(result.memory.planned_bytes) == 1
    names = [phase.phase for phase in result.phases if not phase.phase.startswith("WAIT_FOR_")]
    assert names == ["FETCH", "LOAD", "LOAD_METHOD", "GENERATE", "TRACED", "UPLOAD", "SCORE", "UPLOAD"]


@MORE
@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        (CannotScore, {}, "SCORING_UNSUPPORTED"),
        (CrashesInScore, {}, "PROGRAM_CRASHED"),
        (Machine, {"window": 65}, "INPUT_MISMATCH"),
        (Machine, {"logits_after": [3]}, "INPUT_MISMATCH"),
    ],
)
async def test_an_error_in_score_leaves_the_times(
    board: Board, target: type[Machine], changes: dict[str, Any], reason: str
) -> None:
    plan = plan_of(score={"tokens": [5, 6, 7], "window": 64, "max_time_s": 60, **changes})
    result, _ = await result_of(board, program("decoder_start"), plan, target=target)
    assert not result.HasField("error"), result.error
    (generation,) = result.generations
    assert generation.score.error.reason == reason and not generation.score.HasField("values")
    assert len(rows(board, generation.token_ns.digest, "q")) == 6 and generation.HasField("decode")


class KnowsNoFlow(CannotScore):
    """A machine whose runner was built before methods could feed each other."""

    starts = 2


async def test_a_runner_that_knows_no_flow_is_refused(board: Board) -> None:
    plan = plan_of()
    plan.model.flow.embedding_method = "token_embedding"
    result, _ = await result_of(board, program("decoder_start"), plan, target=KnowsNoFlow)
    assert result.error.reason == "GENERATION_UNSUPPORTED"


@pytest.mark.remedy("GENERATION_UNSUPPORTED")
async def test_a_runner_of_an_earlier_release_is_refused(board: Board) -> None:
    result, _ = await result_of(board, program("decoder_start"), plan_of(), target=EarlierMachine)
    assert result.error.reason == "GENERATION_UNSUPPORTED"
    assert "etfarm bundle build" in result.error.remedy
    result, _ = await result_of(board, program("decoder_start"), plan_of())
    assert not result.HasField("error"), "a runner of this version"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generated_tokens": 60}, "12 tokens at depth 0 with 60 generated ones do not fit into the context of 64"),
        ({"repetitions": 1000}, "repetitions must be 1 to 100, got 1000"),
        ({"points": [{"prompt_tokens": 1, "depth": -1}]}, "1 tokens at depth -1"),
        ({"points": [{"prompt_tokens": 1}] * 40}, "points must be 1 to 32, got 42"),
        ({"model": {"vocab_size": -1}}, "a vocabulary must be 1 to"),
        ({"model": {"flow": {"encoders": [{"positions": 50}]}}}, "12 tokens at depth 0 with 8 generated ones do not fit"),
        ({"model": {"flow": {"encoders": [{"positions": -1}]}}}, "encoders have -1 positions in a context of 64"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputMismatch, match=message):
        validate_plan(plan_of(**changes))
