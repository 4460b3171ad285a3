"""What an agent cannot have measured of generated text is a device fault, and what an honest one sends is not."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.jobs.cells.plausibility import ImplausibleResult, Plan, artifacts_of, check_candidate
from etfarm.v1 import agent_pb2, generation_pb2, job_pb2, report_pb2
from etfarm.v1.generation_pb2 import GenerationOptions
from etfarm.wire.chunks import artifact_of
from etfarm.wire.language_models import MAX_VOCAB
from tests.support.generated import flow_plan, plan, process

ASKED, FLOW = plan((8, 0), (8, 16)), flow_plan((8, 0), (8, 16))
TIMES = [[9_000, 1_000, 1_100, 900]] * 6


def honest(
    folder: Path, processes: int = 1, *, asked: generation_pb2.GenerationPlan = ASKED, encoded: int = 0
) -> agent_pb2.CandidateResult:
    """Return what a real agent sends, whose prompts begin behind encoded positions."""
    result = agent_pb2.CandidateResult(cell_id="c", threads=1, warmup_ns=1_000)
    result.generations.extend(process(folder, asked, TIMES) for _ in range(processes))
    result.generations[-1].prefill.MergeFrom(agent_pb2.GenerationTrace(traced_ns=[8_000], tokens=8, position=encoded))
    result.generations[-1].decode.MergeFrom(agent_pb2.GenerationTrace(traced_ns=[1_000], tokens=1, position=encoded + 8))
    return result


def check(result: agent_pb2.CandidateResult, folder: Path, repeat: int = 1, asked: generation_pb2.GenerationPlan = ASKED) -> None:
    measurement = job_pb2.Measurement(repeat=repeat, generation=GenerationOptions(tokens=4))
    check_candidate(result, Plan(frozenset({"c"}), 3.0, measurement, generation={"c": asked}), lambda digest: folder / digest)


def test_an_honest_result_is_plausible(tmp_path: Path) -> None:
    check(honest(tmp_path), tmp_path)
    check(honest(tmp_path, 3), tmp_path, repeat=3)
    assert len(list(artifacts_of(honest(tmp_path)))) == 2


SCORED = plan((8, 0), (8, 16))
SCORED.score.MergeFrom(generation_pb2.ScorePlan(tokens=[5, 6, 7, 8], window=64, logits_after=[1, 3], max_time_s=60))


def scores(probabilities: list[float], best: list[int], logits: list[float]) -> bytes:
    return array("f", probabilities).tobytes() + array("i", best).tobytes() + array("f", logits).tobytes()


def check_scores(folder: Path, data: bytes, tokens: int = 4, vocabulary: int = 2) -> None:
    result = honest(folder)
    score = result.generations[0].score
    score.tokens, score.vocabulary = tokens, vocabulary
    score.values.CopyFrom(artifact_of(data))
    (folder / score.values.digest).write_bytes(data)
    check(result, folder, asked=SCORED)


PROBABILITIES, BEST, LOGITS = [-1.0, -0.5, -math.inf, 0.0], [0, 1, 0, 1], [1.0, -math.inf, 3.0, 4.0]


def test_honest_scores_are_plausible(tmp_path: Path) -> None:
    check_scores(tmp_path, scores(PROBABILITIES, BEST, LOGITS))
    check_scores(tmp_path, scores(PROBABILITIES[:2], BEST[:2], LOGITS[:2]), tokens=2)


@pytest.mark.parametrize(
    ("data", "changes", "why"),
    [
        (scores(PROBABILITIES, BEST, LOGITS[:3]), {}, "bytes instead of"),
        (scores(PROBABILITIES, BEST, LOGITS), {"vocabulary": 3}, "bytes instead of"),
        (scores(PROBABILITIES, BEST, LOGITS), {"vocabulary": MAX_VOCAB + 1}, "logits for"),
        (scores(PROBABILITIES, BEST, LOGITS), {"vocabulary": MAX_VOCAB}, "but the model's vocabulary has"),
        (scores(PROBABILITIES, BEST, LOGITS), {"tokens": 5}, "scored tokens, of 4"),
        (scores([], [], []), {"tokens": 0}, "scored tokens, of 4"),
        (scores([math.nan, -1.0, -1.0, 0.0], BEST, LOGITS), {}, "above 1 or NaN"),
        (scores([0.5, -9.0, -1.0, 0.0], BEST, LOGITS), {}, "above 1 or NaN"),
        (scores(PROBABILITIES, [0, 1, 2, 1], LOGITS), {}, "not one that it has logits of"),
        (scores(PROBABILITIES, [0, 1, -1, 1], LOGITS), {}, "not one that it has logits of"),
        (scores(PROBABILITIES, BEST, [1.0, math.nan, 3.0, 4.0]), {}, "NaN or infinity"),
        (scores(PROBABILITIES, BEST, [math.inf, -math.inf, 3.0, 4.0]), {}, "NaN or infinity"),
    ],
)
def test_impossible_scores_are_refused(tmp_path: Path, data: bytes, changes: dict[str, int], why: str) -> None:
    with pytest.raises(ImplausibleResult, match=why):
        check_scores(tmp_path, data, **changes)


def _replace(result: agent_pb2.CandidateResult, folder: Path, name: str, data: bytes) -> None:
    holder = getattr(result.generations[0], name)
    holder.CopyFrom(artifact_of(data))
    (folder / holder.digest).write_bytes(data)


def _add_parts(result: agent_pb2.CandidateResult, _: Path) -> None:
    result.generations[0].points[0].parts.add(method="forward", prefill_ns=[1] * 3, decode_ns=[1] * 3)


def _add_series(telemetry: report_pb2.RunTelemetry) -> None:
    for _ in range(121):
        telemetry.series.add()


def test_more_logits_than_the_vocabulary_are_no_fault_of_the_device(tmp_path: Path) -> None:
    result = honest(tmp_path)
    _replace(result, tmp_path, "tokens", array("i", [ASKED.model.vocab_size + 31] * 24).tobytes())
    check(result, tmp_path)
    _replace(result, tmp_path, "tokens", array("i", [MAX_VOCAB] * 24).tobytes())
    with pytest.raises(ImplausibleResult, match="not below"):
        check(result, tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda result, folder: result.generations.extend(list(result.generations)), "more than were requested"),
        (lambda result, folder: result.generations.pop(), "0 processes"),
        (lambda result, folder: result.generations[0].points.pop(), "prompt lengths"),
        (lambda result, folder: setattr(result.generations[0].points[0], "depth", 7), "prompt lengths"),
        (lambda result, folder: setattr(result.generations[0].points[0], "repetitions", 9), "9 repetitions"),
        (lambda result, folder: result.generations[0].points[0].prefill_ns.append(5), "times of its prompts"),
        (lambda result, folder: result.generations[0].points[0].prefill_ns.__setitem__(0, 99_000), "longer than the time"),
        (lambda result, folder: result.generations[0].decode.traced_ns.extend([5] * 1001), "traced iterations"),
        (lambda result, folder: setattr(result.generations[0].decode, "position", -5), "position -5 instead of 1 at 8"),
        (lambda result, folder: setattr(result.generations[0].prefill, "tokens", 7), "7 tokens at position 0 instead of 8 at 0"),
        (lambda result, folder: _add_series(result.generations[0].telemetry), "points of telemetry"),
        (lambda result, folder: _add_series(result.generations[0].decode.telemetry), "points of telemetry"),
        (lambda result, folder: _replace(result, folder, "token_ns", bytes(8)), "bytes instead of"),
        (lambda result, folder: _replace(result, folder, "token_ns", array("q", [-5] * 24).tobytes()), "negative"),
        (lambda result, folder: _replace(result, folder, "token_ns", array("q", [9_000, 1, 1, 1] * 6).tobytes()), "than half"),
        (lambda result, folder: _replace(result, folder, "token_ns", array("q", [10**12] * 24).tobytes()), "of an attempt"),
        (lambda result, folder: _replace(result, folder, "tokens", array("i", [1 << 24] * 24).tobytes()), "not below 16,777,216"),
        (lambda result, folder: _replace(result, folder, "tokens", array("i", [-1] * 24).tobytes()), "negative"),
        (lambda result, folder: result.samples.CopyFrom(result.generations[0].tokens), "samples of a timed pass"),
        (_add_parts, "not those of the methods"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(
    tmp_path: Path, change: Callable[[agent_pb2.CandidateResult, Path], object], why: str
) -> None:
    result = honest(tmp_path)
    change(result, tmp_path)
    with pytest.raises(ImplausibleResult, match=why):
        check(result, tmp_path)


def test_text_that_the_job_did_not_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImplausibleResult, match="did not request"):
        check_candidate(honest(tmp_path), Plan(frozenset({"c"}), 3.0, job_pb2.Measurement()), lambda digest: tmp_path / digest)


def test_a_point_with_an_error_needs_no_repetition(tmp_path: Path) -> None:
    result = agent_pb2.CandidateResult(cell_id="c")
    result.generations.append(process(tmp_path, ASKED, TIMES[:3]))
    failed = result.generations[0].points[1]
    failed.error.reason = "PROGRAM_FAILED"
    check(result, tmp_path)
    failed.ClearField("error")
    with pytest.raises(ImplausibleResult, match="0 repetitions"):
        check(result, tmp_path)


def test_the_parts_of_a_flow_are_plausible(tmp_path: Path) -> None:
    check(honest(tmp_path, asked=FLOW, encoded=16), tmp_path, asked=FLOW)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts.pop(), "not those of the methods"),
        (lambda parts: setattr(parts[0], "method", "other"), "not those of the methods"),
        (lambda parts: parts[1].decode_ns.pop(), "'token_embedding' are not those of its repetitions"),
        (lambda parts: parts[1].prefill_ns.__setitem__(0, -1), "'token_embedding' are not those"),
        (lambda parts: setattr(parts[2], "decode_executions", -1), "negative number of executions"),
        (lambda parts: parts[0].prefill_ns.__setitem__(1, 90_000), "took longer than the tokens"),
        (lambda parts: parts[2].decode_ns.__setitem__(2, 90_000), "took longer than the tokens"),
    ],
)
def test_impossible_parts_are_a_device_fault(tmp_path: Path, change: Callable[[Any], object], why: str) -> None:
    result = honest(tmp_path, asked=FLOW, encoded=16)
    change(result.generations[0].points[1].parts)
    with pytest.raises(ImplausibleResult, match=why):
        check(result, tmp_path, asked=FLOW)


def encoded(folder: Path, *traces: tuple[str, int, int]) -> agent_pb2.CandidateResult:
    """A result of a vision-language program whose agent traced encoders: name, positions, and the first of them."""
    result = agent_pb2.CandidateResult(cell_id="c", threads=1)
    result.generations.append(process(folder, flow_plan((8, 0)), [[9_000, 1_000, 1_100, 900]] * 3))
    for method, positions, position in traces:
        trace = agent_pb2.GenerationTrace(traced_ns=[4_000], tokens=positions, position=position, etdump=artifact_of(b"etdump"))
        result.generations[0].encoders.add(method=method, trace=trace)
    return result


@pytest.mark.remedy("RESULT_IMPLAUSIBLE")
@pytest.mark.parametrize(
    ("traces", "why"),
    [
        ([], ""),
        ([("vision_encoder", 16, 0)], ""),
        ([("audio_encoder", 16, 0)], "are not those of the program"),
        ([("vision_encoder", 16, 0), ("vision_encoder", 16, 16)], "are not those of the program"),
        ([("vision_encoder", 15, 0)], "its trace of vision_encoder is of 15 tokens"),
        ([("vision_encoder", 16, 5)], "at position 5 instead of 16 at 0"),
    ],
)
def test_traced_encoders_are_those_of_the_program(tmp_path: Path, traces: list[tuple[str, int, int]], why: str) -> None:
    result = encoded(tmp_path, *traces)
    with pytest.raises(ImplausibleResult, match=why) if why else nullcontext():
        check(result, tmp_path, asked=flow_plan((8, 0)))
    if not why:
        assert (artifact_of(b"etdump") in list(artifacts_of(result))) == bool(traces)
