"""Exports as pure functions: tables come back as they went, slices nest, and no name gets out of its place."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.client import formats
from etfarm.client.formats import (
    answers,
    csv,
    executorch,
    gaps,
    html,
    markdown,
    model_explorer,
    notebook,
    parquet,
    perfetto,
    sentences,
    tables,
)
from etfarm.client.formats.html import charts, facts
from etfarm.wire import views
from tests.support.documents import HOSTILE, document, numerics, report, row
from tests.support.refusals import refuses

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), min_size=1, max_size=12)
TIMES = st.none() | st.floats(1, 1e9)


@st.composite
def operator_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows at top level, some of them delegates with kernels; shares of leaves sum to 1."""
    rows: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        kernels = draw(st.integers(0, 4))
        top = len(rows)
        rows.append(_drawn(draw, top, "DELEGATE" if kernels else "OPERATOR", None))
        rows += [_drawn(draw, len(rows) + place, "KERNEL", top) for place in range(kernels)]
        if kernels:
            rows.append(_drawn(draw, len(rows), "REST", top))
    rows.append(_drawn(draw, len(rows), "REST", None))
    parents = {one.get("parent") for one in rows}
    leaves = [one for one in rows if one["index"] not in parents]
    whole = sum(one["share"] for one in leaves)
    for one in leaves:
        one["share"] /= whole
    for one in rows:
        if one not in leaves:
            one["share"] = sum(below["share"] for below in rows if below.get("parent") == one["index"])
    if draw(st.booleans()):
        _begin(draw, rows)
    return rows


def _drawn(draw: st.DrawFn, index: int, kind: str, parent: int | None) -> dict[str, Any]:
    more: dict[str, Any] = {"parent": parent} if parent is not None else {}
    if draw(st.booleans()):
        more |= {"source": {"file": draw(TEXTS), "line": draw(st.integers(1, 9999)), "code": draw(TEXTS)}}
    if (module := draw(st.none() | st.sampled_from(["a", "a.b", "a.b.c", "d.e", "f"]))) is not None:
        more["module"] = module
    for key in ("mean_ns", "p10_ns", "resolution_ns"):
        if (value := draw(TIMES)) is not None:
            more[key] = value
    more |= {"op_types": draw(st.lists(TEXTS, max_size=2)), "debug_handles": draw(st.lists(st.integers(0, 2**40), max_size=3))}
    more |= {"times_ns": draw(st.lists(st.integers(0, 2**50), max_size=3)), "delegated": parent is not None}
    return row(index, kind, draw(TEXTS), draw(st.floats(0.001, 1)), draw(TIMES), **more)


def _begin(draw: st.DrawFn, rows: list[dict[str, Any]]) -> None:
    """Return rows' beginnings as a device records them; kernels may end beyond their delegate by a tick."""
    at = 0.0
    for top in [one for one in rows if one.get("parent") is None and not one["kind"].endswith("REST")]:
        top["start_ns"], top["duration_ns"] = at, draw(st.floats(0, 1e6))
        inside = at
        for kernel in [one for one in rows if one.get("parent") == top["index"] and one["kind"].endswith("KERNEL")]:
            kernel |= {"start_ns": inside, "duration_ns": draw(st.floats(0, 1e6)), "reconstructed": True}
            inside += kernel["duration_ns"]
        at += top["duration_ns"] + draw(st.floats(0, 100))


def _rows_of(created: dict[str, Any], what: str) -> list[dict[str, Any]]:
    table = tables.table(created, what)
    return [dict(zip(table.columns, one, strict=True)) for one in table.rows]


@given(operator_rows(), st.lists(st.integers(0, 2**60), max_size=5))
@settings(max_examples=30, deadline=None)
def test_tables_come_back_from_csv_and_parquet_as_the_document_has_them(rows: list[dict[str, Any]], samples: list[int]) -> None:
    import io

    import pyarrow.parquet

    created = document(report(operators=rows, latency={"samples_ns": samples}), report(id="r2", operators=[], latency=None))
    for what in tables.WHAT:
        expected = _rows_of(created, what)
        again = pyarrow.parquet.read_table(io.BytesIO(parquet.write(created, what))).to_pylist()
        assert again == expected
        assert csv.read(csv.write(created, what), what) == expected
    operators = created["reports"][0]["operators"]
    assert [one["times_ns"] for one in _rows_of(created, "operators")] == [one["times_ns"] for one in operators]
    assert [one["latency_ns"] for one in _rows_of(created, "samples")] == samples


@given(operator_rows())
@settings(max_examples=30, deadline=None)
def test_slices_nest_and_siblings_do_not_overlap(rows: list[dict[str, Any]]) -> None:
    events = perfetto.trace(document(report(operators=rows)))["traceEvents"]
    slices = [one for one in events if one["ph"] == "X" and one["pid"] != perfetto.JOB_PROCESS]
    assert len(slices) == 1 + sum(not one["kind"].endswith("REST") for one in rows)
    _must_nest(slices)
    by_index = {one["args"].get("index"): one for one in slices}
    for one in rows:
        if "parent" in one and not one["kind"].endswith("REST"):
            above, below = by_index[one["parent"]], by_index[one["index"]]
            assert above["ts"] <= below["ts"] and below["ts"] + below["dur"] <= above["ts"] + above["dur"] + 1e-4
    recorded = "start_ns" in rows[0]
    assert all(("reconstructed" in one["args"]) == (one["cat"] == "reconstructed") for one in slices)
    tops = [one for one in slices if one["args"].get("index") in {top["index"] for top in rows if top.get("parent") is None}]
    assert {one["cat"] for one in tops} == {"recorded" if recorded else "reconstructed"}


def _must_nest(slices: list[dict[str, Any]]) -> None:
    """Complete events of one thread, in order: each lies within those that are open, as the format demands."""
    open_until: list[int] = []
    for one in slices:
        begin, length = round(one["ts"] * 1e3), round(one["dur"] * 1e3)
        assert begin >= 0 and length >= 0
        while open_until and begin >= open_until[-1]:
            open_until.pop()
        if open_until:
            assert begin + length <= open_until[-1]
        if length:
            open_until.append(begin + length)


def test_a_program_that_is_wrong_only_when_fused_says_how_far_off_it_is() -> None:
    numerics = {"wrong_only_when_fused": True, "timed_sqnr_db": None, "sqnr_db": 40.0}
    assert gaps.describe_fused(numerics) == (
        "the outputs of the timed program have no SQNR, and an SQNR of 40.0 dB with one delegate per operator"
    )
    assert not gaps.describe_fused({**numerics, "wrong_only_when_fused": False}) and not gaps.describe_fused({})


def test_the_trace_has_the_jobs_phases_by_actor_without_overlap() -> None:
    one, other = report(), report(id="r2", cell="c2", recipe="portable")
    for phase in other["timeline"][1:]:
        phase["start_ms"] += 10
    trace = perfetto.trace(document(one, other))
    phases = [event for event in trace["traceEvents"] if event["pid"] == perfetto.JOB_PROCESS and event["ph"] == "X"]
    assert [event["name"] for event in phases].count("compiling TORCH_EXPORT") == 1, "both cells tell of one export"
    assert min(event["ts"] for event in phases) == 0
    threads = {event["tid"] for event in phases}
    for thread in threads:
        ordered = sorted((event["ts"], event["ts"] + event["dur"]) for event in phases if event["tid"] == thread)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names.count("CLIENT") == 1 and "DEVICE (2)" in names
    assert json.loads(perfetto.write(document(one))) == perfetto.trace(document(one))


def test_traced_passes_are_first_and_each_process_says_from_where_to_where_it_goes() -> None:
    created = document(report(), report(id="r2", cell="c2", recipe="portable"))
    events = perfetto.trace(created)["traceEvents"]
    named = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    order = {one["pid"]: one["args"]["sort_index"] for one in events if one["name"] == "process_sort_index"}
    assert [named[process] for process in sorted(order, key=order.__getitem__)] == [
        "resnet8 · xnnpack_fp32 · pi5-a, 4 threads: traced pass, from 0 to 1.88 ms (zoom in at the left end)",
        "resnet8 · portable · pi5-a, 4 threads: traced pass, from 0 to 1.88 ms (zoom in at the left end)",
        f"job {created['job']['id']}: its phases, from 0 to 2.86 s",
    ]
    for process in set(named) - {perfetto.JOB_PROCESS}:
        method = next(one for one in events if one["pid"] == process and one["ph"] == "X")
        assert (method["name"], method["ts"], method["dur"]) == ("forward", 0.0, 1880.0)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400), st.integers(2, 50))
def test_thinned_samples_keep_the_lowest_and_the_highest(samples: list[int], points: int) -> None:
    thin = charts.thinned(samples, points, 7)
    if len(samples) <= points:
        assert thin == {"x": list(range(len(samples))), "y": samples, "stretch": 1}
        return
    assert thin["x"] == list(range(0, len(samples), thin["stretch"])) and len(thin["x"]) <= 7
    assert min(thin["low"]) == min(samples) and max(thin["high"]) == max(samples)
    for place, (low, middle, high) in zip(thin["x"], zip(thin["low"], thin["middle"], thin["high"], strict=True), strict=True):
        assert low <= middle <= high and middle in samples[place : place + thin["stretch"]]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=400))
def test_a_histogram_counts_every_sample_once(samples: list[int]) -> None:
    created = charts.histogram(samples)
    assert sum(created["counts"]) + created["beyond"] == len(samples)
    assert created["counts"][0] == sum(created["low"] <= one < created["low"] + created["width"] for one in samples)
    end = created["low"] + created["width"] * len(created["counts"])
    assert created["beyond"] == sum(one >= end for one in samples)


@given(operator_rows())
@settings(max_examples=30, deadline=None)
def test_boxes_of_modules_lie_within_their_parents_and_fill_the_method(rows: list[dict[str, Any]]) -> None:
    operators = report(operators=rows)["operators"]
    boxes = charts.flame(operators, "forward")
    for place, box in enumerate(boxes[1:], 1):
        above = next(one for one in reversed(boxes[:place]) if one["d"] == box["d"] - 1)
        assert above["x"] - 1e-9 <= box["x"] and box["x"] + box["w"] <= above["x"] + above["w"] + 1e-9
    for depth in {box["d"] for box in boxes}:
        ends = [(box["x"], box["x"] + box["w"]) for box in boxes if box["d"] == depth]
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(ends))
    assert sum(box["w"] for box in boxes if box["d"] == 1) == pytest.approx(1)
    shown = {box["row"] for box in boxes if "row" in box}
    assert shown == {one["index"] for one in views.leaves(operators) if one["kind"] != "REST"}


def _names(*modules: str) -> list[tuple[int, str, str]]:
    rows = [row(place, "OPERATOR", "x", 1 / len(modules), 1.0, module=module) for place, module in enumerate(modules)]
    boxes = charts.flame(report(operators=rows)["operators"], "forward")
    return [(box["d"], box["name"], box["path"]) for box in boxes if "row" not in box]


def test_modules_that_hold_nothing_but_one_submodule_share_its_box() -> None:
    assert _names("a.b.c") == [(0, "forward", ""), (1, "a.b.c", "a.b.c")]
    assert _names("a.b.c.d", "a.b.e") == [(0, "forward", ""), (1, "a.b", "a.b"), (2, "c.d", "a.b.c.d"), (2, "e", "a.b.e")]
    assert _names("a", "a.b") == [(0, "forward", ""), (1, "a", "a"), (2, "b", "a.b")], "a has an operator of its own"
    assert _names("a.b", "c.d.e") == [(0, "forward", ""), (1, "a.b", "a.b"), (1, "c.d.e", "c.d.e")]


def test_a_box_of_kernels_that_are_too_short_is_their_delegate_with_its_line() -> None:
    source = {"file": "net.py", "line": 17, "code": "return self.fc(x)"}
    inside = {"delegated": True, "backend": "XnnpackBackend"}
    place = {"op_types": ["aten.linear.default"], "module": "fc", "source": source}
    rows = [
        row(0, "DELEGATE", "XnnpackBackend", 0.8, 636.0, **inside, **place),
        row(1, "KERNEL", "Fully Connected GEMM #1", 0.0, None, parent=0, resolution_ns=1000.0, **inside, **place),
        row(2, "REST", "rest of XnnpackBackend", 0.8, 636.0, parent=0, **inside),
        row(3, "REST", "rest of forward", 0.2, 158.0),
    ]
    measured = report(operators=rows)
    boxes = {box["row"]: box for box in charts.flame(measured["operators"], "forward") if "row" in box}
    assert (boxes[0]["w"], boxes[0]["path"]) == (0.8, "fc") and 2 not in boxes
    assert answers.slowest(measured) == answers.Answer("80.0 %", "net.py:17\nreturn self.fc(x)")


def test_phases_that_wait_are_told_from_phases_that_work() -> None:
    phases = [
        {"actor": "SERVER", "phase": "COMPILE", "start_ms": 0.0, "duration_ms": 2000.0},
        {"actor": "DEVICE", "phase": "WAIT_FOR_IDLE", "start_ms": 2000.0, "duration_ms": 500.0},
        {"actor": "DEVICE", "phase": "TIMED", "start_ms": 2500.0, "duration_ms": 1000.0},
    ]
    measured = report(timeline=phases)
    assert [bar["waits"] for bar in facts.timeline(measured)] == [False, True, False]
    assert [bar["phase"] for bar in facts.timeline(measured)] == ["compiling", "waiting for an idle machine", "measuring"]
    assert facts.waited(measured) == "3.00 s of work and 500 ms of waiting"
    page = html.write(document(measured)).decode()
    assert page.count('<tr class="waits">') == 1


class _Elements(HTMLParser):
    """The elements of a page, with the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def _hostile() -> dict[str, Any]:
    source = {"file": HOSTILE, "line": 1, "code": HOSTILE}
    rows = [row(0, "OPERATOR", HOSTILE, 1.0, 10.0, op_types=[HOSTILE], module=HOSTILE, source=source, backend=HOSTILE)]
    error = {"fault": "FAULT_USER", "reason": HOSTILE, "message": HOSTILE, "remedy": HOSTILE, "stage": HOSTILE}
    bad = report(
        model={"name": HOSTILE, "digest": HOSTILE}, recipe=HOSTILE, method=HOSTILE, operators=rows,
        device={"id": HOSTILE, "name": HOSTILE, "soc": HOSTILE, "os": HOSTILE},
        verdict={"status": "VERDICT_STATUS_INVALID", "reasons": [{"code": HOSTILE, "message": HOSTILE}]},
        accuracy=[{"output": HOSTILE, "dtype": HOSTILE, "reference": HOSTILE}],
        timeline=[{"actor": HOSTILE, "phase": HOSTILE, "start_ms": 0, "duration_ms": 1}],
    )  # fmt: skip
    created = document(bad, report(id="r2", state="FAILED", error=error), error=bad["error"])
    created["job"] |= {"name": HOSTILE, "labels": {HOSTILE: HOSTILE}, "id": HOSTILE}
    return created


def test_no_name_becomes_an_element_of_the_page() -> None:
    page = _Elements()
    page.feed(html.write(_hostile()).decode())
    plain = _Elements()
    plain.feed(html.write(document(report(), report(state="FAILED"))).decode())
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"br"}
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    data = json.loads(page.scripts[0])
    assert data[0]["operators"][0]["name"] == HOSTILE, "and yet it is there, whole"


@pytest.mark.parametrize("created", [document(report(**numerics())), _hostile()], ids=["plain", "hostile"])
def test_the_page_names_no_address_and_lets_nothing_out(created: dict[str, Any]) -> None:
    text = html.write(created).decode()
    assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]", text)
    assert "default-src 'none'" in text and "unsafe-eval" not in text
    page = _Elements()
    page.feed(text)
    assert not {"link", "img", "iframe", "object", "video", "audio", "embed"} & {tag for tag, _ in page.tags}
    assert not any({"src", "srcset"} & set(attributes) for _, attributes in page.tags)


def test_a_page_with_a_million_samples_stays_small_and_says_what_it_leaves_out() -> None:
    measured = report()
    measured["latency"]["samples_ns"] = [1_000_000 + place % 977 for place in range(1_000_000)]
    measured["latency"]["samples_ns"][777_777] = 50_000_000
    page = html.write(document(measured)).decode()
    assert len(page) < 1_000_000
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])[0]
    assert data["samples"]["total"] == 1_000_000 and max(data["samples"]["high"]) == 50_000_000
    assert "1,000,000 samples" in page


def test_the_page_has_the_pairs_of_the_numeric_gap_as_every_other_format() -> None:
    created = document(report(**numerics()))
    rows = created["reports"][0]["numeric_gap"]
    rows[3]["actual"]["shape"] = [2, 8]  # one value in another shape is another value
    values = _embedded(created)["values"]
    assert values == [
        {"place": 0, "QUANTIZED": 0, "EAGER": 1},
        {"place": 2, "QUANTIZED": 2, "EAGER": None},
        {"place": 3, "QUANTIZED": None, "EAGER": 3},
        {"place": 4, "QUANTIZED": 4, "EAGER": 5},
    ]
    assert [rows[one["place"]] for one in values] == [one.judged for one in gaps.operators(rows)]
    for gap in rows:
        gap["reference"] = "NOBODY"
    assert _embedded(created)["values"] == [{"place": place, "QUANTIZED": None, "EAGER": None} for place in range(len(rows))]


def _embedded(created: dict[str, Any]) -> dict[str, Any]:
    """Return what the scripts of a page draw its first report from."""
    page = html.write(created).decode()
    data: dict[str, Any] = json.loads(page.partition('id="data">')[2].partition("</script>")[0])[0]
    return data


def test_the_page_and_markdown_have_the_range_over_several_samples() -> None:
    output = {"output": "y", "reference": "program", "samples": 8, "sqnr_db": 16.1, "sqnr_db_min": 15.4, "sqnr_db_max": 20.1}
    several = document(report(accuracy=[output]))
    assert "16.1 dB (15.4 dB to 20.1 dB in 8 samples)" in markdown.write(several).decode()
    page = html.write(several).decode()
    assert "to the program, 15.4 dB to 20.1 dB in 8 samples" in page
    assert '16.1 dB<br><span class="quiet">15.4 dB to 20.1 dB in 8 samples</span>' in page
    single = document(report(accuracy=[{**output, "samples": 1}]))
    assert "samples)" not in markdown.write(single).decode() and "in 1 sample" not in html.write(single).decode()


def test_the_page_answers_without_a_script() -> None:
    text = html.write(document(report(**numerics()))).decode().partition('id="data"')[0].replace("<wbr>", "")
    for answer in ("1.84 ms", "[1.82, 1.86]", "VALID", "models/resnet.py:31", "80.0 %", "38.2 dB", "313 KiB", "8.00 MiB"):
        assert answer in text, answer
    assert "not on the timed one" in text


def test_the_page_has_the_remedies_of_the_traced_pass_and_not_those_of_the_timed_one() -> None:
    measured = report()
    reason = {"code": "DRIFT", "message": "The last third of the traced pass was 20 % slower than the first."}
    measured["profile"]["verdict"] = {"status": "INVALID", "reasons": [reason]}
    text = html.write(document(measured)).decode().partition("<h3>What is slow")[2].partition('id="data"')[0]
    assert "Give a larger --trace-iterations" in text and "Warm up for longer" not in text


def test_the_page_and_markdown_say_why_operators_were_not_delegated() -> None:
    why = "dim must be the last dim"
    created = document(report(**numerics()))
    (measured,) = created["reports"]
    operator_row = next(one for one in measured["operators"] if one["kind"] == "OPERATOR")
    operator_row |= {"op_types": ["aten.mean.dim"], "delegated": False}
    place = {"source": operator_row["source"], "module": operator_row["module"], "count": 2, "undelegated_reason": why}
    operator = {"op": "aten_mean_dim", "delegated": 0, "non_delegated": 2, "places": [place]}
    delegation = {"subgraphs": 1, "delegated_nodes": 1, "non_delegated_nodes": 2, "operators": [operator]}
    measured["compile"]["delegation"] = {measured["method"]: delegation}
    shown = next(one for one in _embedded(created)["operators"] if one["index"] == operator_row["index"])
    assert shown["undelegated_reason"] == why
    page = html.write(created).decode().partition('id="data"')[0].replace("<wbr>", "")
    assert re.search(rf"2 x aten_mean_dim[^<]*: {why}", page)
    assert f"(2 x: {why})" in markdown.write(created).decode().replace("\\", "")


def test_every_link_of_the_contents_goes_to_a_part_of_the_page() -> None:
    created = document(report(**numerics()), report(id="r2", recipe="portable"), report(id="r3", state="FAILED", **EMPTY))
    page = _Elements()
    page.feed(html.write(created).decode())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {str(attributes["href"]) for tag, attributes in page.tags if tag == "a"}
    assert {"#cells", "#beside", "#r0-warnings", "#r1-delegates", "#r0-numerics", "#r2-facts"} <= links
    assert {link.removeprefix("#") for link in links} <= set(ids)


EMPTY: dict[str, Any] = dict.fromkeys(
    ("latency", "profile", "verdict", "operators", "compile", "accuracy", "memory", "measurement", "device", "runner", "timeline",
     "model", "method", "threads", "recipe")
)  # fmt: skip


@pytest.mark.parametrize("name", ["csv", "parquet", "markdown", "perfetto", "html", "model_explorer"])
def test_every_format_takes_what_was_never_measured(name: str) -> None:
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed.", "remedy": "Look at the log."}
    failed = report(state="FAILED", error=error, **EMPTY)
    module = {
        "csv": csv,
        "parquet": parquet,
        "markdown": markdown,
        "perfetto": perfetto,
        "html": html,
        "model_explorer": model_explorer,
    }[name]
    written = [module.write(created) for created in (document(failed), document(failed, report()), document())]
    assert all(written)
    if name in ("markdown", "html"):
        text = written[0].decode().replace("\\", "")
        assert "PROGRAM_CRASHED" in text and "It was killed." in text and "Look at the log." in text
    without_job = {**document(error=failed["error"]), "job": None}
    assert module.write(without_job)


def test_markdown_is_a_table_whose_rows_have_the_heads_columns() -> None:
    paired = {"base_cell": "c1", "ratio": 0.5, "ratio_ci95": [0.49, 0.51], "rounds": 24, "process_pairs": 8}
    created = document(
        report(**numerics()), report(id="r2", cell="c2", recipe="portable", interleaved=paired), *_hostile()["reports"]
    )
    lines = markdown.write(created).decode().splitlines()
    table = lines[: lines.index("")]
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in table]
    assert len(set(bars)) == 1, table
    assert len(table) == 2 + len(created["reports"])
    assert "0.500x [0.490, 0.510] of xnnpack_fp32: 2.00 times as fast" in table[3].replace("\\", "")
    text = "\n".join(lines)
    outside_of_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "<script" not in outside_of_code and "<img" not in outside_of_code
    assert text.count("<details>") == text.count("</details>")


def test_markdown_names_the_slowest_line_and_the_first_bad_operator() -> None:
    text = markdown.write(document(report(**numerics()))).decode()
    assert "41.2 % of the time in `models/resnet.py:31 y = self.conv2(y)`" in text
    assert "the first bad operator is aten.convolution.default with -1.5 dB against the quantized program" in text


def test_every_format_says_that_the_times_of_operators_cannot_be_trusted() -> None:
    sentence = "40% of the traced iterations took 1.6 times as long as the others."
    reasons = [{"code": "BIMODAL", "message": sentence}]
    known = report()
    doubtful = report(profile={**known["profile"], "verdict": {"status": "INVALID", "reasons": reasons}})
    trusted = report(profile={**known["profile"], "verdict": {"status": "VALID"}})
    text = markdown.write(document(doubtful)).decode()
    assert text.index("> Times of operators: ❌ **invalid**") < text.index("| share | time |")
    for shown in (text, notebook.job(document(doubtful)), notebook.report(doubtful), html.write(document(doubtful)).decode()):
        assert sentence in shown and "Stop other programs on the device." in shown
    for shown in (markdown.write(document(trusted)).decode(), notebook.report(trusted)):
        assert "imes of operators" not in shown


@pytest.mark.remedy("REPORT_NOT_FOUND")
def test_a_report_is_chosen_by_its_number_or_its_cells_beginning() -> None:
    created = document(report(cell="abc1"), report(id="r2", cell="abd2"))
    assert formats.only(created, ["1"])["reports"] == created["reports"][1:]
    assert formats.only(created, ["abc"])["reports"] == created["reports"][:1]
    assert formats.only(created, []) == created
    with refuses("REPORT_NOT_FOUND", match=r"There is no report '7'\. There are 0 "):
        formats.only(created, ["7"])
    with refuses("REPORT_NOT_FOUND", match="Several reports begin with 'ab'"):
        formats.only(created, ["ab"])


def test_parquet_without_its_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("EXTRA_MISSING", match=r"Parquet needs etfarm\[parquet\] \(pyarrow is not installed\)\. Run pip"):
        parquet.write(document(report()))


def test_a_folder_without_an_etdump_says_that_the_inspector_cannot_open_it() -> None:
    text = executorch.readme(report(), ["program.pte", "inputs.npz"])
    assert "The Inspector needs program.etrecord and traced.etdp, which this report does not have." in text
    assert "executorch==1.5.1" in executorch.readme(report(), ["program.etrecord", "traced.etdp"])


@pytest.mark.parametrize(
    ("runs", "spread", "expected"),
    [
        (5, ("REPEATS", 5, 0.0123), "5 runs, 1.2 % between runs"),
        (1, ("HISTORY", 9, 0.02), "2.0 % between runs (of 9 earlier reports)"),
        (5, ("HISTORY", 3, 0.02), "5 runs, 2.0 % between reports (of 3 earlier reports)"),
        (2, ("PRIOR", 0, 0.05), "2 runs, 5.0 % between runs (assumed)"),
        (1, None, ""),
        (0, None, ""),
    ],
)
def test_the_spread_between_runs_names_its_source(runs: int, spread: tuple[str, int, float] | None, expected: str) -> None:
    known = dict(zip(("source", "runs", "relative_stddev"), spread, strict=True)) if spread else None
    assert sentences.runs(report(runs=[{}] * runs, **({"run_spread": known} if known else {}))) == expected
