"""Reports as people read them, from documents of etfarm.report/1."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.cli.views import render
from etfarm.client.formats import html, sentences, units
from etfarm.wire.delegation import undelegated_reason
from tests.support import documents
from tests.support.rendering import printed, render_text, report_document, report_row


def test_the_answer_is_the_first_line() -> None:
    first = render_text(report_document()).splitlines()[0]
    assert first.startswith("resnet8 · xnnpack_fp32 · pi5-a (cortex-a76, 4 threads)")
    assert first.endswith("p50 1.84 ms [1.82, 1.86]  VALID  543 samples  traced 1.88 ms")


def test_times_have_their_precision_and_fit_their_shares() -> None:
    document = report_document()
    whole_ns = 1_880_000.0
    for row, part in zip(document["operators"], (0.01, 0.012, 0.5, 0.0, 0.2, 0.001), strict=True):
        row["mean_ns"] = row["share"] * whole_ns
        row["mean_ci95_ns"] = [row["mean_ns"] * (1 - part), row["mean_ns"] * (1 + part)]
    document["profile"] |= {"mean_ns": whole_ns, "traced_ratio": 1.02}
    lines = render_text(document, width=140).splitlines()
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
    text = render_text(report_document(profile=profile), width=140)
    assert "operators  Traced iterations took 2.40 times as long as untraced ones. Compare the operators' times" in text
    cost = "median 100 µs, 2.40 times the untraced one of the same process, or 0.15 µs for each of 400 events"
    assert f"traced    100 iterations, {cost}" in text


def test_operators_come_by_share_with_kernels_under_their_delegate() -> None:
    lines = render_text(report_document()).splitlines()[1:7]
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


def _of_a_program(**changes: Any) -> dict[str, Any]:
    """Return a report of a .pte, which has no ETRecord."""
    rows = [report_row(0, "OPERATOR", "aten.mean.dim", 0.9, 330_000), report_row(1, "REST", "REST", 0.1, 46_000)]
    return report_document(recipe=None, operators=rows, **changes)


def test_a_ready_program_says_once_why_it_has_no_source_lines() -> None:
    caption = "no modules and source lines: a .pte has no ETRecord; bench the model or its .pt2 to see them"
    assert [line.strip() for line in render_text(_of_a_program()).splitlines()].count(caption) == 1
    several = render.reports([report_document(), _of_a_program(), _of_a_program(cell="c2")], width=160)
    lines = [line.strip() for line in printed(several, width=160).splitlines()]
    assert lines.count(caption) == 1
    assert lines.index(caption) > lines.index(next(line for line in lines if "0.9" in line or "90.0 %" in line))


def test_a_program_says_what_its_share_of_the_time_is() -> None:
    program = report_document(recipe=None, compile={"stages": [], "program": {"digest": "1" * 64, "size_bytes": 320_512}})
    assert "program   313 KiB, 80.0 % of the traced time in delegates\n" in f"{render_text(program)}\n"
    assert "<b>80.0 %</b><span>of the traced time in delegates</span>" in html.write(documents.document(program)).decode()


def test_a_model_without_source_lines_is_not_called_a_program() -> None:
    for document in (
        report_document(),
        report_document(operators=_of_a_program()["operators"]),
        report_document(recipe=None, operators=[]),
    ):
        assert "ETRecord" not in render_text(document)


def test_only_the_largest_are_shown_and_the_rest_is_counted() -> None:
    text = render_text(report_document(), top=1, job="j1")
    assert "aten.mean.dim" not in text
    assert "and 4 more, 58.8 % together: etfarm report show j1 --top 0" in text
    assert "more," not in render_text(report_document(), top=0)


@pytest.mark.parametrize("width", [80, 100, 130, 160])
def test_nothing_is_wider_than_the_terminal_and_no_row_wraps(width: int) -> None:
    lines = render_text(report_document(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("IGEMM" in line for line in lines) == sum("#2" in line for line in lines)


def test_a_narrow_terminal_keeps_the_place_and_leaves_out_the_code() -> None:
    text = render_text(report_document(), 80)
    assert "models/resnet.py:31" in text
    assert "y = self.conv2(y)" not in text


def test_the_facts_are_reported_with_their_units() -> None:
    text = render_text(report_document())
    assert "linear: SQNR 38.2 dB, max abs error 0.0012, against the program before quantization" in text
    assert "peak 8.00 MiB, planned 24.2 KiB" in text
    assert "cached; took TO_EXECUTORCH 195 ms" in text
    assert "313 KiB, 36 of 37 nodes delegated in 1 subgraph, 80.0 % of the traced time in delegates" in text
    assert "forward was calibrated with one input." in text


def test_default_inputs_are_called_made_up() -> None:
    assert "inputs    generated by the runner, seed 0" in render_text(report_document(inputs={}))
    assert "made up" not in render_text(report_document())


def test_inputs_are_reported_by_name_dtype_and_shape() -> None:
    values = [{"name": name, "dtype": "float32", "shape": [1, 8]} for name in "abcde"]
    values[1] = {"name": "", "dtype": "bool scalar"}
    text = render_text(report_document(inputs={"digest": "1" * 64, "tensors": values}))
    assert "inputs    a float32[1, 8], 1 bool scalar, c float32[1, 8], d float32[1, 8], and 1 more" in text


def test_a_verdict_says_what_to_do() -> None:
    reason = {"code": "CPU_PRESSURE", "message": "Some task waited."}
    text = render_text(report_document(verdict={"status": "INVALID", "reasons": [reason]}))
    assert "INVALID" in text.splitlines()[0]
    assert "Some task waited. Stop other programs on the device." in text


def _measured(**changes: Any) -> dict[str, Any]:
    latency = {
        "samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000, "p50_ci95_ns": [1_820_000, 1_860_000],
        "p10_ns": 1_800_000, "p90_ns": 1_900_000, "p99_ns": 2_500_000, "drift": -0.021, "effective_samples": 41.7,
    }  # fmt: skip
    measurement = {"warmup": 3895, "iterations": 543, "duration_ns": 10**9, "steady": True, "warmup_ns": 251_000_000}
    return report_document(latency=latency, measurement=measurement, **changes)


def test_the_spread_has_percentiles_drift_and_the_effective_samples() -> None:
    text = render_text(_measured(), width=160)
    assert "p10 1.80 ms · p90 1.90 ms · p99 2.50 ms · drift -2.1 % · worth 42 independent samples" in text
    assert "3,895 iterations in 251 ms, until steady" in text


def test_several_runs_show_no_drift_from_one_process_to_the_next() -> None:
    run = {"p50_ns": 1_840_000, "verdict": {"status": "VALID"}}
    assert "drift -2.1 %" in render_text(_measured(runs=[run]), width=160)
    assert "drift" not in render_text(_measured(runs=[run, run]), width=160)


@pytest.mark.parametrize(
    ("statuses", "name"), [(["VALID"], "within-run"), (["VALID", "VALID"], "within-run"), (["VALID"] * 3, "between-run")]
)
def test_the_interval_of_the_median_has_its_name_in_the_table_and_in_the_tile(statuses: list[str], name: str) -> None:
    runs = [{"p50_ns": 1_840_000, "verdict": {"status": status}} for status in statuses]
    measured = _measured(runs=runs)
    (line,) = [line for line in render_text(measured).splitlines() if line.startswith("  spread")]
    assert line.startswith(f"  spread    [1.82, 1.86] {name} · p10 1.80 ms · ")
    assert f"<b>1.84 ms</b><span>[1.82, 1.86] {name}</span>" in html.write(documents.document(measured)).decode()


def test_the_interval_of_interleaved_programs_is_neither_within_nor_between_runs() -> None:
    for interleaved in ({"base_cell": "c1", "rounds": 9}, None):  # the second program, and the first, which is the base
        assert "-run" not in render_text(_measured(interleaved=interleaved, runs=[]))


def test_a_timed_pass_that_went_on_until_its_times_settled_says_so() -> None:
    measurement = {"warmup": 10, "iterations": 2000, "duration_ns": 4 * 10**9, "stop_reason": "SETTLED"}
    assert "timed     for 4.00 s, longer than asked for, until the times settled" in render_text(
        report_document(measurement=measurement)
    )
    assert "settled" not in render_text(report_document(measurement=measurement | {"stop_reason": "ENOUGH"}))


def test_what_was_not_measured_of_the_spread_is_left_out() -> None:
    few = {"samples_ns": [10, 11], "p50_ns": 10, "drift": 0.00001, "effective_samples": 2}
    text = render_text(report_document(latency=few, measurement={"warmup": 10, "iterations": 2}))
    assert "spread    drift 0.0 %" in text and "worth" not in text
    assert "warm-up   10 iterations" in text and "steady" not in text
    assert "spread" not in render_text(report_document(latency={"samples_ns": [10], "p50_ns": 10}))


@pytest.mark.parametrize("width", [80, 100])
def test_state_that_a_program_keeps_is_reported_in_a_sentence(width: int) -> None:
    difference = {
        "output": "count", "one": "FIRST", "other": "TIMED_LAST", "differing": 1, "elements": 1, "max_abs_difference": 553.0
    }  # fmt: skip
    measurement = {"warmup": 10, "repeatability": {"outcome": "KEEPS_STATE", "differences": [difference]}}
    text = render_text(report_document(measurement=measurement), width)
    assert max(map(len, text.splitlines())) <= width
    assert "The program keeps state" in " ".join(text.split())
    assert "Output 'count' differs by up to 553 between the first execution and the last timed one." in " ".join(text.split())


def test_the_verdict_on_outputs_is_not_repeated() -> None:
    reason = {"code": "OUTPUTS_DIFFER", "message": "Passes over the same inputs gave different outputs."}
    assert "by rounding only" in render_text(
        report_document(measurement={"warmup": 10, "repeatability": {"outcome": "ROUNDING"}})
    )
    measurement = {"warmup": 10, "repeatability": {"outcome": "NONDETERMINISTIC"}}
    verdict = {"status": "INVALID", "reasons": [reason]}
    assert "repeated" not in render_text(report_document(measurement=measurement, verdict=verdict))
    assert "nondeterministic" in render_text(report_document(measurement=measurement))


def test_waits_and_settings_that_were_not_applied_have_a_line_each() -> None:
    waits = [
        {"gate": "COOL_DOWN", "waited_ms": 1000.0, "passed": True},
        {"gate": "COOL", "waited_ms": 12_000.0, "passed": True, "measured": 59.5, "threshold": 60.0},
        {"gate": "IDLE", "waited_ms": 10_000.0, "passed": False, "measured": 0.5, "threshold": 0.15},
    ]
    setting = {"name": "governor", "cpus": "0-3", "found": "powersave", "wanted": "performance"}
    settings = [{**setting, "applied": False, "why": "the agent may not write it"}, {**setting, "cpus": "4-7", "applied": True}]
    text = render_text(report_document(telemetry={"waits": waits, "settings": settings}), 160)
    reported = "12.0 s until the device was below 60 °C; 10.0 s for the device to be idle, in vain: 0.50 tasks per cpu"
    assert f"waited    {reported}" in text
    assert "settings  the governor of cpus 0-3 stayed powersave instead of performance: the agent may not write it" in text


def test_the_waits_of_several_runs_are_one_sentence_with_their_range() -> None:
    def idle(waited_ms: float, measured: float, *, passed: bool) -> dict[str, Any]:
        return {"gate": "IDLE", "waited_ms": waited_ms, "passed": passed, "measured": measured, "threshold": 0.15}

    waits = [idle(2000.0, 0.1, passed=True), idle(10_000.0, 0.5, passed=False), idle(12_000.0, 0.1, passed=True)]
    waits += [idle(10_000.0, 0.75, passed=False)]
    assert sentences.waits(waits) == (
        "2 times 2.00 s to 12.0 s until the device was idle; "
        "2 times 10.0 s for the device to be idle, in vain: 0.50 to 0.75 tasks per cpu"
    )


def test_reasons_with_one_remedy_say_it_once() -> None:
    reasons = [{"code": code, "message": f"{code}."} for code in ("CPU_PRESSURE", "BACKGROUND_LOAD", "CPU_STOLEN")]
    text = render_text(_measured(verdict={"status": "INVALID", "reasons": reasons}))
    assert text.count("Stop other programs on the device.") == 1
    assert "CPU_STOLEN. Use a device on another host" in text


def test_what_a_disturbance_brings_about_has_no_remedy_of_its_own() -> None:
    few, load, late = ({"code": code, "message": f"{code}."} for code in ("TOO_FEW_SAMPLES", "BACKGROUND_LOAD", "NOT_STEADY"))
    text = render_text(_measured(verdict={"status": "INVALID", "reasons": [few, load, late]}))
    assert "--iterations" in text and "Stop other programs" in text and "--warmup" not in text
    text = render_text(_measured(verdict={"status": "INVALID", "reasons": [late]}))
    assert "NOT_STEADY. Warm up for longer: give --warmup more than the 3,895 of this run." in text


@pytest.mark.parametrize(
    "code", ["BACKGROUND_LOAD", "FREQUENCY_MOVED", "THERMAL_THROTTLED", "DRIFT", "NOT_STEADY", "CPU_STOLEN", "TOO_FEW_SAMPLES"]
)
def test_every_reason_of_a_verdict_has_a_remedy(code: str) -> None:
    verdict = {"status": "INVALID", "reasons": [{"code": code, "message": "It was so."}]}
    assert len(" ".join(render_text(report_document(verdict=verdict)).split("It was so.")[1].splitlines()[0].split())) > 20


def test_a_pass_that_a_limit_ended_says_so_and_gets_no_remedy_that_cannot_help() -> None:
    measurement = {"warmup": 10, "iterations": 1_000_000, "duration_ns": 450_000_000, "stop_reason": "MAX_SAMPLES"}
    reason = {"code": "TOO_FEW_SAMPLES", "message": "The median has no interval."}
    text = render_text(report_document(measurement=measurement, verdict={"status": "INVALID", "reasons": [reason]}))
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
    text = render_text(report_document(state="FAILED", error=error, **empty))
    assert text.splitlines()[0].endswith("FAILED")
    assert "PROGRAM_CRASHED The program was killed. Look at the log." in text


def test_kernels_without_times_are_one_line() -> None:
    kernels = [report_row(i, "KERNEL", f"Add (ND) #{i}", 0.001, None, parent=0, resolution_ns=1000.0) for i in (1, 2, 3)]
    delegate = report_row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True)
    text = render_text(report_document(operators=[delegate, *kernels, report_row(4, "REST", "REST", 0.797, 727_000, parent=0)]))
    assert text.count("3 kernels below the 1 µs resolution") == 1 and "<3.00 µs" in text
    assert "Add (ND)" not in text and "more," not in text


def test_the_module_of_a_sequential_is_called_one() -> None:
    rows = [
        report_row(0, "OPERATOR", "aten.mean.dim", 0.5, 330_000, module="0"),
        report_row(1, "OPERATOR", "aten.add", 0.5, 1e5, module="l.0"),
    ]
    text = render_text(report_document(operators=rows))
    assert "module 0" in text and "module l.0" not in text


def test_rows_of_one_line_are_told_apart_by_their_modules() -> None:
    source = {"file": "torchvision/models/resnet.py", "line": 92, "code": "out = self.conv1(x)"}
    rows = [
        report_row(i, "OPERATOR", "aten.convolution.out", 0.5, 1e6, module=f"layer{i}.0.conv1", source=source) for i in (1, 2)
    ]  # fmt: skip
    wide = render_text(report_document(operators=rows), width=160)
    assert "torchvision/models/resnet.py:92  layer1.0.conv1  out = self.conv1(x)" in wide
    assert "resnet.py:92  layer2.0.conv1" in wide
    narrow = render_text(report_document(operators=rows), width=80)
    assert ":92 layer1.0.conv1" in narrow and ":92 layer2.0.conv1" in narrow


def _delegation(*places: dict[str, Any]) -> dict[str, Any]:
    operators = [{"op": "aten_mean_dim", "delegated": 0, "non_delegated": len(places), "places": list(places)}]
    return {"subgraphs": 1, "delegated_nodes": 3, "non_delegated_nodes": len(places), "operators": operators}


def test_a_row_says_why_it_was_not_delegated_and_no_more_than_is_known() -> None:
    def place(line: int, reason: str | None, module: str = "m") -> dict[str, Any]:
        source = {"file": "a.py", "line": line, "code": "x.mean()"}
        return {"source": source, "module": module, "count": 1, "undelegated_reason": reason}

    def row(index: int, line: int, module: str = "m") -> dict[str, Any]:
        source = {"file": "a.py", "line": line, "code": "x.mean()"}
        return report_row(
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
    document = report_document(operators=[row(0, 1), row(1, 2), row(2, 9)])
    document["compile"]["delegation"] = {"forward": delegation}
    text = render_text(document)
    assert "0, 1 not delegated: dim must be the last\n" in text
    assert "2 not delegated" not in text, "its place is unknown, and the operator's reasons differ"
    assert text.count("dim must be the last") == 1
    assert "reason       aten_mean_dim: mean keeps no dim" in text, "no row states it"
    assert undelegated_reason(_delegation(place(1, "a")), row(0, 9)) == "a", "all its nodes have it"
    assert undelegated_reason(_delegation(place(1, None)), row(0, 1)) == ""
    assert undelegated_reason(None, row(0, 1)) == ""
    delegation = _delegation(place(1, "no rule"))
    delegation["operators"][0]["op"] = "aten_eq_scalar"
    assert undelegated_reason(delegation, {**row(0, 1), "op_types": ["aten.eq.Scalar"]}) == "no rule", "overloads have capitals"
