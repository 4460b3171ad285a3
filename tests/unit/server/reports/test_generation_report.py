"""The report of generated text: from the files of processes to rates with intervals and verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.reports.findings import require_generation
from etfarm.server.reports.generation import fill_generation
from etfarm.server.reports.latency.samples import GeneratingProcess, Generation
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import agent_pb2, generation_pb2, report_pb2
from tests.support import analyses
from tests.support.analyses import analyze_request
from tests.support.generated import flow_plan, plan, process

VALID = report_pb2.VERDICT_STATUS_VALID
INVALID = report_pb2.VERDICT_STATUS_INVALID
ASKED = plan((8, 0), (8, 16))


def times(*steps: int, first: int = 8_000) -> list[list[int]]:
    """Return the times of three repetitions of two points; each step is that of a process's repetition in turn."""
    return [[first, step, step, step] for step in (*steps, *steps)]


def request(asked: generation_pb2.GenerationPlan, folder: Path, result: agent_pb2.CandidateResult) -> AnalyzeRequest:
    processes = tuple(
        GeneratingProcess(
            folder / each.token_ns.digest, folder / each.tokens.digest, tuple(tuple(point.prefill_ns) for point in each.points)
        )
        for each in result.generations
    )
    asked_for = Generation(tuple(point.prompt_tokens for point in asked.points), asked.generated_tokens, processes)
    return analyze_request(generation=asked_for)


def analyzed(folder: Path, result: agent_pb2.CandidateResult, asked: generation_pb2.GenerationPlan = ASKED) -> report_pb2.Report:
    """Return what the child computes of the results' files, as the server accepts it."""
    wanted = request(asked, folder, result)
    report = analyses.analyzed(wanted, folder)
    assert not report.compile.warnings
    require_generation(report, wanted)
    return report


def reported(folder: Path, result: agent_pb2.CandidateResult, **options: Any) -> report_pb2.Report:
    report = report_pb2.Report()
    requested = options.pop("requested", len(result.generations))
    fill_generation(
        report, ASKED, result, analyzed(folder, result).generation, requested=requested,
        **{"emulated": False, "thresholds": Thresholds(), **options},
    )  # fmt: skip
    return report


def measured(folder: Path, *processes: list[list[int]], **changes: Any) -> agent_pb2.CandidateResult:
    result = agent_pb2.CandidateResult(cell_id="c", threads=1)
    result.generations.extend(process(folder, ASKED, each, **changes) for each in processes)
    return result


def test_a_rate_leaves_the_first_token_out_and_its_interval_is_over_repetitions(tmp_path: Path) -> None:
    report = reported(tmp_path, measured(tmp_path, times(1_000, 1_010, 990)))
    first, second = report.generation.points
    assert (first.prompt_tokens, first.depth, second.depth, first.repetitions) == (8, 0, 16, 3)
    assert first.decode_tokens_per_s == pytest.approx(1e6, rel=1e-3), "3 tokens in 3 us"
    assert first.prefill_tokens_per_s == pytest.approx(8e9 / 7_980)
    assert first.ttft_ns == pytest.approx(8_000)
    low, high = first.decode_tokens_per_s_ci95
    assert low < 0.99e6 and high > 1.01e6, "Student's t of 3 repetitions is wide"
    assert list(first.token_ns) == [8_000, 1_000, 1_000, 1_000] and first.tokens_equal
    assert first.verdict.status == report.verdict.status == VALID
    assert report.generation.generated_tokens == 4 and len(report.generation.token_times) == 1


def test_with_three_processes_the_interval_is_over_the_processes(tmp_path: Path) -> None:
    result = measured(tmp_path, times(1_000, 1_001, 999), times(1_100, 1_101, 1_099), times(900, 901, 899))
    (first, _) = reported(tmp_path, result).generation.points
    assert first.repetitions == 9 and len(first.runs) == 3
    assert [round(run.decode_tokens_per_s / 1e3) for run in first.runs] == [1_000, 909, 1_111]
    low, high = first.decode_tokens_per_s_ci95
    assert high / low > 1.4, "processes differ by 10 %, their repetitions by 0.1 %"


def test_a_disturbed_process_does_not_count(tmp_path: Path) -> None:
    result = measured(
        tmp_path, times(1_000, 1_001, 999), times(5_000, 5_001, 4_999), times(1_000, 1_001, 999), times(1_000, 1_001, 999)
    )
    for point in result.generations[1].points:
        point.telemetry.wall_time_ns, point.telemetry.cpu_time_ns = 10**9, 10**8
    report = reported(tmp_path, result)
    assert report.generation.points[0].decode_tokens_per_s == pytest.approx(1e6, rel=1e-3)
    assert report.generation.points[0].runs[1].verdict.reasons[0].code == "CPU_STARVED"
    assert report.verdict.status == VALID, "three valid processes of four are enough"


def test_repetitions_with_other_tokens_are_invalid(tmp_path: Path) -> None:
    result = measured(tmp_path, times(1_000, 1_001, 999), times(1_000, 1_001, 999))
    other = process(tmp_path, ASKED, times(1_000, 1_001, 999), tokens=[3, 2, 1, 0])
    result.generations[1].tokens.CopyFrom(other.tokens)
    report = reported(tmp_path, result)
    assert report.verdict.status == INVALID and not report.generation.points[0].tokens_equal
    assert [reason.code for reason in report.verdict.reasons] == ["OUTPUTS_DIFFER"]


def test_a_reason_of_one_point_names_it(tmp_path: Path) -> None:
    unsteady = [*times(1_000, 1_001, 999)[:3], *times(1_000, 3_000, 2_000)[3:]]
    report = reported(tmp_path, measured(tmp_path, unsteady))
    (reason,) = report.verdict.reasons
    assert reason.code == "TOO_FEW_SAMPLES" and reason.message.startswith("With prompt 8 at depth 16: The interval of decode")
    assert report.generation.points[0].verdict.status == VALID


def test_an_emulated_device_is_not_benchmarkable(tmp_path: Path) -> None:
    report = reported(tmp_path, measured(tmp_path, times(1_000, 1_001, 999)), emulated=True)
    assert report.verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    assert [reason.code for reason in report.verdict.reasons] == ["EMULATED"]


def test_missing_processes_are_a_warning(tmp_path: Path) -> None:
    report = reported(tmp_path, measured(tmp_path, times(1_000, 1_001, 999)), requested=3)
    assert [warning.code for warning in report.compile.warnings] == ["RUNS_NOT_REPEATED"]


def test_a_failed_point_keeps_the_others(tmp_path: Path) -> None:
    result = agent_pb2.CandidateResult(cell_id="c", threads=1)
    result.generations.append(process(tmp_path, ASKED, times(1_000, 1_001, 999)[:3]))
    result.generations[0].points[1].error.reason = "PROGRAM_FAILED"
    report = reported(tmp_path, result)
    first, second = report.generation.points
    assert first.decode_tokens_per_s and not second.HasField("decode_tokens_per_s")
    assert second.error.reason == "PROGRAM_FAILED" and second.verdict.status == INVALID and first.verdict.status == VALID


@pytest.mark.parametrize(
    "change",
    [
        lambda points: points.pop(),
        lambda points: points[0].runs.add(),
        lambda points: points[0].token_ns.append(1.0),
        lambda points: points[0].token_ns.__setitem__(1, math.nan),
        lambda points: points[0].token_ns.__setitem__(1, -1.0),
        lambda points: setattr(points[0].runs[0], "ttft_ns", math.nan),
        lambda points: setattr(points[0].runs[0], "ttft_ns", -1.0),
        lambda points: points[0].runs[0].decode_tokens_per_s_ci95.pop(),
        lambda points: points[0].runs[0].ClearField("ttft_ns"),
    ],
)
def test_a_childs_impossible_answer_is_refused(tmp_path: Path, change: Any) -> None:
    result = measured(tmp_path, times(1_000, 1_010, 990))
    report = analyzed(tmp_path, result)
    change(report.generation.points)
    with pytest.raises(BadWorkerAnswer):
        require_generation(report, request(ASKED, tmp_path, result))


def test_times_that_differ_by_all_orders_of_magnitude_are_accepted(tmp_path: Path) -> None:
    report = reported(tmp_path, measured(tmp_path, times(0, 0, 1 << 60)))
    low, high = report.generation.points[0].decode_tokens_per_s_ci95
    assert 0 < low < high < math.inf and report.verdict.status == INVALID


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    result = measured(tmp_path, times(1_000, 1_010, 990))
    (tmp_path / result.generations[0].token_ns.digest).write_bytes(bytes(8))
    report = analyses.analyzed(request(ASKED, tmp_path, result), tmp_path)
    assert [warning.code for warning in report.compile.warnings] == ["ANALYSIS_GENERATION_FAILED"]


def test_each_method_of_a_flow_has_its_part(tmp_path: Path) -> None:
    asked = flow_plan((8, 0))
    result = agent_pb2.CandidateResult(cell_id="c", threads=1)
    rows = [[8_000, step, step, step] for step in (1_000, 1_010, 990)]
    result.generations.extend(process(tmp_path, asked, rows) for _ in range(2))
    report = report_pb2.Report()
    analysis = analyzed(tmp_path, result, asked).generation
    fill_generation(report, asked, result, analysis, requested=2, emulated=False, thresholds=Thresholds())
    (point,) = report.generation.points
    encoder, embedding, decoder = point.parts
    assert [part.method for part in point.parts] == ["vision_encoder", "token_embedding", "text_decoder"]
    assert (encoder.prefill_executions, encoder.decode_executions) == (1, 0)
    assert encoder.prefill_ns == pytest.approx(4_000) and encoder.prefill_share == pytest.approx(0.5)
    assert not encoder.HasField("decode_ns") and not encoder.HasField("decode_share")
    assert embedding.prefill_share == pytest.approx(0.125)
    assert (decoder.prefill_executions, decoder.decode_executions) == (2, 3)
    assert decoder.decode_ns == pytest.approx(500, rel=1e-2) and decoder.decode_share == pytest.approx(0.5, rel=1e-2)
    low, high = decoder.decode_ci95_ns
    assert low < decoder.decode_ns < high, "over the repetitions, since there are two processes"


@pytest.mark.parametrize(
    ("dtype", "sqnr_db", "codes"),
    [
        ("bfloat16", 31.0, []), ("bfloat16", 19.0, ["LOW_ACCURACY"]), ("float32", 31.0, ["LOW_ACCURACY"]),
        ("float32", None, ["LOW_ACCURACY"]),  # NaN, which has no error
    ],
)  # fmt: skip
def test_logits_are_judged_by_what_their_dtype_can_hold(
    tmp_path: Path, dtype: str, sqnr_db: float | None, codes: list[str]
) -> None:
    asked = plan((8, 0))
    asked.score.is_text = False
    result = agent_pb2.CandidateResult(cell_id="c", threads=1)
    result.generations.append(process(tmp_path, asked, [[8_000, *[1_000] * 3]]))
    result.generations[0].score.values.digest = "a" * 64
    analysis = analyzed(tmp_path, result, asked).generation
    reference = analysis.accuracy.references.add(
        reference=report_pb2.REFERENCE_EAGER, tokens=4, top1_agreement=1, logits_tokens=1
    )
    if sqnr_db is not None:
        reference.sqnr_db, reference.max_abs_error = sqnr_db, 0.1
    report = report_pb2.Report()
    fill_generation(report, asked, result, analysis, requested=1, emulated=False, thresholds=Thresholds(), dtype=dtype)
    assert [warning.code for warning in report.compile.warnings] == codes
