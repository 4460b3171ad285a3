"""The analysis as the child runs it: what it fills, and what one broken part costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from etfarm.server.reports import analyze as analyze_module
from etfarm.server.reports.analyze import prewarm
from etfarm.server.reports.latency.samples import Block
from etfarm.server.reports.request import AnalyzeRequest, CalledMethod, Calls, Further
from etfarm.v1 import report_pb2
from etfarm.wire import tensors
from etfarm.wire.shared_state import PREFIX
from etfarm.wire.tensors import Scalar, Tensor
from tests.support.analyses import analyze_request, analyzed, traced_request, warnings_of
from tests.support.shared_state import counter
from tests.support.traces import Traced, traced

pytestmark = pytest.mark.numeric


def _request(run: Traced, tmp_path: Path) -> AnalyzeRequest:
    samples = tmp_path / "samples"
    samples.write_bytes(np.arange(1000, 1100, dtype="<i8").tobytes())
    stored = tmp_path / "0123abcd"  # the store's names have no suffix
    stored.write_bytes(run.model.read_bytes())
    files = {"model": stored, "inputs": run.inputs, "outputs": run.outputs, "samples": samples}
    return traced_request(run, **files, output_names=("scores", "label"))


def test_a_report_holds_latency_accuracy_profile_and_operators(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    report = analyzed(_request(traced("xnnpack"), tmp_path), tmp_path, events)
    assert warnings_of(report) == []
    assert (report.latency.min_ns, report.latency.p50_ns) == (1000, 1049.5)
    assert not report.latency.p50_ci95_ns, "samples that only grow are worth too few"
    assert report.latency.p10_ns == pytest.approx(1009.9) and report.latency.drift == pytest.approx(67 / 1016, rel=0.01)
    assert 1 <= report.latency.effective_samples < 6
    scores, label = report.accuracy
    assert (scores.output, scores.dtype, list(scores.shape)) == ("scores", "float32", [1, 10])
    assert scores.reference == report_pb2.REFERENCE_EAGER
    assert scores.sqnr_db > 100
    assert scores.max_abs_error < 1e-5
    assert (label.output, label.dtype, label.equal, label.equal_share) == ("label", "int64", True, 1)
    assert not label.HasField("sqnr_db")
    assert report.profile.iterations == 12
    assert report.operators
    filled = {"inputs", "latency", "runs", "accuracy", "profile", "operators", "trace_times"}
    assert {field.name for field, _ in report.ListFields()} == filled
    assert [(event["stage"], event["phase"]) for event in events] == [
        (stage, phase) for stage in ("INPUTS", "STATISTICS", "ACCURACY", "JOIN") for phase in ("START", "END")
    ]
    assert all((event["duration_ms"] is None) == (event["phase"] == "START") for event in events)
    assert all(event["duration_ms"] >= 0 for event in events if event["phase"] == "END")


def test_tracing_is_compared_with_the_run_of_the_same_process(tmp_path: Path) -> None:
    asked = replace(_request(traced("xnnpack"), tmp_path), model=None, quantized=None)
    fast, slow = np.full(400, 10_000, "<i8"), np.full(100, 1_000_000, "<i8")
    assert asked.samples is not None
    asked.samples.write_bytes(np.concatenate([fast, slow]).tobytes())
    report = analyzed(replace(asked, runs=(200, 200, 100)), tmp_path)
    assert report.latency.p50_ns == 10_000 and report.runs[-1].p50_ns == 1_000_000
    assert report.profile.traced_ratio == pytest.approx(report.profile.p50_ns / 1_000_000)
    pooled = analyzed(asked, tmp_path)
    assert pooled.profile.traced_ratio == pytest.approx(report.profile.p50_ns / 10_000)


def test_a_run_without_measurement_has_nothing_but_accuracy_and_what_it_ran_on(tmp_path: Path) -> None:
    request = replace(_request(traced("xnnpack"), tmp_path), etdump=None, samples=None, traced_ns=())
    events: list[dict[str, Any]] = []
    report = analyzed(request, tmp_path, events)
    assert [field.name for field, _ in report.ListFields()] == ["accuracy", "inputs"]
    assert [event["stage"] for event in events] == ["INPUTS", "INPUTS", "ACCURACY", "ACCURACY"]


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(64), b"\xff" * 64])
def test_a_broken_program_costs_the_names_only(tmp_path: Path, data: bytes) -> None:
    broken = tmp_path / "broken.pte"
    broken.write_bytes(data)
    report = analyzed(replace(_request(traced("xnnpack"), tmp_path), pte=broken), tmp_path)
    assert warnings_of(report) == ["ANALYSIS_PROGRAM_UNREADABLE"]
    assert report.operators[0].module == "block"


@pytest.mark.parametrize(
    ("part", "data", "code", "lost"),
    [
        ("model", b"no model", "ANALYSIS_ACCURACY_FAILED", "accuracy"),
        ("samples", bytes(801), "ANALYSIS_STATISTICS_FAILED", "latency"),
        ("etdump", b"no trace", "ANALYSIS_JOIN_FAILED", "operators"),
    ],
)
def test_a_broken_file_costs_its_part_only(tmp_path: Path, part: str, data: bytes, code: str, lost: str) -> None:
    (tmp_path / "broken").write_bytes(data)
    report = analyzed(replace(_request(traced("xnnpack"), tmp_path), **{part: tmp_path / "broken"}), tmp_path)
    assert warnings_of(report) == [code]
    filled = {field.name for field, _ in report.ListFields()}
    assert {"latency", "accuracy", "operators"} - filled == {lost}


@pytest.mark.remedy("REFERENCE_NOT_RUNNABLE")
def test_inputs_that_the_model_does_not_take_are_reported(tmp_path: Path) -> None:
    request = _request(traced("xnnpack"), tmp_path)
    inputs = tmp_path / "inputs.ett"
    inputs.write_bytes(tensors.encode([Scalar("x", 1), Scalar("y", 2)]))
    report = analyzed(replace(request, inputs=inputs), tmp_path)
    assert warnings_of(report) == ["ANALYSIS_ACCURACY_FAILED"]
    assert "takes 1 inputs, but was run with 2" in report.compile.warnings[0].message
    inputs.write_bytes(tensors.encode([Tensor("x", "float32", (1, 3, 16, 16), bytes(4 * 3 * 256))]))
    report = analyzed(replace(request, inputs=inputs), tmp_path)
    assert warnings_of(report) == ["ANALYSIS_ACCURACY_FAILED"]
    assert warnings_of(analyzed(request, tmp_path)) == []


def test_one_output_of_another_shape_keeps_the_others_numbers(tmp_path: Path) -> None:
    request = _request(traced("xnnpack"), tmp_path)
    values = tensors.decode(request.outputs.read_bytes())  # type: ignore[union-attr]
    outputs = tmp_path / "outputs.ett"
    outputs.write_bytes(tensors.encode([Tensor("0", "float32", (10,), values[0].data), values[1]]))  # type: ignore[union-attr]
    report = analyzed(replace(request, outputs=outputs), tmp_path)
    assert warnings_of(report) == ["ANALYSIS_OUTPUTS_DO_NOT_MATCH"]
    scores, label = report.accuracy
    assert (list(scores.shape), scores.HasField("equal"), scores.HasField("sqnr_db")) == ([10], False, False)
    assert label.equal


def _in_turns(tmp_path: Path, *blocks: Block) -> AnalyzeRequest:
    """Samples 1, 2, ... beside a base whose samples are twice as long, in blocks of two."""
    for name, factor in (("own", 1), ("base", 2)):
        (tmp_path / name).write_bytes((factor * np.arange(1, 21, dtype="<i8")).tobytes())
    base = tuple(Block(number, number // 2, 2) for number in range(10))
    samples, base_samples = tmp_path / "own", tmp_path / "base"
    return analyze_request(samples=samples, blocks=blocks or base, base_samples=base_samples, base_blocks=base)


def test_a_slower_group_is_found_within_each_run_and_never_between_runs(tmp_path: Path) -> None:
    calm, shaken = [1_000_000] * 100, [1_000_000, 1_600_000] * 50
    (tmp_path / "runs").write_bytes(np.array(calm + [1_300_000] * 100 + shaken, dtype="<i8").tobytes())
    report = analyzed(replace(_in_turns(tmp_path), samples=tmp_path / "runs", blocks=(), runs=(100, 100, 100)), tmp_path)
    assert [run.HasField("slow_share") for run in report.runs] == [False, False, True]
    assert (report.runs[2].slow_share, report.runs[2].slow_ratio) == (pytest.approx(0.5, abs=0.02), pytest.approx(1.6))
    assert report.latency.slow_share == pytest.approx(1 / 6, abs=0.02), "a process is compared with itself"
    blocks = [Block(round=place, process_pair=place // 2, samples=50) for place in range(4)]
    (tmp_path / "turns").write_bytes(np.array(calm + [1_300_000] * 100, dtype="<i8").tobytes())
    report = analyzed(replace(_in_turns(tmp_path, *blocks), samples=tmp_path / "turns", base_samples=None), tmp_path)
    assert not report.latency.HasField("slow_share")


def test_programs_that_took_turns_are_compared_round_by_round(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    report = analyzed(_in_turns(tmp_path), tmp_path, events)
    result = report.interleaved
    assert (result.ratio, list(result.ratio_ci95), result.rounds, result.process_pairs) == (0.5, [0.5, 0.5], 10, 5)
    assert list(result.ratios) == [0.5] * 10
    assert [event["stage"] for event in events if event["phase"] == "START"] == ["STATISTICS", "COMPARISON"]


def test_blocks_that_do_not_fit_cost_the_comparison_only(tmp_path: Path) -> None:
    report = analyzed(_in_turns(tmp_path, Block(0, 0, 21)), tmp_path)
    assert warnings_of(report) == ["ANALYSIS_COMPARISON_FAILED"]
    assert not report.HasField("interleaved") and report.latency.p50_ns == 10.5


def _accuracy_of(
    folder: Path,
    module: object,
    inputs: list[tensors.Value],
    outputs: list[tensors.Value],
    further: Sequence[tuple[list[tensors.Value], list[tensors.Value]]] = (),
    limit_s: float = 600.0,
    *,
    quantized: bool = False,
    known: tuple[tuple[str, str], ...] = (),
) -> report_pb2.Report:
    import torch

    from etfarm.server.reports.numerics.reference import to_torch

    assert isinstance(module, torch.nn.Module)
    torch.export.save(torch.export.export(module.eval(), tuple(to_torch(value) for value in inputs)), folder / "model.pt2")
    for file, values in (("inputs.ett", inputs), ("outputs.ett", outputs)):
        (folder / file).write_bytes(tensors.encode(values))
    files = [folder / f"inputs-{place}.ett" for place in range(len(further))]
    for path, (sample_inputs, _) in zip(files, further, strict=True):
        path.write_bytes(tensors.encode(sample_inputs))
    (folder / "further.ett").write_bytes(tensors.encode([value for _, sample_outputs in further for value in sample_outputs]))
    request = analyze_request(
        model=folder / "model.pt2", inputs=folder / "inputs.ett", outputs=folder / "outputs.ett", limit_s=limit_s,
        further=Further(tuple(files), folder / "further.ett") if files else None, is_quantized=quantized, known_problems=known,
    )  # fmt: skip
    return analyzed(request, folder)


def test_outputs_that_are_far_from_the_model_are_a_warning_of_the_analysis(tmp_path: Path) -> None:
    import torch

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x + 1

    x = np.array([1, 2, 3], np.float32)
    outputs = [x * 2, np.array([2, np.nan, 4], np.float32)]
    report = _accuracy_of(tmp_path, Doubled(), [tensors.from_array("x", x)], [tensors.from_array("", each) for each in outputs])
    assert warnings_of(report) == ["LOW_ACCURACY"]
    assert "forward is far from the model: 1 has NaN in 1 of 3 elements where" in report.compile.warnings[0].message


@pytest.mark.parametrize(
    ("quantized", "known", "codes"),
    [
        (True, (), ["PART_LOST"]), (False, (), []), (True, (("PART_LOST", "forward leaves nothing of a part of 0"),), []),
        (True, (("FAR_FROM_QUANTIZED_GRAPH", "forward loses nothing"),), ["PART_LOST"]),
    ],
)  # fmt: skip
def test_columns_that_are_lost_over_the_samples_are_named(
    tmp_path: Path, quantized: bool, known: tuple[tuple[str, str], ...], codes: list[str]
) -> None:
    import torch

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2, bias=False)
            self.head.weight.data = torch.tensor([[600.0, 0.0], [0.0, 0.05]])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    rows = np.random.default_rng(0).normal(size=(8, 1, 2)).astype(np.float32)
    step = np.float32(1 if quantized else 1e-3)
    rounded = [np.round(row * np.array([600, 0.05], np.float32) / step) * step for row in rows]
    (first, outputs), *further = [
        ([tensors.from_array("x", row)], [tensors.from_array("y", output)]) for row, output in zip(rows, rounded, strict=True)
    ]
    report = _accuracy_of(tmp_path, Head(), first, outputs, further, quantized=quantized, known=known)
    assert warnings_of(report) == codes
    if codes:
        message = report.compile.warnings[0].message
        assert "forward loses columns 1 of " in message and 'skip_modules = ["head"]' in message


def _counted(values: Sequence[float]) -> list[tuple[list[tensors.Value], list[tensors.Value]]]:
    """Return inputs of a counter with the outputs of its first call."""
    arrays = [np.array([value], np.float32) for value in values]
    return [([tensors.from_array("x", array)], [tensors.from_array("y", array + 1)]) for array in arrays]


def _counter() -> object:
    import torch

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    return Counter()


def test_each_sample_starts_from_the_exported_state(tmp_path: Path) -> None:
    (first, outputs), *further = _counted([1, 10, 20])
    report = _accuracy_of(tmp_path, _counter(), first, outputs, further)
    (row,) = report.accuracy
    assert (row.samples, row.equal, warnings_of(report)) == (3, True, [])


def test_samples_that_are_left_out_are_reported_with_the_reason(tmp_path: Path) -> None:
    (first, outputs), *further = _counted([1, 10, 20])
    late = _accuracy_of(tmp_path, _counter(), first, outputs, further, limit_s=0.0)
    assert late.accuracy[0].samples == 1 and warnings_of(late) == ["ANALYSIS_SAMPLES_LEFT_OUT"]
    assert "is over 1 of 3 samples" in late.compile.warnings[0].message
    misfit: list[tensors.Value] = [tensors.from_array("x", np.zeros((2, 2), np.float32))]
    refused = _accuracy_of(tmp_path, _counter(), first, outputs, [further[0], (misfit, further[1][1])])
    assert refused.accuracy[0].samples == 2 and warnings_of(refused) == ["ANALYSIS_SAMPLES_LEFT_OUT"]
    assert "is over 2 of 3 samples: torch cannot run" in refused.compile.warnings[0].message


def test_the_number_of_samples_in_time_is_a_power_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, outputs), *further = _counted(range(12))
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), perf_counter=time.perf_counter)
    monkeypatch.setattr(analyze_module, "time", clock)
    # Each comparison takes a second: seven of them are within the limit, of which four are kept.
    report = _accuracy_of(tmp_path, _counter(), first, outputs, further, limit_s=6.5)
    assert report.accuracy[0].samples == 4 and warnings_of(report) == ["ANALYSIS_SAMPLES_LEFT_OUT"]
    assert "is over 4 of 12 samples: PyTorch" in report.compile.warnings[0].message


@pytest.mark.parametrize(("values", "samples"), [(7, 3), (4, 3), (3, 2), (1, 1)])
def test_only_whole_outputs_of_the_samples_are_compared(tmp_path: Path, values: int, samples: int) -> None:
    import torch

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x * 2

    (first, (y,)), *further = _counted([1, 10, 20])
    sampled = [(further[0][0], [y] * values), (further[1][0], [])]
    report = _accuracy_of(tmp_path, Two(), first, [y, y], sampled)
    assert [row.samples for row in report.accuracy] == [samples] * 2 and set(warnings_of(report)) <= {"LOW_ACCURACY"}


@pytest.mark.parametrize(
    ("share", "is_quantized", "words"),
    [
        (1.0, False, ""),
        (0.2, False, "On the device, in the calls set, add, get, the last one differs from eager PyTorch: y has "),
        (
            0.5,
            True,
            "On the device, in the calls set, add, get, the last one is far from the model: y has",
        ),
        (0.95, True, ""),
    ],
)
def test_calls_continue_the_state_of_those_before(tmp_path: Path, share: float, is_quantized: bool, words: str) -> None:
    from etfarm.client.export import export_source

    methods = export_source(counter(), name="m").methods
    for method, exported in methods.items():
        (tmp_path / f"{method}.pt2").write_bytes(exported.pt2)  # type: ignore[arg-type]
    calls = {"set": (5, 10), "add": (1, 2), "get": (10, 20)}
    for method, numbers in calls.items():
        (tmp_path / method).write_bytes(tensors.encode([tensors.from_array("x", np.array(numbers, np.float32))]))
    outputs = [(105, 110), (106, 112), (60 * share, 240 * share)]
    values = [tensors.from_array("out", np.array(numbers, np.float32)) for numbers in outputs]
    (tmp_path / "outputs").write_bytes(tensors.encode(values))
    called = tuple(CalledMethod(name, tmp_path / f"{name}.pt2", ("y",)) for name in methods)
    inputs = tuple((method, tmp_path / method) for method in calls)
    wanted = Calls(called, inputs, tmp_path / "outputs", (f"{PREFIX}state.n",), is_quantized)
    report = analyzed(analyze_request(method="get", calls=wanted), tmp_path)
    assert warnings_of(report) == ["CALLS_DIFFER"] * bool(words)
    assert all(warning.message.startswith(words) for warning in report.compile.warnings)


def test_the_reference_takes_channels_last_and_scalars_and_gives_bfloat16(tmp_path: Path) -> None:
    import torch

    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: float, bias: None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return (x * factor).to(torch.bfloat16), x > 5, x.sum()

    array = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    x = tensors.from_array("x", array, (0, 2, 3, 1))
    outputs: list[tensors.Value] = [
        tensors.from_array("scaled", (array * 2.5).astype(tensors.dtype_of("bfloat16"))),
        tensors.from_array("large", array > 5),
        Scalar("total", 276.0),
    ]
    report = _accuracy_of(tmp_path, Mixed(), [x, Scalar("factor", 2.5), Scalar("bias", None)], outputs)
    assert warnings_of(report) == []
    assert [(row.output, row.dtype, row.equal, row.sqnr_db, row.equal_share) for row in report.accuracy] == [
        ("scaled", "bfloat16", True, 300, 0), ("large", "bool", True, 0, 1), ("total", "float64", True, 300, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("widths", "agreements"), [((4, 2), [True, False]), ((4, 10), [False, False])])
def test_top_1_is_reported_if_a_single_output_can_be_scores(
    widths: tuple[int, int], agreements: list[bool], tmp_path: Path
) -> None:
    import torch

    class Split(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[:, : widths[0]] * 2, x[:, widths[0] :] * 2

    array = np.arange(3 * sum(widths), dtype=np.float32).reshape(3, -1)
    parts = np.split(array * 2, [widths[0]], axis=1)
    outputs: list[tensors.Value] = [tensors.from_array(name, part) for name, part in zip("ab", parts, strict=True)]
    report = _accuracy_of(tmp_path, Split(), [tensors.from_array("x", array)], outputs)
    assert [row.HasField("top1_agreement") for row in report.accuracy] == agreements
    assert all(row.equal for row in report.accuracy)


def test_a_warm_analysis_is_quick(tmp_path: Path) -> None:
    request = _request(traced("int8"), tmp_path)
    prewarm()
    analyzed(request, tmp_path)
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 0.6 and len(took_s) < 10):  # the machine may stand still in one of them
        start = time.perf_counter()
        analyzed(request, tmp_path)
        took_s.append(time.perf_counter() - start)
    assert min(took_s) < 0.6, took_s
