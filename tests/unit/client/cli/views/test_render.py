"""Reports as people read them, from documents of etfarm.report/1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from etfarm.client.cli.commands import jobs
from etfarm.client.cli.terminal import output
from etfarm.client.cli.terminal.display import LiveDisplay, PlainDisplay
from etfarm.client.cli.views import render
from etfarm.client.formats import phases, units
from etfarm.client.models import Cell, CellChanged, CellState, JobInfo, JobState, Progress
from etfarm.wire.delegation import undelegated_reason
from etfarm.wire.errors import Fault, error_of
from tests.support.documents import completed


def _row(index: int, kind: str, name: str, share: float, p50_ns: float | None, **more: Any) -> dict[str, Any]:
    return {"index": index, "kind": kind, "name": name, "share": share, "p50_ns": p50_ns, **more}


def _document(**changes: Any) -> dict[str, Any]:
    message = {
        "id": "r1", "cell": "c1", "recipe": "xnnpack_fp32", "method": "forward", "threads": 4, "state": "SUCCEEDED",
        "model": {"name": "resnet8", "digest": "0" * 64},
        "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76", "os": "Linux", "cores": 4},
        "latency": {"samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000, "p50_ci95_ns": [1_820_000, 1_860_000]},
        "profile": {"iterations": 10, "p50_ns": 1_880_000},
        "verdict": {"status": "VALID"},
        "operators": [
            _row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True),
            _row(1, "KERNEL", "Convolution (NHWC, F32) IGEMM #2", 0.412, 760_000, parent=0, backend="XnnpackBackend",
                 source={"file": "models/resnet.py", "line": 31, "code": "y = self.conv2(y)"}),
            _row(2, "KERNEL", "Add (ND) #1", 0.001, None, parent=0, backend="XnnpackBackend", resolution_ns=1000.0),
            _row(3, "REST", "REST", 0.387, 727_000, parent=0),
            _row(4, "OPERATOR", "aten.mean.dim", 0.18, 330_000,
                 source={"file": "models/resnet.py", "line": 44, "code": "y = y.mean((2, 3))"}),
            _row(5, "REST", "REST", 0.02, 46_000),
        ],
        "compile": {
            "cached": True,
            "stages": [{"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "SERVER"}],
            "program": {"digest": "1" * 64, "size_bytes": 320_512},
            "delegation": {"forward": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1}},
            "warnings": [{"code": "ONE_SAMPLE", "message": "forward was calibrated with one input."}],
        },
        "accuracy": [{"output": "linear", "reference": "program before quantization", "sqnr_db": 38.21, "max_abs_error": 0.0012}],
        "memory": {"peak_rss_bytes": 8 << 20, "planned_bytes": [24_800]},
    }  # fmt: skip
    message.update(changes)
    return completed(message)


def _text(document: dict[str, Any], width: int = 120, **options: Any) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(render.report(document, width=width, **options))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_the_answer_is_the_first_line() -> None:
    first = _text(_document()).splitlines()[0]
    assert first.startswith("resnet8 · xnnpack_fp32 · pi5-a (cortex-a76, 4 threads)")
    assert first.endswith("p50 1.84 ms [1.82, 1.86]  VALID  543 samples  traced 1.88 ms")


def test_times_have_their_precision_and_fit_their_shares() -> None:
    document = _document()
    whole_ns = 1_880_000.0
    for row, part in zip(document["operators"], (0.01, 0.012, 0.5, 0.0, 0.2, 0.001), strict=True):
        row["mean_ns"] = row["share"] * whole_ns
        row["mean_ci95_ns"] = [row["mean_ns"] * (1 - part), row["mean_ns"] * (1 + part)]
    document["profile"] |= {"mean_ns": whole_ns, "traced_ratio": 1.02}
    lines = _text(document, width=140).splitlines()
    assert lines[0].rstrip().endswith("traced 1.88 ms"), "the ratio is not one of the two times shown here"
    assert lines[2].startswith("  1  41.2 %   775 µs  ±1.2 %    Convolution")
    assert lines[3].startswith("     38.7 %   728 µs ±<0.1 %    not explained by its kernels")
    assert lines[4].startswith("  2   0.1 %     2 µs   ±50 %")


def test_the_traced_pass_has_a_verdict_and_its_cost() -> None:
    reason = {"code": "TRACING_SLOW", "message": "Traced iterations took 2.40 times as long as untraced ones."}
    profile = {
        "iterations": 100, "p50_ns": 1e5, "mean_ns": 1e5, "traced_ratio": 2.4, "events": 400, "event_cost_ns": 150.0,
        "verdict": {"status": "INVALID", "reasons": [reason]},
    }  # fmt: skip
    text = _text(_document(profile=profile), width=140)
    assert "operators  Traced iterations took 2.40 times as long as untraced ones. Compare the operators' times" in text
    cost = "median 100 µs, 2.40 times the untraced one of the same process, 0.15 µs for each of 400 events"
    assert f"traced    100 iterations, {cost}" in text


def test_operators_come_by_share_with_kernels_under_their_delegate() -> None:
    lines = _text(_document()).splitlines()[1:7]
    assert [line.split()[0] for line in lines] == ["0", "1", "38.7", "2", "4", "2.0"]
    assert lines[1] == (
        "  1  41.2 %    760 µs    Convolution (NHWC, F32) IGEMM #2            models/resnet.py:31  y = self.conv2(y)"
    )
    assert "<1.00 µs" in lines[3]
    assert "portable" in lines[4] and "models/resnet.py:44  y = y.mean((2, 3))" in lines[4]


@pytest.mark.parametrize(
    ("values_ns", "shown"),
    [
        ([50.0, 34.2, None], ["50.0 ns", "34.2 ns", ""]),
        ([999_000.0, 34.0], ["999.0 µs", "34.0 ns"]),
        ([2_000_000.0, 600.0, 450.0], ["2000 µs", "1 µs", "450 ns"]),
        ([12_000_000.0, 4_000.0], ["12.00 ms", "4.00 µs"]),
        ([0.4], ["0.4 ns"]),
        ([0.0], ["0 ns"]),
        ([None], [""]),
    ],
)
def test_a_columns_times_have_one_unit_and_are_never_0_where_something_took_time(
    values_ns: list[float | None], shown: list[str]
) -> None:
    assert units.column(values_ns) == shown


def test_only_the_largest_are_shown_and_the_rest_is_counted() -> None:
    text = _text(_document(), top=1, job="j1")
    assert "aten.mean.dim" not in text
    assert "and 4 more, 58.8 % together: etfarm report show j1 --top 0" in text
    assert "more," not in _text(_document(), top=0)


@pytest.mark.parametrize("width", [80, 100, 130, 160])
def test_nothing_is_wider_than_the_terminal_and_no_row_wraps(width: int) -> None:
    lines = _text(_document(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("IGEMM" in line for line in lines) == sum("#2" in line for line in lines)


def test_a_narrow_terminal_keeps_the_place_and_leaves_out_the_code() -> None:
    text = _text(_document(), 80)
    assert "models/resnet.py:31" in text
    assert "y = self.conv2(y)" not in text


def test_the_facts_are_told_with_their_units() -> None:
    text = _text(_document())
    assert "linear: SQNR 38.2 dB, max abs error 0.0012, against the program before quantization" in text
    assert "peak 8.00 MiB, planned 24.2 KiB" in text
    assert "cached; took TO_EXECUTORCH 195 ms" in text
    assert "313 KiB, 36 of 37 nodes delegated in 1 subgraph, 80.0 % of the time" in text
    assert "forward was calibrated with one input." in text


def test_inputs_that_nobody_gave_are_called_made_up() -> None:
    assert "inputs    generated by the runner, seed 0" in _text(_document(inputs={}))
    assert "made up" not in _text(_document())


def test_inputs_are_told_by_name_dtype_and_shape() -> None:
    values = [{"name": name, "dtype": "float32", "shape": [1, 8]} for name in "abcde"]
    values[1] = {"name": "", "dtype": "bool scalar"}
    text = _text(_document(inputs={"digest": "1" * 64, "tensors": values}))
    assert "inputs    a float32[1, 8], 1 bool scalar, c float32[1, 8], d float32[1, 8], and 1 more" in text


def test_a_verdict_says_what_to_do() -> None:
    reason = {"code": "CPU_PRESSURE", "message": "Some task waited."}
    text = _text(_document(verdict={"status": "INVALID", "reasons": [reason]}))
    assert "INVALID" in text.splitlines()[0]
    assert "Some task waited. Stop other programs on the device." in text


def _measured(**changes: Any) -> dict[str, Any]:
    latency = {
        "samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000, "p50_ci95_ns": [1_820_000, 1_860_000],
        "p10_ns": 1_800_000, "p90_ns": 1_900_000, "p99_ns": 2_500_000, "drift": -0.021, "effective_samples": 41.7,
    }  # fmt: skip
    measurement = {"warmup": 3895, "iterations": 543, "duration_ns": 10**9, "steady": True, "warmup_ns": 251_000_000}
    return _document(latency=latency, measurement=measurement, **changes)


def test_the_spread_tells_percentiles_drift_and_what_the_samples_are_worth() -> None:
    text = _text(_measured())
    assert "p10 1.80 ms · p90 1.90 ms · p99 2.50 ms · drift -2.1 % · worth 42 independent samples" in text
    assert "3,895 iterations in 251 ms, until steady" in text


def test_a_timed_pass_that_went_on_until_its_times_settled_says_so() -> None:
    measurement = {"warmup": 10, "iterations": 2000, "duration_ns": 4 * 10**9, "stop_reason": "SETTLED"}
    assert "timed     for 4.00 s, longer than asked for, until the times settled" in _text(_document(measurement=measurement))
    assert "settled" not in _text(_document(measurement=measurement | {"stop_reason": "ENOUGH"}))


def test_what_was_not_measured_of_the_spread_is_left_out() -> None:
    few = {"samples_ns": [10, 11], "p50_ns": 10, "drift": 0.00001, "effective_samples": 2}
    text = _text(_document(latency=few, measurement={"warmup": 10, "iterations": 2}))
    assert "spread    drift 0.0 %" in text and "worth" not in text
    assert "warm-up   10 iterations" in text and "steady" not in text
    assert "spread" not in _text(_document(latency={"samples_ns": [10], "p50_ns": 10}))


@pytest.mark.parametrize("width", [80, 100])
def test_state_that_a_program_keeps_is_told_in_a_sentence(width: int) -> None:
    difference = {
        "output": "count", "one": "FIRST", "other": "TIMED_LAST", "differing": 1, "elements": 1, "max_abs_difference": 553.0
    }  # fmt: skip
    measurement = {"warmup": 10, "repeatability": {"outcome": "KEEPS_STATE", "differences": [difference]}}
    text = _text(_document(measurement=measurement), width)
    assert max(map(len, text.splitlines())) <= width
    assert "The program keeps state" in " ".join(text.split())
    assert "Output 'count' differs by up to 553 between the first execution and the last timed one." in " ".join(text.split())


def test_what_the_verdict_says_of_outputs_is_not_said_again() -> None:
    reason = {"code": "OUTPUTS_DIFFER", "message": "Passes over the same inputs gave different outputs."}
    assert "by rounding only" in _text(_document(measurement={"warmup": 10, "repeatability": {"outcome": "ROUNDING"}}))
    measurement = {"warmup": 10, "repeatability": {"outcome": "NONDETERMINISTIC"}}
    verdict = {"status": "INVALID", "reasons": [reason]}
    assert "repeated" not in _text(_document(measurement=measurement, verdict=verdict))
    assert "nondeterministic" in _text(_document(measurement=measurement))


def test_waits_and_settings_that_were_not_applied_have_a_line_each() -> None:
    waits = [
        {"gate": "COOL_DOWN", "waited_ms": 1000.0, "passed": True},
        {"gate": "COOL", "waited_ms": 12_000.0, "passed": True, "measured": 59.5, "threshold": 60.0},
        {"gate": "IDLE", "waited_ms": 10_000.0, "passed": False, "measured": 0.5, "threshold": 0.15},
    ]
    setting = {"name": "governor", "cpus": "0-3", "found": "powersave", "wanted": "performance"}
    settings = [{**setting, "applied": False, "why": "the agent may not write it"}, {**setting, "cpus": "4-7", "applied": True}]
    text = _text(_document(telemetry={"waits": waits, "settings": settings}), 160)
    reported = "12.0 s until the device was below 60 °C; 10.0 s for the device to be idle, in vain: 0.50 tasks per cpu"
    assert f"waited    {reported}" in text
    assert "settings  the governor of cpus 0-3 stayed powersave instead of performance: the agent may not write it" in text


def test_reasons_with_one_remedy_say_it_once() -> None:
    reasons = [{"code": code, "message": f"{code}."} for code in ("CPU_PRESSURE", "BACKGROUND_LOAD", "CPU_STOLEN")]
    text = _text(_measured(verdict={"status": "INVALID", "reasons": reasons}))
    assert text.count("Stop other programs on the device.") == 1
    assert "CPU_STOLEN. Use a device on another host" in text


def test_what_a_disturbance_brings_about_has_no_remedy_of_its_own() -> None:
    few, load, late = ({"code": code, "message": f"{code}."} for code in ("TOO_FEW_SAMPLES", "BACKGROUND_LOAD", "NOT_STEADY"))
    text = _text(_measured(verdict={"status": "INVALID", "reasons": [few, load, late]}))
    assert "--iterations" in text and "Stop other programs" in text and "--warmup" not in text
    text = _text(_measured(verdict={"status": "INVALID", "reasons": [late]}))
    assert "NOT_STEADY. Warm up for longer: give --warmup more than the 3,895 of this run." in text


@pytest.mark.parametrize(
    "code", ["BACKGROUND_LOAD", "FREQUENCY_MOVED", "THERMAL_THROTTLED", "DRIFT", "NOT_STEADY", "CPU_STOLEN", "TOO_FEW_SAMPLES"]
)
def test_every_reason_of_a_verdict_has_a_remedy(code: str) -> None:
    verdict = {"status": "INVALID", "reasons": [{"code": code, "message": "It was so."}]}
    assert len(" ".join(_text(_document(verdict=verdict)).split("It was so.")[1].splitlines()[0].split())) > 20


def test_a_pass_that_a_limit_ended_says_so_and_gets_no_remedy_that_cannot_help() -> None:
    measurement = {"warmup": 10, "iterations": 1_000_000, "duration_ns": 450_000_000, "stop_reason": "MAX_SAMPLES"}
    reason = {"code": "TOO_FEW_SAMPLES", "message": "The median has no interval."}
    text = _text(_document(measurement=measurement, verdict={"status": "INVALID", "reasons": [reason]}))
    assert "timed     450 ms, up to the limit of samples: 1,000,000 samples" in text
    assert "It has as many samples as a pass keeps. Stop other programs on the device." in text and "--min-time" not in text


def test_a_failed_cell_is_its_error_with_the_remedy() -> None:
    empty: dict[str, Any] = dict.fromkeys(("latency", "profile", "verdict", "operators", "compile", "accuracy", "memory"))
    error = {
        "fault": "FAULT_USER",
        "reason": "PROGRAM_CRASHED",
        "message": "The program was killed.",
        "remedy": "Look at the log.",
    }
    text = _text(_document(state="FAILED", error=error, **empty))
    assert text.splitlines()[0].endswith("FAILED")
    assert "PROGRAM_CRASHED The program was killed. Look at the log." in text


def _place(file: str = "net.py", line: int = 7, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"source": {"file": file, "line": line, "code": f"y = line_{line}(x)"}, "count": count, **more}


def _operator(op: str, outside: int, *places: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "delegated": 0, "non_delegated": outside, "places": places}


def _compiled(**changes: Any) -> dict[str, Any]:
    operators = [
        _operator("aten_cumsum_default", 2, _place(line=9), _place(line=12)),
        _operator("aten_sin_default", 1, {"module": "head", "count": 1}),
        _operator("getitem", 3),
    ]
    return {
        "stages": [
            {"stage": "TORCH_EXPORT", "duration_ms": 30.0, "where": "CLIENT", "methods": {"encode": 10.0, "decode": 20.0}},
            {"stage": "QUANTIZE", "duration_ms": 1500.0, "where": "SERVER", "cached": True},
            {"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "SERVER"},
        ],
        "program": {"digest": "1" * 64, "size_bytes": 320_512},
        "sizes": {
            "program_bytes": 4096, "constant_bytes": 0, "delegate_bytes": 300_000,
            "methods": {"encode": {"delegate_bytes": 100_000, "planned_bytes": [1024, 1024]},
                        "decode": {"delegate_bytes": 200_000, "planned_bytes": [4096]}},
        },
        "data": {"weights": {"digest": "2" * 64, "size_bytes": 3 << 20}},
        "delegation": {
            "encode": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1},
            "decode": {"subgraphs": 2, "delegated_nodes": 6, "non_delegated_nodes": 6, "operators": operators},
        },
        "stayed_fp32": {"decode": {"operators": [{"op": "aten_softmax", "count": 4, "places": [_place(line=21)]}]}},
        "checks": [
            {"method": "encode", "inputs": "EXAMPLE", "shapes": ["1x3x8x8"], "ran": True,
             "outputs": [{"output": "a", "sqnr_db": 50.0, "max_abs_error": 0.01},
                         {"output": "b", "sqnr_db": 38.25, "max_abs_error": 0.2}]},
            {"method": "decode", "inputs": "MAX", "ran": False, "why": "the kernel is missing."},
            {"method": "decode", "inputs": "MIN", "ran": True, "outputs": [{"output": "a", "equal": True}]},
        ],
        "warnings": [{"code": "ONE_SAMPLE", "message": "decode was calibrated with one input."}],
        **changes,
    }  # fmt: skip


def _compilation(width: int = 120, **changes: Any) -> list[str]:
    nothing = dict.fromkeys(("latency", "profile", "verdict", "operators", "accuracy", "memory", "device", "threads"))
    values = {key: value for key, value in nothing.items() if value is not None}
    document = _document(compile=_compiled(**changes), **values)
    return _text({**document, **nothing, "operators": []}, width).splitlines()


def test_a_compilation_answers_a_persons_questions() -> None:
    lines = [" ".join(line.split()) for line in _compilation(140)]
    assert lines[0] == "resnet8 · xnnpack_fp32 compiled"
    assert lines[1:] == [
        "stages TORCH_EXPORT 30.0 ms client decode 20.0 ms · encode 10.0 ms",
        "QUANTIZE 1.50 s server, cached",
        "TO_EXECUTORCH 195 ms server",
        "size 313 KiB: program 4.00 KiB · delegates 293 KiB (decode 195 KiB, encode 97.7 KiB); data weights 3.00 MiB",
        "memory planned decode 4.00 KiB, encode 2.00 KiB",
        "delegated decode: 6 of 9 nodes delegated in 2 subgraphs",
        "encode: 36 of 37 nodes delegated in 1 subgraph",
        "undelegated 2 x decode: aten_cumsum_default net.py:9 (+1) y = line_9(x)",
        "1 x decode: aten_sin_default head",
        "stayed fp32 4 x aten_softmax net.py:21 y = line_21(x)",
        "host check encode, example inputs [1x3x8x8]: SQNR 38.2 dB, max abs error 0.2 against eager PyTorch, the "
        "worst of 2 outputs",
        "decode, max inputs: did not run: the kernel is missing.",
        "decode, min inputs: equal to eager PyTorch",
        "warning decode was calibrated with one input.",
    ]


@pytest.mark.parametrize("width", [80, 100, 130])
def test_a_compilation_fits_the_terminal(width: int) -> None:
    lines = _compilation(width)
    assert max(map(len, lines)) <= width
    assert sum("aten_cumsum" in line for line in lines) == 1


def test_only_the_most_frequent_operators_are_named() -> None:
    many = [_operator(f"aten_{index}", index, _place(line=index)) for index in range(1, 10)]
    delegation = {"forward": {"subgraphs": 1, "delegated_nodes": 5, "non_delegated_nodes": 45, "operators": many}}
    text = "\n".join(_compilation(delegation=delegation))
    assert "aten_9" in text and "aten_5" in text and "aten_4" not in text
    assert "and 10 nodes of 4 more" in text


@pytest.mark.parametrize(("count", "rest"), [(1, "and 1 node more"), (3, "and 3 nodes more")])
def test_one_operator_that_is_not_named_is_not_counted(count: int, rest: str) -> None:
    many = [_operator(f"aten_{index}", 9, _place(line=index)) for index in range(1, 6)]
    delegation = {"forward": {"subgraphs": 1, "delegated_nodes": 5, "operators": [*many, _operator("aten_last", count)]}}
    lines = [line.strip() for line in _compilation(delegation=delegation)]
    assert rest in lines


def test_a_method_without_a_delegate_names_its_operators() -> None:
    delegation = {
        "embed": {"subgraphs": 0, "non_delegated_nodes": 2, "operators": [
            _operator("aten_embedding_default", 1, _place(line=36)), _operator("getitem", 1)]},
        "decode": {"subgraphs": 1, "delegated_nodes": 7},
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in _compilation(delegation=delegation, stayed_fp32={})]
    assert "embed: nothing delegated" in lines and "delegated decode: 7 of 7 nodes delegated in 1 subgraph" in lines
    assert "undelegated 1 x embed: aten_embedding_default net.py:36 y = line_36(x)" in lines


def test_a_recipe_without_delegates_names_no_operators() -> None:
    delegation = {"forward": {"subgraphs": 0, "non_delegated_nodes": 1, "operators": [_operator("aten_add_tensor", 1)]}}
    text = _text(_document(recipe="portable", compile=_compiled(delegation=delegation)))
    assert "nothing delegated" in text and "aten_add_tensor" not in text


def test_beside_a_measurement_only_what_matters_is_told_of_a_compilation() -> None:
    text = _text(_document(compile=_compiled()))
    assert "host check" not in text and "QUANTIZE 1.50 s" in text
    assert "aten_cumsum_default" in text and "aten_softmax" in text and "calibrated with one input" in text


def test_a_stage_says_what_it_gave() -> None:
    files = {"forward.pt2": {"digest": "3" * 64, "size_bytes": 2048}, "delegation.csv": {"digest": "4" * 64, "size_bytes": 100}}
    document = _document(compile={"stopped_after": "QUANTIZE", "stage_files": files})
    text = _text({**document, "device": None, "latency": None, "operators": []})
    assert text.splitlines()[0].endswith("stopped after QUANTIZE")
    assert "after QUANTIZE: delegation.csv 100 B, forward.pt2 2.00 KiB" in text


def test_pipes_get_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(render.report(_document(), width=120))
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def test_pipes_get_sentences_and_tables_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sentence = "It was killed. " * 30
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": sentence.strip()}
    output.show(render.report(_document(state="FAILED", error=error), width=output.PIPE_WIDTH))
    output.show_table(("ID", "WHY"), [("1", sentence.strip())], shrink=("WHY",))
    assert capsys.readouterr().out.count(sentence.strip()) == 2


def test_kernels_that_nobody_could_measure_are_one_line() -> None:
    kernels = [_row(i, "KERNEL", f"Add (ND) #{i}", 0.001, None, parent=0, resolution_ns=1000.0) for i in (1, 2, 3)]
    delegate = _row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True)
    text = _text(_document(operators=[delegate, *kernels, _row(4, "REST", "REST", 0.797, 727_000, parent=0)]))
    assert text.count("kernels below the 1 µs resolution") == 1
    assert "Add (ND)" not in text and "more," not in text


def test_the_module_of_a_sequential_is_called_one() -> None:
    rows = [
        _row(0, "OPERATOR", "aten.mean.dim", 0.5, 330_000, module="0"),
        _row(1, "OPERATOR", "aten.add", 0.5, 1e5, module="l.0"),
    ]
    text = _text(_document(operators=rows))
    assert "module 0" in text and "module l.0" not in text


def test_tables_shorten_only_what_they_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.show_table(("ID", "WHAT"), [("0123456789abcdef", "a long text that does not fit in here")], shrink=("WHAT",))
    assert "0123456789abcdef" in (text := capsys.readouterr().out)
    assert "…" in text and max(map(len, text.splitlines())) <= 40


def test_a_sentence_that_wraps_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    sentence = "int8 for the Ethos-U55 NPU, compiled by Vela; needs executorch[ethos-u]: ethosu.vela is not installed"
    rows = [("arm_ethos_u55_int8", "a-board-with-a-long-name, another", sentence), ("portable", "pi", "fp32")]
    output.show_table(("RECIPE", "RUNS ON", "WHAT"), rows, shrink=("WHAT", "RUNS ON"), wrap=("WHAT",))
    text = capsys.readouterr().out
    head, *lines = text.splitlines()
    assert max(map(len, lines)) <= 60 and "arm_ethos_u55_int8 " in lines[0]
    assert " ".join(line[head.index("WHAT") :].strip() for line in lines) == f"{sentence} fp32"


def _cell(state: CellState, **more: Any) -> Cell:
    values: dict[str, Any] = {"threads": 4, "device": None, "waiting_for": "", "error": None, "attempts": 0, **more}
    return Cell("c1", 0, "resnet8", "xnnpack_fp32", "forward", state=state, **values)


def _now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)


def test_lines_come_as_phases_end() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.status("Submitting.")
        display.status("Submitting.")
        display.cells([_cell(CellState.QUEUED)])
        display.event(CellChanged(1, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
        display.event(Progress(_now(), "c1", "SERVER", "QUANTIZE", None, None, None, ""))
        display.event(Progress(_now(), "c1", "SERVER", "QUANTIZE", 1234.0, None, None, ""))
        display.event(CellChanged(2, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == ["Submitting.", f"{what}: COMPILING", f"{what}: compiling QUANTIZE: 1.23 s"]


def test_what_a_device_waits_for_is_said_once_with_its_reading() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.cells([_cell(CellState.RUNNING)])
        for degrees in (80, 75):
            display.event(Progress(_now(), "c1", "pi5-a", "WAIT_FOR_COOL", None, None, None, f"at most 60 s: {degrees} °C"))
        display.event(Progress(_now(), "c1", "pi5-a", "WAIT_FOR_IDLE", None, None, None, "at most 10 s: 1.00 tasks per cpu run"))
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == [
        f"{what}: waiting for a cool device on pi5-a, at most 60 s: 80 °C",
        f"{what}: waiting for an idle machine on pi5-a, at most 10 s: 1.00 tasks per cpu run",
    ]


def test_a_failed_cell_says_why_on_stderr_however_it_is_shown() -> None:
    failed = _cell(CellState.FAILED, error=error_of(Fault.USER, "PROGRAM_CRASHED", "It was killed.", "Look at the log."))
    event = CellChanged(1, _now(), failed, JobState.FAILED)
    lines: list[str] = []
    PlainDisplay(lines.append).event(event)
    assert lines == ["resnet8 · xnnpack_fp32 · 4 threads: FAILED: It was killed. Look at the log."]
    live = LiveDisplay()
    live.event(event)
    assert live._failures() == ["etfarm: It was killed. Look at the log."]


def test_the_live_table_shows_what_a_cell_does() -> None:
    display = LiveDisplay()
    display.cells([_cell(CellState.RUNNING)])
    display.event(Progress(_now(), "c1", "pi5-a", "TIMED", None, 50, 100, ""))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(display)
    assert "running" in capture.get() and "measuring 50 % on pi5-a" in capture.get()
    assert "0 of 1 cell done" in capture.get()


def test_a_latency_is_shown_as_soon_as_it_is_measured() -> None:
    lines: list[str] = []
    timed = Progress(_now(), "c1", "pi5-a", "TIMED", 1000.0, None, None, "", p50_ns=1_840_000.0)
    done = _cell(CellState.SUCCEEDED, p50_ns=1_840_000.0, p50_ci95_ns=(1_820_000.0, 1_860_000.0), verdict="NOT_BENCHMARKABLE")
    plain, live = PlainDisplay(lines.append), LiveDisplay()
    console = Console(width=110, color_system=None)
    shown = []
    for event in (
        timed,
        Progress(_now(), "c1", "pi5-a", "TRACED", None, 5, 10, ""),
        CellChanged(1, _now(), done, JobState.RUNNING),
    ):
        for display in (plain, live):
            if event is timed:
                display.cells([_cell(CellState.RUNNING)])
            display.event(event)
        with console.capture() as capture:
            console.print(live)
        shown.append(capture.get())
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == [
        f"{what}: measuring: 1.00 s on pi5-a, p50 1.84 ms",
        f"{what}: SUCCEEDED, p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE",
    ]
    assert "running  p50 1.84 ms, measuring on pi5-a" in shown[0]
    assert "running  p50 1.84 ms, tracing operators 50 % on pi5-a" in shown[1]
    assert "succeeded  p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE" in shown[2]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("TO_EXECUTORCH", "compiling TO_EXECUTORCH"),
        ("NUMERICS_TO_EXECUTORCH", "compiling TO_EXECUTORCH for the numerics pass"),
        ("NUMERICS", "recording the outputs of operators"),
        ("WAIT_FOR_QUIET", "waiting until the server's own work pauses"),
        ("", ""),
    ],
)
def test_a_phase_is_described_in_words(phase: str, words: str) -> None:
    assert phases.describe(phase) == words


@pytest.mark.parametrize(
    ("state", "phase", "shown"),
    [
        (CellState.COMPILING, "TO_EXECUTORCH", "compiling  TO_EXECUTORCH  0"),
        (CellState.RUNNING, "RUN", "running  executing once  0"),
        (CellState.ANALYZING, "ANALYZE", "analyzing    0"),
    ],
)
def test_the_activity_does_not_repeat_the_state(state: CellState, phase: str, shown: str) -> None:
    display = LiveDisplay()
    display.cells([_cell(state)])
    display.event(Progress(_now(), "c1", "SERVER", phase, None, None, None, ""))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(display)
    assert f"4 threads  {shown}" in capture.get()


def test_progress_that_arrives_before_the_change_that_it_follows_is_kept() -> None:
    lines: list[str] = []
    earlier, change, later = _now(), _now(), _now()
    waits = Progress(later, "c1", "SERVER", "WAIT_FOR_QUIET", None, None, None, "")
    live, plain, console = LiveDisplay(), PlainDisplay(lines.append), Console(width=110, color_system=None)
    for display in (live, plain):
        display.cells([_cell(CellState.WAITING_FOR_DEVICE)])
        for event in (waits, CellChanged(1, change, _cell(CellState.RUNNING), JobState.RUNNING)):
            display.event(event)
    with console.capture() as capture:
        console.print(live)
    assert "running  waiting until the server's own work pauses" in capture.get()
    assert lines[0] == "resnet8 · xnnpack_fp32 · 4 threads: waiting until the server's own work pauses"
    live.event(replace(waits, at=earlier))
    live.event(CellChanged(2, change, _cell(CellState.ANALYZING), JobState.RUNNING))
    with console.capture() as capture:
        console.print(live)
    assert "waiting" not in capture.get()


def test_rows_of_one_line_are_told_apart_by_their_modules() -> None:
    source = {"file": "torchvision/models/resnet.py", "line": 92, "code": "out = self.conv1(x)"}
    rows = [
        _row(i, "OPERATOR", "aten.convolution.out", 0.5, 1e6, module=f"layer{i}.0.conv1", source=source) for i in (1, 2)
    ]  # fmt: skip
    wide = _text(_document(operators=rows), width=160)
    assert "torchvision/models/resnet.py:92  layer1.0.conv1  out = self.conv1(x)" in wide
    assert "resnet.py:92  layer2.0.conv1" in wide


def _delegation(*places: dict[str, Any]) -> dict[str, Any]:
    operators = [{"op": "aten_mean_dim", "delegated": 0, "non_delegated": len(places), "places": list(places)}]
    return {"subgraphs": 1, "delegated_nodes": 3, "non_delegated_nodes": len(places), "operators": operators}


def test_a_row_says_why_it_was_not_delegated_and_no_more_than_is_known() -> None:
    def place(line: int, reason: str | None, module: str = "m") -> dict[str, Any]:
        source = {"file": "a.py", "line": line, "code": "x.mean()"}
        return {"source": source, "module": module, "count": 1, "undelegated_reason": reason}

    def row(index: int, line: int, module: str = "m") -> dict[str, Any]:
        source = {"file": "a.py", "line": line, "code": "x.mean()"}
        return _row(
            index,
            "OPERATOR",
            "aten.mean.out",
            0.3,
            1e6,
            module=module,
            source=source,
            op_types=["aten.mean.dim"],
            delegated=False,
        )

    delegation = _delegation(place(1, "dim must be the last"), place(2, "dim must be the last"), place(3, "mean keeps no dim"))
    document = _document(operators=[row(0, 1), row(1, 2), row(2, 9)])
    document["compile"]["delegation"] = {"forward": delegation}
    text = _text(document)
    assert "0, 1 not delegated: dim must be the last\n" in text
    assert "2 not delegated" not in text, "its place is unknown, and the operator's reasons differ"
    assert text.count("dim must be the last") == 1
    assert "reason       aten_mean_dim: mean keeps no dim" in text, "no row states it"
    assert undelegated_reason(_delegation(place(1, "a")), row(0, 9)) == "a", "all its nodes have it"
    assert undelegated_reason(_delegation(place(1, None)), row(0, 1)) == ""
    assert undelegated_reason(None, row(0, 1)) == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_live_table_shortens_names_and_says_once_what_they_share(width: int) -> None:
    display = LiveDisplay()
    recipes = ("a_recipe_with_quite_a_long_name:and=arguments", "another_recipe_with_a_long_name:and=arguments")
    cells = [replace(_cell(CellState.WAITING_FOR_DEVICE), id=name, index=i, recipe=name) for i, name in enumerate(recipes)]
    display.cells(cells)
    display.event(
        Progress(_now(), recipes[0], "", "", None, None, None, "every device that matches is busy with other jobs " * 2)
    )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(display)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0] == "resnet8 · 4 threads"
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert all("waiting for device" in line and line.endswith("0.0 s") for line in lines[1:3])


def test_a_cell_that_is_only_compiled_is_about_all_methods() -> None:
    compiled = replace(_cell(CellState.COMPILING), method="text_decoder", threads=None, on_device=False)
    assert compiled.label == "resnet8 · xnnpack_fp32"
    assert replace(compiled, on_device=True).label == "resnet8 · xnnpack_fp32 · text_decoder"


def test_a_job_is_called_by_its_models_and_recipes() -> None:
    cells = tuple(replace(_cell(CellState.QUEUED), model=model, recipe=recipe) for model in "ab" for recipe in ("x", None))
    assert jobs._what(JobInfo("j", "", {}, "me", JobState.QUEUED, _now(), None, cells)) == "a, b · x"


def _compared(ratio: float, ends: list[float], *, base: dict[str, Any] | None = None, **changes: Any) -> str:
    interleaved = {
        "base_cell": "c0",
        "ratio": ratio,
        "ratio_ci95": ends,
        "rounds": 24,
        "process_pairs": 8,
        "ratios": [ratio] * 24,
    }
    documents = [_document(cell="c0", **(base or {})), _document(cell="c1", interleaved=interleaved, **changes)]
    console = Console(width=140, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(render.reports(documents, width=140))
    (line,) = [line.strip() for line in capture.get().splitlines() if "process pairs" in line]
    return line


OTHER = {"model": {"name": "tiny", "digest": "2" * 64}}


@pytest.mark.parametrize(
    ("ratio", "ends", "expected"),
    [
        (0.912, [0.905, 0.919], "tiny / resnet8  0.912x [0.905, 0.919]  8.8 % faster  24 rounds, 8 process pairs  (VALID)"),
        (1.5, [1.4, 1.6], "tiny / resnet8  1.500x [1.400, 1.600]  50 % slower  24 rounds, 8 process pairs  (VALID)"),
        (1.01, [0.99, 1.02], "tiny / resnet8  1.010x [0.990, 1.020]  no difference found  24 rounds, 8 process pairs  (VALID)"),
        (1.01, [], "tiny / resnet8  1.010x  too few rounds to tell  24 rounds, 8 process pairs  (VALID)"),
    ],
)
def test_programs_that_took_turns_are_compared_in_one_line(ratio: float, ends: list[float], expected: str) -> None:
    assert _compared(ratio, ends, **OTHER) == expected


def test_what_is_compared_is_told_apart_by_model_recipe_or_place() -> None:
    assert _compared(1, [], recipe="portable").startswith("portable / xnnpack_fp32  ")
    assert _compared(1, []).startswith("resnet8 #1 / resnet8 #0  ")


def test_a_comparison_is_as_valid_as_both_of_its_measurements() -> None:
    invalid = {"verdict": {"status": "INVALID"}}
    assert _compared(1, [], base=invalid).endswith("(INVALID)")
    assert _compared(1, [], **invalid).endswith("(INVALID)")
    assert _compared(1, [], verdict={"status": "NOT_BENCHMARKABLE"}).endswith("(NOT BENCHMARKABLE)")
