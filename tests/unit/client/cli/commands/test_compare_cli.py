"""`etfarm compare` of report files: what is read, what is said, and the exit codes. No server is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.client.cli.commands import compare
from etfarm.client.formats import answers, compared, compared_markdown
from etfarm.client.jobs import report_file
from etfarm.client.jobs.comparison import needs_farm
from tests.support.comparisons import against, observed, operator, repeated, report, reports, timed
from tests.support.rendering import printed

UNREACHABLE = "127.0.0.1:1"


def write(path: Path, *reports: dict[str, Any], **changes: Any) -> str:
    """Return the path of a report file."""
    job = {"id": "j" * 16, "state": "SUCCEEDED", "submitted_at": "2025-01-02T03:04:05Z"}
    path.write_text(json.dumps({"schema": "etfarm.report/1", "job": job, "reports": reports, "error": None, **changes}))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A base, and a candidate that is 31 % slower."""
    base = observed("b", 1_000_000, (999_000, 1_001_000))
    return write(tmp_path / "base.json", base), write(tmp_path / "slow.json", observed("k", 1_310_000, (1_300_000, 1_320_000)))


@pytest.fixture
def single_runs(tmp_path: Path) -> tuple[str, str]:
    """A base, and a candidate that was 12 % slower; how much runs of the two vary is unknown."""
    ready: dict[str, Any] = {"recipe": None, "recipe_digest": None, "run_spread": None}
    base = observed("b", 1_000_000, (999_000, 1_001_000), model={"name": "old"}, **ready)
    candidate = observed("k", 1_120_000, (1_110_000, 1_130_000), model={"name": "new"}, **ready)
    return write(tmp_path / "old.json", base), write(tmp_path / "new.json", candidate)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `etfarm compare`, which reaches no server."""
    code = compare.main([*argv, "--server", UNREACHABLE, "--server-wait", "0"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_answer_is_the_first_line_and_two_files_need_no_server(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *files)
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first.startswith("candidate / base  1.310x [1.300, 1.320]  31 % slower  VALID   resnet8 · xnnpack_fp32 · pi5-a")
    assert ["p50", "1.00", "ms", "1.31", "ms", "+31.0", "%"] in [line.split() for line in rest]
    assert ["between", "runs", "0.0", "%", "(1,000,000", "earlier", "reports)"] in [line.split()[:7] for line in rest]
    assert not any("Measured in separate runs" in line for line in rest)


def test_single_runs_are_inconclusive_and_a_gate_names_the_command_that_decides(
    single_runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "`etfarm bench old.pte new.pte --interleave --threads 2 --device name=pi5-a`"
    code, out, err = run(capsys, *single_runs)
    assert (code, err) == (0, "") and out.startswith("candidate / base  1.120x [1.110, 1.130]  12 % slower, inconclusive  VALID")
    lines = [line.split() for line in out.splitlines()]
    assert ["between", "runs", "unknown", "unknown"] in lines
    assert "Measured in separate runs" in out and command in " ".join(out.split())
    target = tmp_path / "c.json"
    code, out, err = run(capsys, *single_runs, "--gate", "3%", "--gate", "size=1%", "--json", str(target), "--markdown", "-")
    assert code == 5 and err.splitlines()[-1].startswith("etfarm: The gate is inconclusive: 1.120x [1.110, 1.130] in separate")
    assert err.rstrip().endswith(f"{command} measures both in turns; or measure each with --repeat 5 instead of --interleave.")
    assert out.startswith("**❔ gate inconclusive** (latency 3 %)") and "| between runs | unknown | unknown |" in out
    gate = json.loads(target.read_text())["gate"]
    assert (gate["passed"], gate["outcome"], gate["reasons"][0]["code"]) == (False, "inconclusive", "NO_SPREAD")


def test_what_is_worse_is_exit_code_3_beside_what_is_inconclusive(
    single_runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = observed("k", 1_120_000, run_spread=None, compile={"program": {"digest": "8" * 64, "size_bytes": 2000}})
    file = write(tmp_path / "larger.json", larger)
    code, _, err = run(capsys, single_runs[0], file, "--gate", "3%", "--gate", "size=1%")
    assert code == 3 and err.startswith("etfarm: The gate is not passed: the program takes 100 % more, ")
    assert err.endswith("; and 1 more.\n")


def test_an_obviously_faster_single_run_passes_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "b.json", observed("b", 10_000_000, (9_990_000, 10_010_000), run_spread=None))
    fast = write(tmp_path / "k.json", observed("k", 1_000_000, (999_000, 1_001_000), run_spread=None))
    code, out, err = run(capsys, base, fast, "--gate", "3%", "--strict")
    assert (code, err) == (0, "") and "gate passed  latency 3 %" in out
    assert "faster by more than separate runs of one program differ (2.5x)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (("conv", "relu"), "kernels matched by name and order, since a .pte alone has no graph of its model"),
        (("conv", "conv", "conv"), "; 1 name occurs more often on one side, and its kernels are compared as a whole"),
    ],
)
def test_kernels_of_ready_programs_are_named(
    kernels: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(cell: str, *names: str) -> dict[str, Any]:
        rows = [
            operator(at, 1 / len(names), mean_ns=1e5, mean_ci95_ns=[9.9e4, 1.01e5]) | {"name": name}
            for at, name in enumerate(names)
        ]
        profile = {"iterations": 30, "p50_ns": 1e5 * len(names) ** 2}
        return observed(cell, 1_000_000, (999_000, 1_001_000), operators=rows, profile=profile, recipe=None, recipe_digest=None)

    base, candidate = write(tmp_path / "b.json", of("b", "conv", "conv")), write(tmp_path / "k.json", of("k", *kernels))
    code, out, _ = run(capsys, base, candidate, "--markdown", str(tmp_path / "c.md"), "--top", "0")
    text = " ".join(out.split())
    assert code == 0 and expected in text and expected in (tmp_path / "c.md").read_text()
    assert ("relu (new)" if "relu" in kernels else "conv (2 -> 3 kernels)") in text
    code, out, _ = run(capsys, base, base)
    assert "matched by name" not in out, "rows of one program are matched by their index"


def test_repeats_are_shown_and_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "b.json", repeated("b", (1e6, 1.01e6, 0.99e6)))
    slow = write(tmp_path / "k.json", repeated("k", (1.2e6, 1.21e6, 1.19e6)))
    code, out, _ = run(capsys, base, slow, "--gate", "3%")
    assert code == 3 and ["between", "runs", "1.0", "%", "(3", "runs)"] in [line.split()[:6] for line in out.splitlines()]
    assert run(capsys, base, slow, "--gate", "21%")[0] == 0, "the limit lies within the interval, above the estimate"
    assert run(capsys, base, slow, "--gate", "20%")[0] == 5, "the estimate is above the limit"
    assert run(capsys, base, slow, "--gate", "21%", "--strict")[0] == 5


def test_one_program_is_not_slower_than_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "first.json", timed("b", 1_000_000, (999_000, 1_001_000)))
    later = write(tmp_path / "later.json", timed("k", 1_120_000, (1_110_000, 1_130_000)))
    code, out, err = run(capsys, first, later, "--gate", "3%")
    assert (code, err) == (0, "") and "same program, 12 % apart" in out.splitlines()[0]
    assert (
        "gate passed  latency 3 %" in out
        and "a difference between runs or their circumstances, not between programs" in " ".join(out.split())
    )


def test_a_gate_that_is_not_passed_is_exit_code_3_and_one_line(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *files, "--gate", "10%", "--gate", "size=1%")
    assert code == 3
    assert err == "etfarm: The gate is not passed: at least 29 % slower, 1.310x [1.300, 1.320]; 10 % is allowed.\n"
    assert "gate not passed  latency 10 %\n" in out, "the size is within its limit"
    code, out, err = run(capsys, *files, "--gate", "40%")
    assert (code, err) == (0, "") and "gate passed  latency 40 %\n" in out
    code, out, _ = run(capsys, *files, "--gate", "40%", "--gate", "size=1%")
    assert code == 0 and "gate passed  latency 40 %, size 1 %\n" in out
    assert run(capsys, *reversed(files), "--gate", "0%")[0] == 0


def test_the_document_is_written_with_the_gate(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "c.json"
    assert run(capsys, *files, "--gate", "10%", "--json", str(target))[0] == 3
    document = json.loads(target.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == "etfarm.comparison/1"
    assert (document["base"]["file"], document["base"]["job"]["id"], document["base"]["choice"]) == (files[0], "j" * 16, None)
    assert (document["gate"]["passed"], document["gate"]["reasons"][0]["code"]) == (False, "SLOWER")
    code, out, err = run(capsys, *files, "--json", "-")
    assert code == 0 and json.loads(out)["pairs"] and "31 % slower" in err


def test_what_stands_for_the_document_of_a_failure_is_one_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "c.json"
    assert run(capsys, "nothere.json", "nothere.json", "--json", str(target))[0] == 2
    document = json.loads(target.read_text())
    assert (document["schema"], document["error"]["reason"]) == ("etfarm.comparison/1", "BAD_REPORT_DOCUMENT")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "This is not JSON"),
        ("\udcff", "This is not JSON"),
        ('{"schema": "etfarm.report/1", "reports": [{"recipe": 3}]}', "reports[0].recipe is 3, not a text."),
    ],
)
def test_a_file_that_is_no_report_is_one_sentence(
    content: str, says: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content.encode(errors="surrogateescape"))
    code, out, err = run(capsys, str(bad), files[1])
    assert (code, out) == (2, "")
    assert err.startswith(f"etfarm: {bad}: ") and says in err and err.count("\n") == 1
    assert "Give a file that --json" in err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["BASE", "nothere.json"], 2, "There is no file nothere.json."),
        (["BASE", "."], 4, "does not answer"),
        (["BASE", "./"], 2, "cannot be read"),
        (["BASE", "latest"], 4, "does not answer"),
        (["BASE"], 2, "Missing argument"),
        (["BASE", "SLOW", "--gate", "3"], 2, "'3' is not a gate."),
        (["BASE", "SLOW", "--gate", "speed=3%"], 2, "'speed=3%' is not a gate."),
        (["BASE", "SLOW", "--gate", "3%", "--gate", "latency=4%"], 2, "There are two gates for latency."),
        (["BASE", "SLOW", "--strict"], 2, "--strict requires --gate."),
        (["BASE", "SLOW#1"], 2, "slow.json has no report '1': it has 0 resnet8 · xnnpack_fp32"),
        (["BASE", "SLOW#portable"], 2, "has no report 'portable'"),
        (["BASE", "SLOW", "--json", "-", "--markdown", "-"], 2, "cannot both be on stdout"),
        (["BASE", "SLOW", "--markdown", "no/such/folder.md"], 2, "There is no folder no/such"),
        (["EMPTY", "SLOW"], 1, "There are no reports in"),
        (["BASE", "SLOW", "--top", "-1"], 2, "--top"),
    ],
)
def test_bad_usage_is_one_sentence_and_its_exit_code(
    argv: list[str], code: int, says: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"BASE": files[0], "SLOW": files[1], "EMPTY": write(tmp_path / "empty.json")}
    arguments = [names.get(word.partition("#")[0], word.partition("#")[0]) + "".join(word.partition("#")[1:]) for word in argv]
    result, out, err = run(capsys, *arguments)
    assert (result, out) == (code, "") and says in err and err.count("\n") == 1, err


def test_a_failed_cell_of_the_candidate_is_exit_code_1_and_shuts_a_gate(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed."}
    failed = write(tmp_path / "failed.json", report("f", state="FAILED", error=error, latency=None, verdict=None))
    code, out, _ = run(capsys, files[0], failed)
    assert code == 1 and out.startswith("candidate / base  the candidate failed (PROGRAM_CRASHED)")
    code, out, err = run(capsys, files[0], failed, "--gate", "size=1%", "--gate", "3%")
    assert code == 3 and "the candidate's cell failed (PROGRAM_CRASHED)" in err
    assert "gate not passed  size 1 %, latency 3 %\n" in out, "what failed keeps no limit"
    assert run(capsys, failed, files[0])[0] == 0, "the base's failure is no fault of the candidate"


def test_invalid_evidence_is_compared_and_gates_nothing_unless_accepted(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated = observed("e", 1_000_000, (999_000, 1_001_000), verdict={"status": "NOT_BENCHMARKABLE"})
    file = write(tmp_path / "emulated.json", emulated)
    code, out, err = run(capsys, files[0], file, "--gate", "3%", "--gate", "size=1%")
    assert code == 5 and "no valid evidence: the candidate's latency is NOT BENCHMARKABLE" in err
    assert out.splitlines()[0].split("   ")[0].endswith("no difference found  NOT BENCHMARKABLE")
    assert run(capsys, files[0], file, "--gate", "3%", "--accept-invalid")[0] == 0
    assert run(capsys, files[0], file, "--gate", "size=1%")[0] == 0


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    old = report("o")
    for key in ("interleaved", "numerics", "analysis", "telemetry"):
        del old[key]
    del old["compile"]["sizes"], old["latency"]["drift"]
    (read,) = report_file.read(Path(write(tmp_path / "old.json", old)))["reports"]
    assert read == {**report("o"), "compile": {**report("o")["compile"]}}
    assert list(read) == list(report("o"))


@pytest.mark.parametrize(
    ("sides", "needed"),
    [(("a.json", "b.JSON"), False), (("a.json#1", "./b#xnnpack_fp32"), False), (("latest", "a.json"), True),
     ((Path("latest"), "a.json"), False), (("baseline#0", "latest#1"), True)],
)  # fmt: skip
def test_files_are_told_from_jobs_by_their_name(sides: tuple[Any, Any], needed: bool) -> None:
    assert needs_farm(*sides) is needed


def test_markdown_is_a_table_the_gate_and_what_changed(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *files, "--gate", "10%", "--gate", "size=1%", "--markdown", "-")
    assert code == 3 and "31 % slower" in err
    lines = out.splitlines()
    assert lines[0] == "**❌ gate not passed** (latency 10 %)"
    row = next(line for line in lines if line.startswith("| **resnet8"))
    assert "xnnpack_fp32" in row and "| 1.00 ms → 1.31 ms | 1.310x [1.300, 1.320] | **31 % slower** |" in row
    assert row.count("|") - row.count(r"\|") == lines[lines.index(row) - 1].count("|")
    target = tmp_path / "c.md"
    assert run(capsys, *files, "--markdown", str(target))[0] == 0
    assert target.read_text().startswith("| | p50 |")


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (("a", 300.0), ("a", 138.5), ""),  # exact, and as good as exact
        (("a", 120.0), ("a", 98.0), "-22.0 dB"),
        (("a", 40.0), ("a", 41.5), "+1.5 dB"),
        (("a", 35.0), ("b", 58.0), "another reference"),
    ],
)
def test_the_change_of_an_accuracy_is_shown_where_it_is_meaningful(
    before: tuple[str, float], after: tuple[str, float], change: str
) -> None:
    sides = [
        report("bk"[place], accuracy=[{"output": "y", "reference": reference, "sqnr_db": sqnr_db}])
        for place, (reference, sqnr_db) in enumerate((before, after))
    ]
    (pair,) = against(*sides)["pairs"]
    (fact,) = [one for one in compared.facts(pair) if one.name == "SQNR"]
    assert (fact.base, fact.candidate, fact.change) == (f"{before[1]:.1f} dB", f"{after[1]:.1f} dB", change)


def test_delegated_nodes_are_counted_as_a_report_counts_them() -> None:
    operators = [
        {"op": "aten_convolution_default", "delegated": 30},
        {"op": "getitem", "delegated": 9},
        {"op": "executorch_call_delegate", "non_delegated": 1},
    ]
    nodes = {"subgraphs": 1, "delegated_nodes": 39, "non_delegated_nodes": 1, "operators": operators}
    one, other = (report(cell, compile={"delegation": {"forward": nodes}}) for cell in "bk")
    (pair,) = against(one, other)["pairs"]
    (fact,) = [one for one in compared.facts(pair) if one.name == "delegated"]
    assert (fact.base, fact.candidate, fact.change) == ("30 of 30 in 1 subgraph", "30 of 30 in 1 subgraph", "")
    assert answers.delegated_nodes(one) == "30 of 30 nodes in 1 subgraph"


def test_what_a_model_is_called_cannot_break_the_table() -> None:
    odd = report("k", model={"name": "a|b<img src=x>\n| *c*"})
    text = compared_markdown.write(against(odd, odd))
    assert "<img" not in text.replace("\\<img", "")
    (row,) = [line for line in text.splitlines() if line.startswith("| **a")]
    assert row.replace(r"\|", "").count("|") == 8


def test_operators_are_named_that_changed_by_a_hundredth_of_the_time() -> None:
    base = [operator(at, share, op_types=["aten.conv.default"], module=f"m{at}") for at, share in enumerate((0.5, 0.4, 0.1))]
    other = [operator(at, share, op_types=["aten.conv.default"], module=f"m{at}") for at, share in enumerate((0.5, 0.405, 0.3))]
    (pair,) = against(report("b", operators=base), report("k", operators=other))["pairs"]
    (moved,) = compared.moved(pair)
    assert (moved.what, moved.base, moved.candidate, moved.change, moved.slower) == (
        "m2: conv",
        "110 ns",
        "330 ns",
        "+220 ns",
        True,
    )


def test_operators_whose_change_chance_explains_are_counted_and_not_listed() -> None:
    def traced(cell: str, *times_ns: float) -> dict[str, Any]:
        whole_ns = sum(times_ns)
        rows = [
            operator(
                at, time_ns / whole_ns, op_types=["aten.conv.default"], module=f"m{at}", mean_ns=time_ns,
                mean_ci95_ns=[time_ns * 0.94, time_ns * 1.06],
            )
            for at, time_ns in enumerate(times_ns)
        ]  # fmt: skip
        profile = {"iterations": 30, "p50_ns": whole_ns, "mean_ns": whole_ns, "verdict": {"status": "VALID"}}
        return report(cell, operators=rows, profile=profile)

    document = against(traced("b", 100_000.0, 200_000.0, 50_000.0), traced("k", 108_000.0, 300_000.0, 52_000.0))
    (pair,) = document["pairs"]
    (moved,) = compared.moved(pair)
    assert (moved.what, moved.change, moved.is_certain) == ("m1: conv", "+100 µs [+78, +122] (inconclusive)", False)
    assert [each.change for each in compared.moved(pair, 0)][1] == "+8.0 µs [-0.8, +16.8] (no difference)"
    assert compared.unmoved(pair) == "no difference found in 2 of 3"
    assert "- operators: no difference found in 2 of 3" in compared_markdown.write(document)


@given(reports("c1"), reports("c2"), st.sampled_from([60, 80, 140]))
@settings(max_examples=40, deadline=None)
def test_whatever_was_measured_can_be_shown_and_nothing_is_wider_than_the_terminal(
    one: dict[str, Any], other: dict[str, Any], width: int
) -> None:
    document = against(one, other, "3%", "size=1%", "memory=1%", "accuracy=1dB")
    lines = printed(*compare.rendered(document, top=0, width=width), width=width).splitlines()
    assert lines[0].startswith("candidate / base  ")
    assert max(map(len, lines)) <= width
    assert any(line.startswith("gate ") for line in lines)
    assert "| | p50 | candidate / base |" in compared_markdown.write(document)
