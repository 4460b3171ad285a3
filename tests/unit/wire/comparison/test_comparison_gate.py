"""Gates on a comparison: what passes, what does not, and why."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.wire import comparison
from etfarm.wire.comparison import Gate, Limit, Side, compare
from tests.support.comparisons import against, observed, repeated, report, timed
from tests.support.golden import Golden

SPREAD = {"source": "REPEATS", "runs": 5, "relative_stddev": 0.01}


def codes(document: dict[str, Any]) -> list[str]:
    gate = document["gate"]
    assert gate["passed"] == (not gate["reasons"]) == (gate["outcome"] == "passed")
    return [reason["code"] for reason in gate["reasons"]]


def unobserved(source: str | None) -> dict[str, Any] | None:
    """Return a spread that was not observed, although it is small: of too few runs, or of other programs."""
    return {"source": source, "runs": 2 if source == "REPEATS" else 40, "relative_stddev": 0.001} if source else None


def notes(document: dict[str, Any]) -> list[str]:
    return [note["code"] for note in document["gate"]["notes"]]


@pytest.mark.parametrize(
    ("text", "metric", "limit", "unit"),
    [
        ("3%", "latency", 3.0, "%"), (" 0.5 % ", "latency", 0.5, "%"), ("latency=10%", "latency", 10.0, "%"),
        ("SIZE=1%", "size", 1.0, "%"), ("memory = 5%", "memory", 5.0, "%"), ("accuracy=1dB", "accuracy", 1.0, "dB"),
        ("accuracy=0.25db", "accuracy", 0.25, "dB"),
    ],
)  # fmt: skip
def test_a_gate_is_a_limit_to_a_metric(text: str, metric: str, limit: float, unit: str) -> None:
    result = Limit.parse(text)
    assert (result.metric, result.limit, result.unit) == (metric, limit, unit)
    assert Limit.parse(result.text.replace(" ", "=", 1)) == result


@pytest.mark.parametrize(
    "text",
    ["", "3", "%", "-3%", "3%%", "1e3%", "nan%", "inf%", "٣%", "latency", "latency=", "latency=3dB", "accuracy=1%",
     "speed=3%", "3% size=1%",
     "1.03x", "99999999999%"],
)  # fmt: skip
def test_what_is_no_gate_is_answered_with_what_is(golden: Golden, text: str) -> None:
    with golden.refuses("BAD_GATE"):
        Limit.parse(text)


def test_a_metric_has_one_gate_and_options_of_gates_want_one(golden: Golden) -> None:
    with golden.refuses("BAD_GATE"):
        Gate.parse(["3%", "latency=4%"])
    with golden.refuses("BAD_GATE"):
        Gate.parse([], accept_invalid=True)
    assert Gate.parse([]) is None
    assert comparison.document(compare(Side([report()]), Side([report()])))["gate"] is None


@pytest.mark.parametrize(
    ("ends", "strict", "reasons", "noted"),
    [
        ((1.02, 1.029), False, [], []),  # slower, and within the limit
        ((0.9, 0.95), False, [], []),
        ((1.015, 1.04), False, [], ["INCONCLUSIVE"]),
        ((1.015, 1.04), True, ["INCONCLUSIVE"], []),
        ((0.93, 1.09), False, ["INCONCLUSIVE"], []),  # a slowdown of 5 % would not be found
        ((0.96, 1.045), False, [], ["INCONCLUSIVE"]),
        ((0.995, 1.085), False, [], ["INCONCLUSIVE"]),  # no slowdown was found
        ((1.025, 1.045), False, ["INCONCLUSIVE"], []),  # one was found, and it is probably above the limit
        ((1.031, 1.04), False, ["SLOWER"], []),
        ((1.031, 1.04), True, ["SLOWER"], []),
    ],
)
def test_a_latency_fails_where_all_of_its_interval_is_beyond_the_limit(
    ends: tuple[float, float], strict: bool, reasons: list[str], noted: list[str]
) -> None:
    exact = observed("b", 1000, (1000, 1000))
    other = observed("k", 1000 * sum(ends) / 2, [1000 * end for end in ends])
    document = against(exact, other, "3%", strict=strict)
    assert (codes(document), notes(document)) == (reasons, noted)


def test_without_an_interval_nothing_is_decided() -> None:
    for after, strict in ((900, False), (1029, False), (1031, False), (1031, True)):
        spread = {"source": "HISTORY", "runs": 9}
        document = against(observed("b", 1000, run_spread=spread), observed("k", after, run_spread=spread), "3%", strict=strict)
        assert (codes(document), document["gate"]["outcome"]) == (["TOO_FEW"], "inconclusive")


@pytest.mark.parametrize("after", [500, 900, 1000, 1020, 1200, 2400])
@pytest.mark.parametrize("source", ["REPEATS", "PRIOR", None])
def test_separate_runs_decide_nothing_until_the_spread_of_both_sides_is_observed(after: float, source: str | None) -> None:
    candidate = observed("k", after, (after * 0.999, after * 1.001), run_spread=unobserved(source))
    for document in (
        against(observed("b", 1000, (999, 1001)), candidate, "3%"),
        against(candidate, observed("b", 1000, (999, 1001)), "3%", "size=1%"),
    ):
        assert (codes(document), document["gate"]["outcome"]) == (["NO_SPREAD"], "inconclusive")
        assert document["pairs"][0]["latency"]["outcome"] in ("inconclusive", "no_difference")


@pytest.mark.parametrize("source", ["REPEATS", "PRIOR", None])
def test_a_separate_run_that_is_obviously_slower_is_not_passed(source: str | None) -> None:
    base = observed("b", 1000, (999, 1001))
    candidate = observed("k", 3000, (2997, 3003), run_spread=unobserved(source))
    document = against(base, candidate, "3%")
    assert (codes(document), document["gate"]["outcome"]) == (["SLOWER"], "failed")
    (reason,) = document["gate"]["reasons"]
    message = reason["message"]
    assert message.startswith("slower by more than separate runs of one program differ (2.5x), 3.000x [2.99")
    assert message.endswith("3 % is allowed")
    assert document["pairs"][0]["latency"]["outcome"] == "slower"
    within = against(base, candidate, "250%")
    assert (codes(within), within["gate"]["outcome"]) == (["NO_SPREAD"], "inconclusive")


@pytest.mark.parametrize("source", ["REPEATS", "PRIOR", None])
@pytest.mark.parametrize("strict", [False, True])
def test_a_separate_run_that_is_obviously_faster_passes_with_a_note(source: str | None, strict: bool) -> None:
    base = observed("b", 10_000, (9_990, 10_010))
    candidate = observed("k", 1000, (999, 1001), run_spread=unobserved(source))
    document = against(base, candidate, "3%", strict=strict)
    assert (codes(document), notes(document), document["pairs"][0]["latency"]["outcome"]) == ([], ["FASTER"], "faster")
    (note,) = document["gate"]["notes"]
    assert note["message"].startswith("faster by more than separate runs of one program differ (2.5x), 0.100x [0.")
    assert note["message"].endswith("it is not known how much runs of the candidate vary")
    barely = against(observed("b", 2400, (2399, 2401)), candidate, "3%", strict=strict)
    assert (codes(barely), barely["gate"]["outcome"]) == (["NO_SPREAD"], "inconclusive")


def test_repeats_on_both_sides_decide() -> None:
    base, same = repeated("b", (1000, 1010, 990, 1004, 996)), repeated("k", (1001, 1009, 992, 1004, 995))
    slower = repeated("s", (1100, 1112, 1090, 1104, 1095))
    assert codes(against(base, same, "3%")) == []
    failed = against(base, slower, "3%")["gate"]
    assert ([reason["code"] for reason in failed["reasons"]], failed["outcome"]) == (["SLOWER"], "failed")
    unclear = against(base, slower, "10%", strict=True)["gate"]
    assert ([reason["code"] for reason in unclear["reasons"]], unclear["outcome"]) == (["INCONCLUSIVE"], "inconclusive")


def test_a_wide_interval_passes_a_gate_as_wide() -> None:
    base, candidate = observed("b", 1000, (1000, 1000)), observed("k", 1010, (930, 1090))
    assert codes(against(base, candidate, "3%")) == ["INCONCLUSIVE"]
    assert (codes(against(base, candidate, "10%")), notes(against(base, candidate, "8%"))) == ([], ["INCONCLUSIVE"])


def test_a_difference_of_unsteady_runs_does_not_fail_within_their_wider_interval() -> None:
    base, candidate = repeated("b", (1000, 1060, 950, 1020, 970)), repeated("k", (1080, 1150, 1020, 1100, 1060))
    document = against(base, candidate, "0%")
    latency = document["pairs"][0]["latency"]
    assert latency["ratio_ci95"][0] > 1
    assert (latency["outcome"], codes(document), document["gate"]["outcome"]) == (
        "inconclusive",
        ["INCONCLUSIVE"],
        "inconclusive",
    )


def test_what_is_worse_counts_before_what_is_unclear() -> None:
    larger = timed("k", 1200, (1190, 1210), compile={"program": {"digest": "2" * 64, "size_bytes": 2000}})
    document = against(timed("b", 1000, (999, 1001)), larger, "3%", "size=1%")
    assert codes(document) == ["LARGER", "NO_SPREAD"] and document["gate"]["outcome"] == "failed"


def test_one_program_is_not_slower_than_itself_without_observed_runs() -> None:
    base, later = timed("b", 1000, (999, 1001)), timed("k", 1120, (1110, 1130))
    document = against(base, later, "3%")
    assert (codes(document), notes(document)) == ([], ["SAME_PROGRAM"])
    assert document["pairs"][0]["latency"]["outcome"] == "inconclusive"
    assert document["gate"]["notes"][0]["message"].startswith("same program, 1.120x [")
    strict = against(base, later, "3%", strict=True)
    assert (codes(strict), strict["gate"]["outcome"]) == ([], "passed")
    other_inputs = timed("k", 1120, (1110, 1130), inputs={"digest": "5" * 64})
    assert codes(against(base, other_inputs, "3%")) == ["NO_SPREAD"]


def test_one_program_whose_repeats_differ_is_not_slower_than_itself() -> None:
    own = repeated("b", (1000, 1001, 999))["compile"]
    document = against(repeated("b", (1000, 1001, 999)), repeated("k", (1200, 1201, 1199), compile=own), "3%")
    assert (codes(document), notes(document)) == ([], ["SAME_PROGRAM"])
    assert document["pairs"][0]["latency"]["outcome"] == "inconclusive"


@pytest.mark.parametrize(
    ("names", "recipes", "command"),
    [
        (("old", "new"), (None, None), "etfarm bench old.pte new.pte --interleave --threads 2 --device name=pi5-a"),
        (("net", "net"), ("portable", "xnnpack_fp32"), "etfarm bench MODEL --recipe portable --recipe xnnpack_fp32 --interleave"),
        (("net", "net"), ("portable", "portable"), "etfarm bench base.pte candidate.pte --interleave"),
        (("net", "other"), ("portable", "portable"), "etfarm bench BASE_MODEL CANDIDATE_MODEL --recipe portable --interleave"),
        (("net", "net"), ("a", "b; rm -rf /"), "etfarm bench MODEL --recipe a --recipe 'b; rm -rf /' --interleave"),
        (("a; rm -rf /", "new"), (None, None), "etfarm bench base.pte new.pte --interleave"),
        (("net", "net"), (None, "portable"), "etfarm bench net.pte candidate.pte --interleave"),
        (("net", "other"), ("portable", "xnnpack_fp32"), "etfarm bench base.pte candidate.pte --interleave"),
    ],
)
def test_what_decides_nothing_names_the_command_that_would(
    names: tuple[str, str], recipes: tuple[str | None, str | None], command: str
) -> None:
    base, candidate = (
        observed(cell, 1000, (999, 1001), model={"name": name}, recipe=recipe, run_spread=None)
        for cell, name, recipe in zip("bk", names, recipes, strict=True)
    )
    document = against(base, candidate, "3%")
    (reason,) = document["gate"]["reasons"]
    assert f"`{command}" in reason["message"] and "--repeat 5" in reason["message"]
    assert f"`{command}" in document["notes"][0]


def test_one_program_that_was_measured_twice_is_one_file() -> None:
    ready = {"model": {"name": "lin"}, "recipe": None, "recipe_digest": None, "run_spread": None}
    twice = [observed(cell, 1000, (999, 1001), **ready) for cell in "bk"]
    twice[1]["compile"] = twice[0]["compile"]
    for text in remedies(*twice):
        assert "each with `etfarm bench lin.pte --repeat 5" in text


def test_an_edited_model_is_measured_in_turns_with_the_one_before() -> None:
    edited = [
        observed(cell, 1000, (999, 1001), model={"name": "net", "digest": cell * 64}, recipe="portable", run_spread=None)
        for cell in "bc"
    ]
    for text in remedies(*edited):
        assert "`etfarm bench BASE_MODEL CANDIDATE_MODEL --recipe portable --interleave --threads" in text
    both = [edited[0], {**edited[1], "recipe": "xnnpack_fp32"}]
    for text in remedies(*both):
        assert "`etfarm bench base.pte candidate.pte --interleave --threads" in text
        assert "after `etfarm compile MODEL --recipe portable -o base.pte` and `etfarm compile MODEL --recipe xnn" in text


def test_the_command_that_decides_repeats_method_and_threads_of_both() -> None:
    def texts(**both: Any) -> list[str]:
        ready = {"run_spread": None, "recipe": None, "recipe_digest": None, **both}
        sides = [observed(cell, 1000, (999, 1001), model={"name": name}, **ready) for cell, name in (("b", "old"), ("k", "new"))]
        return remedies(*sides)

    turns = "`etfarm bench old.pte new.pte --interleave --method decode --threads 1 --device name=pi5-a`"
    assert all(turns in text for text in texts(method="decode", threads=1))
    odd = "`etfarm bench old.pte new.pte --interleave --threads 2 --device name=pi5-a`"
    assert all(odd in text for text in texts(method="a; rm -rf /"))


CIRCUMSTANCES: dict[str, Any] = {
    "threads": 1, "runner": {"kind": "native", "cores": "2,3"}, "inputs": {"digest": "5" * 64, "from_job": True},
    "runs": [{"p50_ns": 1000, "warmup": 7, "verdict": {"status": "VALID"}}], "run_spread": None,
    "device": {"id": "c0ffee", "name": "my board", "arch": "aarch64", "soc": "cortex-a76"},
}  # fmt: skip
OPTIONS = "--threads 1 --cores 2,3 --warmup 7 --device id=c0ffee"


def remedies(base: dict[str, Any], candidate: dict[str, Any]) -> list[str]:
    """Return the messages that name what decides: of the gate, and of the document without one."""
    document = against(base, candidate, "3%")
    return [reason["message"] for reason in document["gate"]["reasons"]] + document["notes"]


def test_the_command_that_decides_repeats_all_that_changes_what_is_measured() -> None:
    def programs(change: dict[str, Any], **both: Any) -> list[str]:
        base = observed("b", 1000, (999, 1001), **{**CIRCUMSTANCES, "model": {"name": "old"}, **both})
        candidate = {**CIRCUMSTANCES, "model": {"name": "new"}, **both, **change}
        return remedies(base, observed("k", 1000, (999, 1001), **candidate))

    turns = f"`etfarm bench old.pte new.pte --interleave {OPTIONS} --inputs FILE.npz` measures both in turns"
    texts = programs({}, recipe=None, recipe_digest=None)
    assert len(texts) == 2 and all(turns in text for text in texts)
    compiled = programs({"recipe": "new", "model": {"name": "old"}}, recipe="old")
    turns = f"`etfarm bench MODEL --recipe old --recipe new --interleave {OPTIONS} --inputs FILE.npz` measures both in turns"
    assert all(turns in text for text in compiled)
    examples = {"inputs": {"digest": "5" * 64, "from_job": False}}
    assert not any("--inputs" in text for text in programs({"recipe": "b", "model": {"name": "old"}}, recipe="a", **examples))
    hostile = programs({}, recipe=None, recipe_digest=None, runner={"kind": "native", "cores": "0; rm -rf /"})
    assert not any("rm -rf" in text for text in hostile)


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        ({"threads": 4}, OPTIONS, OPTIONS.replace("threads 1", "threads 4")),
        ({"runner": {"kind": "native", "cores": "0"}}, OPTIONS, OPTIONS.replace("2,3", "0")),
        ({"runner": {"kind": "native"}}, OPTIONS, OPTIONS.replace("--cores 2,3 ", "")),
        ({"inputs": {"digest": "6" * 64, "from_job": True}}, OPTIONS, OPTIONS),
    ],
)
def test_programs_in_different_circumstances_are_measured_by_a_command_each(change: dict[str, Any], old: str, new: str) -> None:
    ready: dict[str, Any] = {"recipe": None, "recipe_digest": None}
    base = observed("b", 1000, (999, 1001), **CIRCUMSTANCES, **ready, model={"name": "old"})
    candidate = observed("k", 1000, (999, 1001), **{**CIRCUMSTANCES, **change}, **ready, model={"name": "new"})
    texts = remedies(base, candidate)
    commands = [
        f"etfarm bench {name}.pte --repeat 5 {options} --inputs FILE.npz" for name, options in (("old", old), ("new", new))
    ]
    assert len(texts) == 2
    assert all(f"Measure the base with `{commands[0]}` and the candidate with `{commands[1]}`" in text for text in texts)


def test_a_side_that_has_repeats_is_not_to_be_measured_again() -> None:
    base = repeated("b", (1000, 1010, 990, 1004, 996), **{**CIRCUMSTANCES, "run_spread": SPREAD})
    texts = remedies(base, observed("k", 1000, (999, 1001), **CIRCUMSTANCES))
    assert len(texts) == 2
    for text in texts:
        assert "how much runs of the candidate vary" in text and "or measure the candidate with --repeat 5" in text
    same = {"compile": base["compile"], "threads": 4}
    texts = remedies(base, observed("k", 1000, (999, 1001), **{**CIRCUMSTANCES, **same}))
    command = "etfarm bench MODEL --recipe xnnpack_fp32 --repeat 5"
    assert texts and all(f"Measure the candidate with `{command} --threads 4" in text for text in texts)
    assert not any("the base with" in text or "--interleave" in text for text in texts)


def test_programs_with_data_files_are_measured_by_a_command_each() -> None:
    def of(cell: str, **changes: Any) -> dict[str, Any]:
        program = {"program": {"digest": cell * 64, "size_bytes": 1000}, "data": {"w": {"size_bytes": 9}}}
        return observed(cell, 1000, (999, 1001), compile=program, run_spread=None, recipe=None, recipe_digest=None, **changes)

    for text in remedies(of("b", model={"name": "old"}), of("c", model={"name": "new"})):
        assert "old.pte --repeat 5 --threads 2 --device name=pi5-a --data DATA.ptd" in text and "--interleave" not in text


def test_one_program_is_not_to_be_interleaved_with_itself() -> None:
    base = observed("b", 1000, (999, 1001), run_spread=None)
    same = {"compile": base["compile"], "run_spread": None}
    newer = {**base["compile"], "toolchain": {"torch": "2.14.0"}}
    others = (
        observed("k", 1120, (1110, 1130), **same),
        observed("k", 1120, (1110, 1130), **same, threads=1),
        observed("k", 1120, (1110, 1130), **same, inputs={"digest": "5" * 64}),
        observed("k", 1120, (1110, 1130), compile=newer, run_spread=None),
    )
    for other in others:
        texts = remedies(base, other)
        assert texts and not any("--interleave" in text for text in texts)
        assert all("`etfarm bench MODEL --recipe xnnpack_fp32 --repeat 5 --threads" in text for text in texts)


def test_why_a_gate_is_shut_is_a_sentence_that_stays_true() -> None:
    document = against(observed("b", 1000, (1000, 1000)), observed("k", 1310, (1289, 1340)), "10%")
    (reason,) = document["gate"]["reasons"]
    assert reason["message"] == "at least 28 % slower, 1.310x [1.289, 1.340]; 10 % is allowed"


@pytest.mark.parametrize("status", ["INVALID", "NOT_BENCHMARKABLE"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_latency_that_cannot_be_trusted_is_no_evidence_unless_it_is_accepted(status: str, side: int) -> None:
    verdict = {"status": status, "reasons": [{"code": "CPU_STARVED", "message": "So."}]}
    pair = [report("b"), report("k")]
    pair[side] = report("bk"[side], verdict=verdict)
    document = against(*pair, "3%", "size=1%", "accuracy=1dB", "memory=1%")
    (reason,) = document["gate"]["reasons"]
    assert (reason["metric"], reason["code"]) == ("latency", "NO_VALID_EVIDENCE")
    assert reason["message"].startswith("no valid evidence: ") and "CPU_STARVED" in reason["message"]
    assert codes(against(*pair, "3%", accept_invalid=True)) == []
    assert codes(against(*pair, "size=1%")) == []


def test_both_latencies_that_are_not_valid_are_named_with_the_command_that_measures_again() -> None:
    starved = {"status": "INVALID", "reasons": [{"code": "CPU_STARVED", "message": "So."}]}
    emulated = {"status": "NOT_BENCHMARKABLE", "reasons": [{"code": "EMULATED", "message": "So."}]}
    again = "MODEL --recipe xnnpack_fp32 --require-valid --retry-invalid 2 --threads 2 --device name=pi5-a`, or with --repeat 5"

    def message(base: dict[str, Any] | None, candidate: dict[str, Any] | None, **both: Any) -> str:
        (reason,) = against(report("b", verdict=base, **both), report("k", verdict=candidate, **both), "3%")["gate"]["reasons"]
        return str(reason["message"])

    both = "the base's latency is INVALID (CPU_STARVED) and the candidate's latency is INVALID (CPU_STARVED)"
    command = f"again with `etfarm bench {again}; --accept-invalid accepts"
    assert message(starved, starved) == f"no valid evidence: {both}. Measure both {command} both"
    first = "the base's latency is INVALID (CPU_STARVED)"
    assert message(starved, {"status": "VALID"}) == f"no valid evidence: {first}. Measure the base {command} it"
    unusable = "the base's latency is NOT BENCHMARKABLE (EMULATED) and the candidate's latency is not judged"
    assert message(emulated, None) == f"no valid evidence: {unusable}; --accept-invalid accepts both"
    assert "--threads 2 --cores 4-7 --device" in message(starved, starved, runner={"kind": "native", "cores": "4-7"})
    runs = [{"p50_ns": 1000, "steady": True, "verdict": starved}] * 4
    repeated = f"Measure both {command}".replace("--require-valid", "--repeat 4 --require-valid").replace(
        ", or with --repeat 5", ""
    )
    assert message(starved, starved, runs=runs) == f"no valid evidence: {both}. {repeated} both"


def test_what_was_measured_in_turns_or_with_repeats_is_measured_for_longer() -> None:
    few = "`etfarm bench MODEL --recipe portable --recipe xnnpack_fp32 --interleave --threads 2 --device name=pi5-a"
    rounds = {"base_cell": "b", "rounds": 40, "process_pairs": 8, "ratio": 1.03, "ratio_ci95": [1.0, 1.06]}
    invalid = {"status": "INVALID", "reasons": [{"code": "DRIFT", "message": "So."}]}

    def reason(base: dict[str, Any], candidate: dict[str, Any]) -> str:
        return str(against(base, candidate, "3%", strict=True)["gate"]["reasons"][0]["message"])

    for verdict, expected in (
        ({"status": "VALID"}, f"{few} --min-time 10` measures both in turns for longer"),
        (invalid, f"Measure both again with {few} --require-valid`; --accept-invalid accepts it"),
    ):
        base = observed("b", 1000, (999, 1001), attempt="a", recipe="portable")
        candidate = observed("k", 1030, (1029, 1031), attempt="a", interleaved=rounds, verdict=verdict)
        assert reason(base, candidate).endswith(expected)
    for timed_s, expected in ((6, "--min-time 24`"), (100, "--min-time 240`"), (200, "for 200 s already: allow a larger")):
        measured = {"duration_ns": timed_s * 10**9}
        base = observed("b", 1000, (999, 1001), attempt="a", recipe="portable", measurement=measured)
        candidate = observed("k", 1030, (1029, 1031), attempt="a", interleaved=rounds, verdict={"status": "VALID"})
        assert expected in reason(base, candidate)
    medians = (1000, 1060, 940, 1020, 980, 1000, 1050)
    separate = reason(repeated("b", medians, recipe="portable"), repeated("k", medians))
    turns = few.replace("--device", "--warmup 0 --device")
    assert separate.endswith(f"{turns}` measures both in turns; or measure each with --repeat 14 instead of --interleave")


def test_latencies_of_devices_of_different_kinds_are_no_evidence_unless_accepted() -> None:
    same_kind = report("k", device={"id": "d2", "arch": "aarch64", "soc": "cortex-a76"})
    other_kind = report("k", device={"id": "d3", "arch": "aarch64", "soc": "cortex-a55"})
    assert codes(against(report("b"), same_kind, "3%", "size=1%")) == []
    assert codes(against(report("b"), other_kind, "3%", "size=1%")) == ["NO_VALID_EVIDENCE"]
    assert codes(against(report("b"), other_kind, "3%", accept_invalid=True)) == []


def test_what_was_never_measured_is_not_accepted() -> None:
    compiled = report("k", latency=None, verdict=None)
    assert codes(against(report("b"), compiled, "3%", accept_invalid=True)) == ["NO_VALID_EVIDENCE"]
    nothing = report("k", memory=None, accuracy=[], compile=None)
    assert codes(against(report("b"), nothing, "size=1%", "memory=1%")) == ["NOT_MEASURED"] * 2
    assert codes(against(nothing, report("b"), "accuracy=1dB")) == ["NOT_MEASURED"]


def test_sizes_and_memory_are_exact() -> None:
    def sized(cell: str, size: int, peak: int, planned: int) -> dict[str, Any]:
        return report(
            cell, compile={"program": {"size_bytes": size}}, memory={"peak_rss_bytes": peak, "planned_bytes": [planned]}
        )

    base = sized("b", 1000, 1000, 1000)
    assert codes(against(base, sized("k", 1010, 1050, 1050), "size=1%", "memory=5%")) == []
    assert codes(against(base, sized("k", 1011, 1050, 1051), "size=1%", "memory=5%")) == ["LARGER", "MORE_MEMORY"]
    assert codes(against(base, sized("k", 1000, 1051, 900), "size=0%", "memory=5%")) == ["MORE_MEMORY"]


def outputs(**sqnr: Any) -> list[dict[str, Any]]:
    return [{"output": name, **(value if isinstance(value, dict) else {"sqnr_db": value})} for name, value in sqnr.items()]


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (outputs(y=40.0), outputs(y=39.0), []),
        (outputs(y=40.0), outputs(y=38.9), ["LESS_ACCURATE"]),
        (outputs(y=300.0), outputs(y=120.0), []),  # two fp32 kernels
        (outputs(y=120.0), outputs(y=98.9), ["LESS_ACCURATE"]),
        (outputs(y=40.0), outputs(y={"nan_count": 3}), ["LESS_ACCURATE"]),
        (outputs(y=40.0, z=40.0), outputs(y=40.0), ["LESS_ACCURATE"]),
        (outputs(relu_19=40.0), outputs(relu_25=40.0), []),  # the same output behind six more layers
        (outputs(y=50.0, relu_19=40.0), outputs(relu_25=30.0, y=50.0), ["LESS_ACCURATE"]),
        (outputs(y={"equal": True}), outputs(y={"equal": True}), []),  # all zeros have no SQNR
        (outputs(y={"equal": True}), outputs(y={"equal": False}), ["LESS_ACCURATE"]),
        (outputs(y=40.0, z=50.0), outputs(y=40.0, z=10.0), ["LESS_ACCURATE"]),
    ],
)
def test_accuracy_is_gated_by_output(before: list[Any], after: list[Any], reasons: list[str]) -> None:
    assert codes(against(report("b", accuracy=before), report("k", accuracy=after), "accuracy=1dB")) == reasons


def test_accuracies_against_different_references_are_not_measured() -> None:
    base = report("b", accuracy=[{"output": "y", "sqnr_db": 35.0, "reference": "program before quantization"}])
    candidate = report("k", accuracy=[{"output": "y", "sqnr_db": 58.0, "reference": "quantized program"}])
    (reason,) = against(base, candidate, "accuracy=1dB")["gate"]["reasons"]
    assert reason["code"] == "NOT_MEASURED"
    assert reason["message"] == (
        "accuracy is not known for both sides against one reference: the base is compared with the program before quantization, "
        "the candidate with the quantized program"
    )


def test_a_report_that_the_candidate_lacks_shuts_every_gate() -> None:
    base = [report("b1"), report("b2", recipe="portable")]
    document = against(base, [report("k1"), report("k2", recipe="other")], "size=1%")
    assert codes(document) == ["MISSING"]
    assert "resnet8 · portable" in document["gate"]["reasons"][0]["message"]
    assert codes(against([report("k1")], base, "size=1%")) == [], "what is only in the candidate is no loss"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_a_failed_cell_of_the_candidate_shuts_every_gate(state: str) -> None:
    assert codes(against(report("b"), report("k", state=state), "size=1%", "accuracy=1dB")) == ["FAILED"]


def test_a_failed_cell_that_only_the_candidate_has_shuts_every_gate() -> None:
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed."}
    failed = report("k2", recipe="portable", state="FAILED", error=error)
    document = against(report("b"), [report("k1"), failed], "size=1%")
    (reason,) = document["gate"]["reasons"]
    assert (reason["pair"], reason["code"], document["gate"]["passed"]) == (None, "FAILED", False)
    assert reason["message"].startswith("resnet8 · portable") and "PROGRAM_CRASHED" in reason["message"]


def test_a_job_that_is_not_done_shuts_every_gate() -> None:
    live = {"id": "j1", "state": "RUNNING"}
    compared = comparison.document(compare(Side([report("b")]), Side([report("k")], live)), Gate.parse(["size=1%"]))
    assert codes(compared) == ["JOB_LIVE"]
    assert "job j1, the candidate, is still RUNNING" in compared["gate"]["reasons"][0]["message"]
    assert compared["notes"][0] == "Job j1 is not done: cells that are still live are left out."


def test_reasons_name_their_report_where_there_are_several() -> None:
    base = [observed("b1", 1000, (999, 1001)), observed("b2", 1000, (999, 1001), recipe="portable")]
    worse = [observed("k1", 1000, (999, 1001)), observed("k2", 2000, (1990, 2010), recipe="portable")]
    (reason,) = against(base, worse, "3%")["gate"]["reasons"]
    assert reason["pair"] == 1 and reason["message"].startswith("resnet8 · portable · pi5-a (cortex-a76, 2 threads): at least")
