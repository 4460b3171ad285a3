"""Two sides against each other, as pure functions of their JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from etfarm.client.formats.compared import facts
from etfarm.wire.comparison import Side, compare, failed, split_choice
from etfarm.wire.comparison.sides import NothingToCompare
from tests.support.comparisons import against, observed, operator, repeated, report, reports, timed
from tests.support.documents import completed
from tests.support.refusals import refuses

PAIR = [
    "base", "candidate", "differs", "latency", "operators", "size", "memory", "accuracy", "delegation", "changes", "generation",
]  # fmt: skip


def only(document: dict[str, Any]) -> dict[str, Any]:
    (pair,) = document["pairs"]
    assert list(pair) == PAIR
    return pair  # type: ignore[no-any-return]


@given(reports())
@settings(max_examples=60, deadline=None)
def test_a_report_against_itself_differs_in_nothing(one: dict[str, Any]) -> None:
    pair = only(against(one, one))
    assert pair["differs"] == pair["changes"] == []
    if pair["latency"]:
        assert pair["latency"]["ratio"] in (1, None)
        assert pair["latency"]["outcome"] in ("no_difference", "too_few", None)
    for compared in pair["operators"]["rows"] if pair["operators"] else ():
        assert compared["base"] is not None and compared["candidate"] is not None
        assert compared["change_ns"] in (0, None)
    for part in ("size", "memory"):
        assert all(number is None or number["change"] in (0, None) for number in (pair[part] or {}).values())
    assert all(method["operators"] == [] for method in (pair["delegation"] or {}).values())


@given(reports())
@settings(max_examples=60, deadline=None)
def test_a_report_against_itself_passes_every_gate_that_can_be_judged(one: dict[str, Any]) -> None:
    gate = against(one, one, "0%", "size=0%", "memory=0%", "accuracy=0dB", accept_invalid=True)["gate"]
    assert {reason["code"] for reason in gate["reasons"]} <= {"NOT_MEASURED", "NO_VALID_EVIDENCE", "TOO_FEW", "NO_SPREAD"}
    assert one["compile"] is None or "NO_SPREAD" not in {reason["code"] for reason in gate["reasons"]}
    measured = (
        one["latency"]
        and one["latency"]["p50_ns"]
        and one["latency"]["p50_ci95_ns"]
        and one["compile"]
        and one["memory"]
        and one["accuracy"]
    )
    assert gate["passed"] or not measured


@given(reports("c1"), reports("c2"))
@settings(max_examples=60, deadline=None)
def test_turning_the_sides_round_turns_the_ratio_round(one: dict[str, Any], other: dict[str, Any]) -> None:
    pair, turned = only(against(one, other)), only(against(other, one))
    if pair["latency"] and pair["latency"]["ratio"]:
        result, back = pair["latency"], turned["latency"]
        assert result["ratio"] * back["ratio"] == pytest.approx(1)
        assert (result["ratio_ci95"] is None) == (back["ratio_ci95"] is None)
        if result["ratio_ci95"]:
            assert result["ratio_ci95"] == pytest.approx([1 / end for end in reversed(back["ratio_ci95"])])
            assert result["ratio_ci95"][0] <= result["ratio"] <= result["ratio_ci95"][1]
    if pair["operators"]:
        whole = [sum(operator["change_ns"] or 0 for operator in one["operators"]["rows"]) for one in (pair, turned)]
        assert whole[0] == pytest.approx(-whole[1], abs=1e-3)
        indexes = sorted(at for operator in pair["operators"]["rows"] if operator["base"] for at in operator["base"]["indexes"])
        assert indexes == [operator["index"] for operator in one["operators"]], "each row is listed once"


@given(reports("c1"), reports("c2"))
@settings(max_examples=40, deadline=None)
def test_what_passes_a_gate_passes_a_wider_one(one: dict[str, Any], other: dict[str, Any]) -> None:
    outcomes = [
        against(one, other, f"{limit}%", f"size={limit}%", f"memory={limit}%", f"accuracy={limit}dB")["gate"]["passed"]
        for limit in (0, 1, 30, 900000)
    ]
    assert outcomes == sorted(outcomes)


def test_two_intervals_are_taken_as_independent() -> None:
    pair = only(against(observed("c1", 1000, (990, 1020)), observed("c2", 1200, (1180, 1230))))
    result = pair["latency"]
    assert (result["ratio"], result["method"], result["outcome"]) == (pytest.approx(1.2), "separate", "slower")
    low = 1.2 * math.exp(-math.hypot(math.log(1200 / 1180), math.log(1020 / 1000)))
    high = 1.2 * math.exp(math.hypot(math.log(1230 / 1200), math.log(1000 / 990)))
    assert result["ratio_ci95"] == pytest.approx([low, high])
    assert result["p50_ns"] == {"base": 1000, "candidate": 1200, "change": 200, "ratio": pytest.approx(1.2)}


def test_without_an_interval_there_are_too_few_samples_to_tell() -> None:
    other = {"program": {"digest": "8" * 64, "size_bytes": 1000}}
    document = against(timed("c1", 1000), timed("c2", 1200, (1180, 1230), compile=other))
    result = only(document)["latency"]
    assert (result["ratio_ci95"], result["outcome"]) == (None, "too_few")
    assert "Measured in separate runs" in document["notes"][0] and "--interleave" in document["notes"][0]


def compiled(digit: str) -> dict[str, Any]:
    """Return the compilation of a program of its own."""
    return {"program": {"digest": digit * 64}}


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [(1000, 1005, "no_difference"), (1000, 1120, "inconclusive"), (1120, 1000, "inconclusive"), (1000, 2400, "inconclusive"),
     (1000, 2600, "slower"), (2600, 1000, "faster")],
)  # fmt: skip
def test_separate_runs_of_an_unknown_spread_differ_only_where_it_is_obvious(before: float, after: float, outcome: str) -> None:
    sides = (("b", before, "6"), ("k", after, "7"))
    document = against(*(timed(cell, p50, (p50 * 0.99, p50 * 1.01), compile=compiled(program)) for cell, p50, program in sides))
    result = only(document)["latency"]
    assert (result["outcome"], result["base_spread"], result["candidate_spread"]) == (outcome, None, None)
    assert document["notes"][0].startswith("Measured in separate runs, and it is not known how much runs of both sides vary")


def test_repeats_widen_the_interval_of_separate_runs_and_decide() -> None:
    document = against(repeated("b", (1000, 1010, 990, 1015, 985)), repeated("k", (1100, 1111, 1089, 1115, 1085)))
    result = only(document)["latency"]
    assert (result["outcome"], result["same_program"], document["notes"]) == ("slower", False, [])
    assert result["base_spread"]["source"] == result["candidate_spread"]["source"] == "REPEATS"
    assert result["ratio"] == pytest.approx(1.1, rel=1e-3)
    assert result["ratio_ci95"] == pytest.approx([1.08, 1.12], abs=0.003)


def test_one_program_is_the_same_by_its_digest_inputs_runner_threads_and_cores() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        return report("k", **{"runner": {"kind": "native", "bundle_digest": "b" * 64, "cores": "0-1"}, **changes})

    others: list[dict[str, Any]] = [
        {"threads": 1}, {"method": "encode"}, {"inputs": {"digest": "5" * 64}}, {"compile": None},
        {"compile": {"program": {"digest": "7" * 64}}}, {"runner": {"kind": "native", "bundle_digest": "c" * 64, "cores": "0-1"}},
        {"runner": {"kind": "native", "bundle_digest": "b" * 64}},
    ]  # fmt: skip
    assert only(against(of(), of(recipe="other", model={"name": "renamed"})))["latency"]["same_program"]
    assert not any(only(against(of(), of(**changes)))["latency"]["same_program"] for changes in others)
    assert not only(against(of(compile=None), of(compile=None)))["latency"]["same_program"]


def in_turns(base: Sequence[float], other: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Three cells of one attempt; the second and the third have their ratio to the first."""

    def of(ratio: Sequence[float]) -> dict[str, Any]:
        rounds = {"base_cell": "c0", "rounds": 24, "process_pairs": 8}
        return {**rounds, "ratio": ratio[0], "ratio_ci95": ratio[1:], "ratios": [ratio[0]] * 24}

    cells = [
        timed(f"c{place}", 1000, (999, 1001), attempt="a", recipe=f"r{place}", compile=compiled(str(place))) for place in range(3)
    ]
    for place, ratio in ((1, base), (2, other)):
        if ratio:
            cells[place]["interleaved"] = completed({"interleaved": of(ratio)})["interleaved"]
    return cells


def test_reports_of_one_interleaved_attempt_are_compared_by_their_rounds() -> None:
    first, second, _ = in_turns((0.9, 0.88, 0.92))
    result = only(against(first, second))["latency"]
    assert (result["ratio"], result["ratio_ci95"], result["method"], result["rounds"]) == (0.9, [0.88, 0.92], "paired", 24)
    turned = only(against(second, first))["latency"]
    assert (turned["ratio"], turned["method"]) == (pytest.approx(1 / 0.9), "paired")
    assert turned["ratio_ci95"] == pytest.approx([1 / 0.92, 1 / 0.88])
    assert against(first, second)["notes"] == []


def test_two_later_candidates_are_compared_through_the_first() -> None:
    _, second, third = in_turns((0.5, 0.49, 0.51), (0.6, 0.59, 0.61))
    result = only(against(second, third))["latency"]
    assert (result["ratio"], result["method"], result["outcome"]) == (pytest.approx(1.2), "paired", "slower")
    assert result["ratio_ci95"][0] < 0.59 / 0.5 < 1.2 < 0.61 / 0.5 < result["ratio_ci95"][1]


def test_an_attempt_of_another_time_is_not_paired() -> None:
    first, second, _ = in_turns((0.9, 0.88, 0.92))
    assert only(against({**first, "attempt": "b"}, second))["latency"]["method"] == "separate"


def test_reports_are_paired_by_what_they_measured() -> None:
    base = [report("b1"), report("b2", recipe="portable"), report("b3", threads=4), report("b4", method="encode")]
    other_board = {"id": "d2", "name": "pi5-b", "arch": "aarch64", "soc": "cortex-a76"}
    other_chip = {"id": "d3", "name": "pi4", "arch": "aarch64", "soc": "cortex-a72"}
    candidate = [
        report("k3", threads=4, device=other_board), report("k2", recipe="portable"),
        report("k4", method="encode", device=other_chip), report("k5", device=other_board), report("k1"),
    ]  # fmt: skip
    document = against(base, candidate)
    cells = [(pair["base"]["cell"], pair["candidate"]["cell"]) for pair in document["pairs"]]
    assert cells == [("b1", "k1"), ("b2", "k2"), ("b3", "k3")]
    unpaired = [(one["side"], one["report"]["cell"]) for one in document["unpaired"]]
    assert unpaired == [("BASE", "b4"), ("CANDIDATE", "k4"), ("CANDIDATE", "k5")]


def test_two_single_reports_are_paired_whatever_they_are() -> None:
    device = {"id": "d9", "arch": "x86_64", "soc": "EPYC"}
    pair = only(
        against(report("b", threads=1), report("k", recipe="portable", threads=2, device=device, model={"name": "b.pte"}))
    )
    assert pair["differs"] == ["model", "recipe", "threads", "device"]
    assert {"threads", "device"} <= {change["what"] for change in pair["changes"]}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (138.54, 35.96, "lost 64.0 dB of SQNR, 138.5 (counts as 100) -> 36.0 dB; 1 dB is allowed"),
        (90.0, 36.0, "lost 54.0 dB of SQNR, 90.0 -> 36.0 dB; 1 dB is allowed"),
        (138.5, 99.5, None),
    ],
)
def test_a_gate_says_what_it_counts_as_lost(before: float, after: float, says: str | None) -> None:
    base, candidate = (report("r", accuracy=[{"output": "y", "sqnr_db": value}]) for value in (before, after))
    assert [one["message"] for one in against(base, candidate, "accuracy=1dB")["gate"]["reasons"]] == (
        [f"output y {says}"] if says else []
    )


def test_a_cell_that_was_never_placed_is_the_counterpart_of_one_that_was() -> None:
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_TOO_LARGE", "message": "No."}
    lost = report("k", state="FAILED", error=error, device=None, threads=None, latency=None, verdict=None)
    document = against([report("b"), report("b2", recipe="portable")], [report("k2", recipe="portable"), lost], "3%")
    assert [(pair["base"]["cell"], pair["candidate"]["cell"]) for pair in document["pairs"]] == [("b", "k"), ("b2", "k2")]
    (reason,) = document["gate"]["reasons"]
    assert (reason["pair"], reason["code"]) == (0, "FAILED") and "PROGRAM_TOO_LARGE" in reason["message"]


def test_reports_without_counterparts_are_nothing_to_compare() -> None:
    base = [report("b1"), report("b2", recipe="portable")]
    with pytest.raises(
        NothingToCompare, match=r"0 resnet8 · xnnpack_fp32 .*1 resnet8 · portable .* 0 other .* Choose one of each"
    ):
        against(base, [report("k1", model={"name": "other"}), report("k2", model={"name": "more"})])
    with pytest.raises(NothingToCompare, match=r"There are no reports in a.json: it is RUNNING\."):
        compare(Side([], {"id": "j", "state": "RUNNING"}, "a.json"), Side(base))


@pytest.mark.parametrize(
    ("choice", "cells"),
    [(None, ["abcd1", "abcd2", "xyz"]), ("0", ["abcd1"]), ("2", ["xyz"]), ("portable", ["abcd2", "xyz"]),
     ("abcd", ["abcd1", "abcd2"]), ("ds_cnn", ["xyz"])],
)  # fmt: skip
def test_some_of_a_sides_reports_can_be_chosen(choice: str | None, cells: list[str]) -> None:
    three = [report("abcd1"), report("abcd2", recipe="portable"), report("xyz", recipe="portable", model={"name": "ds_cnn"})]
    assert [one["cell"] for one in Side(three, choice=choice).chosen] == cells


@pytest.mark.parametrize("choice", ["3", "99999999999999999999", "xnnpack", "abc", "-1"])
def test_what_cannot_be_chosen_is_answered_with_what_can(choice: str) -> None:
    with refuses(
        "REPORT_NOT_FOUND", match=r"a.json has no report '.*': it has 0 resnet8 · xnnpack_fp32 .*, 1 resnet8 · portable"
    ):
        _ = Side([report("abcd1"), report("abcd2", recipe="portable")], file="a.json", choice=choice).chosen


def test_a_choice_stands_behind_the_last_mark() -> None:
    assert split_choice("latest#1") == ("latest", "1")
    assert split_choice("a#b.json#xnnpack_fp32") == ("a#b.json", "xnnpack_fp32")
    assert split_choice("latest") == ("latest", None)
    assert split_choice("latest#") == ("latest#", None)


def operators_of(base: list[dict[str, Any]], other: list[dict[str, Any]], **candidate: Any) -> dict[str, Any]:
    pair = only(against(report("b", operators=base), report("k", operators=other, **candidate)))
    return pair["operators"]  # type: ignore[no-any-return]


EDITED = {"model": {"name": "resnet8", "digest": "9" * 64}}


def line(number: int, code: str) -> dict[str, Any]:
    return {"file": "m.py", "line": number, "code": code}


def test_an_output_with_two_references_is_compared_by_the_first() -> None:
    def quantized(cell: str, eager_db: float, quantized_db: float) -> dict[str, Any]:
        pairs = (("program before quantization", eager_db), ("quantized program", quantized_db))
        rows = [{"output": "y", "sqnr_db": value, "reference": reference} for reference, value in pairs]
        return report(cell, accuracy=rows)

    (result,) = only(against(quantized("b", 36.0, 50.0), quantized("k", 35.0, 60.0)))["accuracy"]
    assert (result["base"]["sqnr_db"], result["candidate"]["sqnr_db"], result["change_db"]) == (36.0, 35.0, -1.0)


def test_two_sides_are_compared_by_a_reference_that_both_have() -> None:
    def accuracy_of(cell: str, **sqnr_db: float) -> dict[str, Any]:
        names = {"eager": "program before quantization", "quantized": "quantized program"}
        return report(
            cell, accuracy=[{"output": "y", "sqnr_db": value, "reference": names[one]} for one, value in sqnr_db.items()]
        )

    both, lost = accuracy_of("b", eager=35.0, quantized=60.0), accuracy_of("k", quantized=58.0)
    (result,) = only(against(both, lost))["accuracy"]
    assert (result["base"]["sqnr_db"], result["candidate"]["sqnr_db"], result["change_db"]) == (60.0, 58.0, -2.0)
    (result,) = only(against(accuracy_of("b", eager=35.0), lost))["accuracy"]
    assert (result["base"]["sqnr_db"], result["candidate"]["sqnr_db"], result["change_db"]) == (35.0, 58.0, None)
    assert result["candidate"]["reference"] == "quantized program"


def of_samples(cell: str, sqnr_db: float, samples: int | None, digest: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a report of an accuracy over several samples; None stands for a release that wrote no number."""
    counted = {key: value for key, value in (("samples", samples), ("samples_digest", digest)) if value is not None}
    return report(cell, accuracy=[{"output": "y", "sqnr_db": sqnr_db, **counted, **more}])


@pytest.mark.parametrize(
    ("base", "candidate", "counts"),
    [
        ((20.1, None), (16.1, 8, "d" * 64), (1, 8)),
        ((20.1, 1), (16.1, 8, "d" * 64), (1, 8)),
        ((16.2, 12, "c" * 64), (16.1, 64, "d" * 64), (12, 64)),
        ((20.1, 8, "c" * 64), (16.1, 8, "d" * 64), (8, 8)),
    ],
)
def test_accuracy_over_other_samples_is_not_one_figure(base: Any, candidate: Any, counts: tuple[int, int]) -> None:
    document = against(of_samples("b", *base), of_samples("k", *candidate), "accuracy=1dB")
    (result,) = only(document)["accuracy"]
    assert (result["base"]["samples"], result["candidate"]["samples"], result["change_db"]) == (*counts, None)
    (reason,) = document["gate"]["reasons"]
    assert reason["code"] == "NOT_MEASURED" and "over the same samples" in reason["message"]
    (fact,) = [fact for fact in facts(only(document)) if fact.name == "SQNR"]
    assert fact.change == "other samples" and fact.candidate.endswith(f"({counts[1]} samples)")


def test_accuracy_over_the_same_samples_is_compared() -> None:
    for old, new in (((20.1, None), (18.1, 1)), ((20.1, 8, "d" * 64), (18.1, 8, "d" * 64))):
        document = against(of_samples("b", *old), of_samples("k", *new), "accuracy=1dB")
        (result,) = only(document)["accuracy"]
        assert result["change_db"] == pytest.approx(-2)
        assert [reason["code"] for reason in document["gate"]["reasons"]] == ["LESS_ACCURATE"]


def test_no_samples_of_the_base_make_an_exact_candidate_worse() -> None:
    old = of_samples("b", 140.0, None, top1_agreement=1.0)
    assert against(old, of_samples("k", 120.0, 8, top1_agreement=1.0), "accuracy=1dB", "top1=2%")["gate"]["passed"]
    doubtful = against(old, of_samples("k", 98.0, 8, top1_agreement=0.9), "accuracy=1dB", "top1=2%")["gate"]
    assert [(reason["metric"], reason["code"]) for reason in doubtful["reasons"]] == [
        ("accuracy", "NOT_MEASURED"), ("top1", "NOT_MEASURED"),
    ]  # fmt: skip


def test_operators_are_matched_by_debug_handle_and_never_by_name() -> None:
    base = [
        operator(0, 0.5, op_types=["conv"], debug_handles=[1], module="a"),
        operator(1, 0.5, op_types=["conv"], debug_handles=[2], module="a"),
    ]
    other = [
        operator(0, 0.75, op_types=["conv"], debug_handles=[2], module="a"),
        operator(1, 0.25, op_types=["conv"], debug_handles=[1], module="a"),
    ]
    result = operators_of(base, other)
    assert result["by"] == "OPERATOR"
    by_base = {row["base"]["indexes"][0]: row for row in result["rows"]}
    assert by_base[0]["candidate"]["indexes"] == [1] and by_base[1]["candidate"]["indexes"] == [0]
    assert by_base[0]["change_ns"] == pytest.approx(-275) and by_base[1]["change_share"] == pytest.approx(0.25)


def test_handles_of_another_export_say_nothing_and_lines_may_move() -> None:
    base = [
        operator(0, 0.5, op_types=["conv"], debug_handles=[1], module="a", source=line(3, "self.a(x)")),
        operator(1, 0.5, op_types=["conv"], debug_handles=[2], module="b", source=line(4, "self.b(x)")),
    ]
    other = [
        operator(0, 0.5, op_types=["conv"], debug_handles=[1], module="b", source=line(14, "self.b(x)")),
        operator(1, 0.4, op_types=["conv"], debug_handles=[2], module="a", source=line(13, "self.a(x)")),
        operator(2, 0.1, op_types=["relu"], debug_handles=[3], module="c", source=line(15, "self.c(x)")),
    ]
    rows = operators_of(base, other, **EDITED)["rows"]
    assert {row["module"]: (row["base"] and row["base"]["indexes"], row["candidate"]["indexes"]) for row in rows} == {
        "a": ([0], [1]), "b": ([1], [0]), "c": (None, [2]),
    }  # fmt: skip
    assert next(row["source"]["line"] for row in rows if row["module"] == "a") == 13


def test_operators_of_one_module_are_told_apart_by_the_code_of_their_lines() -> None:
    def traced(first_line: int, handles: Sequence[int], *codes: str) -> list[dict[str, Any]]:
        return [
            operator(at, 0.5, op_types=["conv"], debug_handles=[handles[at]], module="m", source=line(first_line + at, code))
            for at, code in enumerate(codes)
        ]

    base, other = traced(3, (1, 2), "self.a(x)", "self.b(x)"), traced(2, (1, 2, 3), "self.c(x)", "self.b(x)", "self.a(x)")
    rows = operators_of(base, other, **EDITED)["rows"]
    matched = {tuple(row["base"]["indexes"] if row["base"] else ()): row["candidate"]["indexes"] for row in rows}
    assert matched == {(0,): [2], (1,): [1], (): [0]}


def test_the_same_line_run_more_often_is_one_row() -> None:
    base = [operator(at, 0.25, op_types=["lstm"], module="a", source=line(3, "f(x)")) for at in range(2)]
    other = [operator(at, 0.25, op_types=["lstm"], module="a", source=line(3, "f(x)")) for at in range(3)]
    (row,) = operators_of(base, other, model={"name": "resnet8"})["rows"]
    assert (row["base"]["indexes"], row["candidate"]["indexes"]) == ([0, 1], [0, 1, 2])
    assert (row["base"]["share"], row["candidate"]["share"]) == (0.5, 0.75)


def test_modules_are_compared_where_recipes_differ() -> None:
    base = [
        operator(0, 0.5, op_types=["conv"], module="a"),
        operator(1, 0.3, op_types=["relu"], module="a"),
        operator(2, 0.2, op_types=["linear"], module="b"),
    ]
    other = [
        operator(0, 0.6, op_types=["quantize", "conv", "relu"], module="a"),
        operator(1, 0.4, op_types=["linear"], module="b"),
    ]
    result = operators_of(base, other, recipe="int8", recipe_digest="8" * 64)
    assert result["by"] == "MODULE"
    assert {row["module"]: (row["base"]["indexes"], row["candidate"]["indexes"]) for row in result["rows"]} == {
        "a": ([0, 1], [0]),
        "b": ([2], [1]),
    }


def test_kernels_stand_for_their_delegate_unless_a_side_could_not_tell_them_apart() -> None:
    def traced(aligned: bool) -> list[dict[str, Any]]:
        known = {"op_types": ["conv"], "module": "a"} if aligned else {}
        return [
            operator(0, 1.0, kind="DELEGATE", op_types=["conv"], debug_handles=[1]),
            operator(1, 0.9, kind="KERNEL", parent=0, aligned=aligned, **known),
            operator(2, 0.1, kind="REST", parent=0),
        ]

    rows = operators_of(traced(True), traced(True))["rows"]
    assert {(row["kind"], row["module"]) for row in rows} == {("OPERATOR", "a"), ("REST", None)}
    rows = operators_of(traced(True), traced(False), compile=compiled("2"))["rows"]
    assert [(row["kind"], row["base"]["indexes"], row["candidate"]["indexes"]) for row in rows] == [("DELEGATE", [0], [0])]


def test_size_counts_the_data_files_and_delegation_names_who_left() -> None:
    def compiled(size: int, data: int, delegated: int) -> dict[str, Any]:
        operators = [
            {"op": "aten_mean_dim", "delegated": delegated, "non_delegated": 1 - delegated},
            {"op": "aten_add", "delegated": 3},
        ]
        return {
            "program": {"size_bytes": size}, "data": {"w": {"size_bytes": data}},
            "delegation": {"forward": {"subgraphs": 1, "delegated_nodes": 3 + delegated, "operators": operators}},
        }  # fmt: skip

    pair = only(against(report("b", compile=compiled(100, 900, 1)), report("k", compile=compiled(50, 1000, 0))))
    assert pair["size"]["total_bytes"] == {"base": 1000, "candidate": 1050, "change": 50, "ratio": 1.05}
    assert pair["size"]["program_bytes"] is None
    assert pair["delegation"]["forward"]["operators"] == [
        {"op": "aten_mean_dim", "base": {"delegated": 1, "non_delegated": 0}, "candidate": {"delegated": 0, "non_delegated": 1}}
    ]
    assert pair["delegation"]["forward"]["delegated_nodes"]["change"] == -1


def test_the_unknown_delegation_of_a_ready_program_is_no_change_of_operators() -> None:
    operators = [{"op": "aten_mean_dim", "delegated": 1, "non_delegated": 0}]
    known = {"forward": {"subgraphs": 1, "delegated_nodes": 1, "operators": operators}}
    model, ready = report("b", compile={"delegation": known}), report("k", recipe=None, recipe_digest=None)
    for sides in ((model, ready), (ready, model)):
        delegation = only(against(*sides))["delegation"]["forward"]
        assert delegation["operators"] == [] and delegation["delegated_nodes"]["change"] is None


def test_other_changes_are_reported() -> None:
    tools = {"program": {"size_bytes": 1000}, "toolchain": {"torch": "2.14.0"}}
    (change,) = only(against(report("b"), report("k", compile=tools)))["changes"]
    assert change == {"what": "torch", "base": "2.13.0", "candidate": "2.14.0"}


def test_the_same_cells_on_both_sides_are_said_to_be_the_same() -> None:
    both = [report("b1"), report("b2", recipe="portable")]
    assert "JOB#0 JOB#1" in against(both, both)["notes"][0]
    assert against(both[0], both[0])["notes"] == ["Both sides are the same."]


def test_a_document_of_a_failure_has_every_key() -> None:
    document = failed(NothingToCompare("No.", "Yes."))
    assert list(document) == list(against(report(), report()))
    assert (document["error"]["reason"], document["pairs"], document["gate"]) == ("NOTHING_TO_COMPARE", [], None)
