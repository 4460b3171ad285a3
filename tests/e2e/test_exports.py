"""A real job's reports in every format, by the command line; the HTML page in a real browser without a network."""

from __future__ import annotations

import copy
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from etfarm.client.formats import csv, html, perfetto, tables
from tests.support.documents import HOSTILE, document, numerics, report, row
from tests.support.farm import FarmProcess, etfarm
from tests.support.mutations import mutated, read_everywhere

pytestmark = pytest.mark.slow(reason="a farm measures a job, and a browser opens its report")

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 120_000
"""With a browser that starts on a busy machine."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")


@dataclass(frozen=True)
class Job:
    """A job of two cells: delegated whole, and not at all."""

    id: str
    document: dict[str, Any]
    server: str
    folder: Path

    def export(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`etfarm report export` of it."""
        return etfarm("report", "export", self.id, *arguments, "--server", self.server, cwd=self.folder)


@pytest.fixture(scope="module")
def job(farm: FarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Job:
    with farm.client() as client:
        done = client.bench("demo:ds_cnn", recipes=["xnnpack_fp32", "portable"], min_time_s=0.2)
        created = done.result().json()
    assert [one["error"] for one in created["reports"]] == [None, None]
    return Job(done.id, created, farm.address, tmp_path_factory.mktemp("exports"))


def test_tables_go_to_a_folder_both_and_hold_the_documents_values(job: Job) -> None:
    import pyarrow.parquet

    (job.folder / "tables").mkdir()
    for name in ("csv", "parquet"):
        done = job.export("--format", name, "-o", "tables")
        assert done.returncode == 0, done.stderr
    for what in tables.WHAT:
        table = tables.table(job.document, what)
        expected = [dict(zip(table.columns, one, strict=True)) for one in table.rows]
        stem = job.folder / "tables" / f"ds_cnn-{job.id}.{what}"
        assert csv.read(Path(f"{stem}.csv").read_bytes(), what) == expected
        assert pyarrow.parquet.read_table(f"{stem}.parquet").to_pylist() == expected
        assert len(expected) > 20
    alone = job.export("--format", "csv", "--report", "1")
    assert {one["recipe"] for one in csv.read(alone.stdout.encode())} == {"portable"}


def test_the_trace_has_the_kernels_within_their_delegate(job: Job) -> None:
    done = job.export("--format", "perfetto", "-o", "x.trace.json")
    assert done.returncode == 0, done.stderr
    trace = json.loads((job.folder / "x.trace.json").read_text())
    assert trace == perfetto.trace(job.document)
    slices = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] == perfetto.JOB_PROCESS + 1]
    method, delegate, *kernels = slices
    assert (method["name"], delegate["name"]) == ("forward", "XnnpackBackend")
    assert kernels and all(one["args"]["reconstructed"] for one in kernels), "XNNPACK tells durations only"
    assert "reconstructed" not in delegate["args"], "a delegate's call is recorded"
    assert all(
        delegate["ts"] <= one["ts"] and one["ts"] + one["dur"] <= delegate["ts"] + delegate["dur"] + 1e-4 for one in kernels
    )
    portable = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] == perfetto.JOB_PROCESS + 2]
    assert len(portable) > 20 and any("ds_cnn.py" in one["args"].get("source", "") for one in portable)


def test_json_and_markdown_go_to_stdout_and_a_file_exports_as_its_job_does(job: Job) -> None:
    text = job.export("--format", "json").stdout
    assert json.loads(text)["reports"] == job.document["reports"]
    (job.folder / "kept.json").write_text(text)
    table = job.export("--format", "markdown").stdout
    again = etfarm("report", "export", "kept.json", "--format", "markdown", cwd=job.folder)
    assert again.stdout == table
    assert "**ds_cnn · xnnpack_fp32" in table and "ds_cnn.py" in table


def test_executorchs_own_files_open_in_its_inspector(job: Job) -> None:
    done = job.export("--format", "executorch", "--report", "1", "-o", "raw")
    assert done.returncode == 0, done.stderr
    folder = job.folder / "raw"
    there = {path.name for path in folder.iterdir()}
    named = {"program.pte", "program.etrecord", "traced.etdp", "inputs.npz", "outputs.npz", "forward.pt2", "report.json"}
    assert there == named | {"README.txt", "open_in_inspector.py"}
    assert all(name in (folder / "README.txt").read_text() for name in named)
    opened = subprocess.run([sys.executable, "open_in_inspector.py"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert opened.returncode == 0, opened.stderr
    assert "native_call_convolution.out" in opened.stdout


def test_bench_writes_its_page_when_a_cell_fails_too(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def factory():\n    raise ValueError('no weights here')\n")
    done = etfarm("bench", "broken.py:factory", "--html", "r.html", "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 1
    page = (tmp_path / "r.html").read_text()
    assert "FACTORY_FAILED" in page and "no weights here" in page


def test_the_page_says_whether_it_got_worse(job: Job) -> None:
    done = job.export("--format", "html", "--against", job.id, "-o", "compared.html", "--report", "0")
    assert done.returncode == 0, done.stderr
    page = (job.folder / "compared.html").read_text()
    assert "Did it get worse?" in page and "1.000x" in page and "Both sides are the same." in page
    refused = job.export("--format", "csv", "--against", "latest")
    assert refused.returncode == 2 and "--against requires html, got csv." in refused.stderr


@dataclass
class Browser:
    """One page, and what it did that it must not."""

    page: Page
    requests: list[str]
    complaints: list[str]

    def open(self, path: Path, created: dict[str, Any]) -> Page:
        """Writes the page of a document and opens it."""
        path.write_bytes(html.write(created))
        self.requests.clear()
        self.page.goto(path.as_uri())
        return self.page

    def must_be_quiet(self, path: Path) -> None:
        """Nothing was asked for but the file, and nothing went wrong."""
        assert self.requests == [path.as_uri()]
        assert self.complaints == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
        context = chromium.new_context(offline=True, viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        seen = Browser(page, [], [])
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.complaints.append(message.text))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
        yield seen
        chromium.close()


@needs_chromium
def test_the_page_draws_sorts_filters_and_zooms_without_a_network(browser: Browser, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    page = browser.open(path, job.document)
    article = page.locator("#r1")  # portable: operators at top level
    rows = article.locator(".rows tbody tr")
    canvases = page.locator("canvas")
    canvases.first.wait_for()
    assert canvases.count() >= 4

    operators = [one for one in job.document["reports"][1]["operators"] if one["kind"] != "REST"]
    largest = max(operators, key=lambda one: one["share"])
    assert rows.first.get_attribute("data-index") == str(largest["index"])
    article.locator(".rows [data-sort=order]").click()
    assert rows.first.get_attribute("data-index") == "0"
    article.locator(".rows [data-sort=order]").click()
    assert rows.first.get_attribute("data-index") != "0"

    article.locator("input[type=search]").fill("PERMUTE")
    assert rows.count() == sum("permute" in one["name"] for one in operators)
    article.locator("input[type=search]").fill("")
    article.locator("[data-view=line]").click()
    assert "ds_cnn.py" in rows.first.inner_text()

    boxes = article.locator(".icicle g")
    before = boxes.count()
    article.locator(".icicle g[data-box=block2]").click()
    assert 0 < boxes.count() < before
    article.locator(".icicle g").first.click()
    assert boxes.count() == before
    page.locator("#r0 select").select_option("-")
    assert page.locator("#r0 .rows tr.delegate").count() == 0
    browser.must_be_quiet(path)


@needs_chromium
def test_the_whole_page_of_a_real_run_is_a_picture_for_people_to_look_at(browser: Browser, job: Job, tmp_path: Path) -> None:
    page = browser.open(tmp_path / "r.html", job.document)
    page.locator("canvas").first.wait_for()
    page.screenshot(path=tmp_path / "r.png", full_page=True)
    picture = Image.open(tmp_path / "r.png")
    picture.load()
    assert picture.format == "PNG"
    assert picture.width == 1280 and 1000 < picture.height < 30_000
    colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colours is not None and len(colours) > 50
    assert max(count for count, _ in colours) < 0.98 * picture.width * picture.height, "more than a background"


@needs_chromium
def test_a_hostile_name_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    source = {"file": HOSTILE, "line": 1, "code": HOSTILE}
    rows = [row(0, "OPERATOR", HOSTILE, 1.0, 10.0, op_types=[HOSTILE], module="a", source=source, backend=HOSTILE)]
    path = tmp_path / "r.html"
    created = document(report(model={"name": HOSTILE, "digest": "0"}, operators=rows, **numerics()))
    page = browser.open(path, created)
    assert page.locator(".rows td.name").first.inner_text().startswith(HOSTILE)
    for view in ("op", "type", "module", "line", "backend"):
        page.locator(f"[data-view={view}]").click()
    page.locator(".icicle g").last.hover()
    assert HOSTILE in page.locator("#tip").inner_text()
    assert page.locator("img").count() == 0
    browser.must_be_quiet(path)


@needs_chromium
def test_the_first_bad_operator_is_named_and_a_narrow_window_has_no_sideways_scroll(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    page = browser.open(path, document(report(**numerics()), report(id="r2", cell="c2")))
    assert (
        "The first bad operator is convolution: -1.5 dB against the quantized program" in page.locator(".first-bad").inner_text()
    )
    assert page.locator(".gap-table tr.first").count() == 1
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("document.querySelector('canvas').getBoundingClientRect().width < innerWidth")
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    browser.must_be_quiet(path)


WIDE_TABLES = """() => [...document.querySelectorAll("table:not(.u-legend)")].filter((one) => one.offsetWidth)
    .map((one) => [one, one.getBoundingClientRect().right, one.parentElement.getBoundingClientRect().right])
    .filter(([one, right, room]) => right > Math.min(innerWidth, room + 1))
    .map(([one]) => one.className + ": " + one.textContent.slice(0, 80))"""
"""Tables that a window has no room for."""

OVERPRINTED = """() => {
  const boxesOf = (cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return [...range.getClientRects()].filter((box) => box.width > 1 && box.height > 1);
  };
  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const meet = (a, b) => across(a, b) > -3 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  const found = [];
  for (const row of document.querySelectorAll("table:not(.u-legend) tr")) {
    const cells = [...row.children].map((cell) => [cell, boxesOf(cell)]);
    cells.forEach(([cell, boxes], place) => cells.slice(place + 1).forEach(([other, others]) => {
      if (boxes.some((one) => others.some((two) => meet(one, two)))) found.push(cell.textContent + " over " + other.textContent);
    }));
  }
  return found;
}"""
"""Cells of one row whose texts lie on each other, or so near that they read as one word."""


@needs_chromium
@pytest.mark.parametrize("width", [360, 400, 600, 1280])
def test_all_of_a_real_page_can_be_read_at_any_width(browser: Browser, job: Job, tmp_path: Path, width: int) -> None:
    created = copy.deepcopy(job.document)
    long = report(**numerics())
    where = {"file": "a/folder/with/a/long/name/models/networks/residual.py", "line": 131, "code": "y = self.conv2(y)"}
    for one in (*long["operators"], *long["numeric_gap"]):
        one["source"] = where if one["source"] else None
    created["reports"].append(long)
    path = tmp_path / "r.html"
    browser.page.set_viewport_size({"width": width, "height": 900})
    try:
        page = browser.open(path, created)
        page.locator("canvas").first.wait_for()
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for view in ("operators", "op", "type", "module", "line", "backend"):
            for tab in page.locator(f"[data-view={view}]").all():
                tab.click()
            assert page.evaluate(OVERPRINTED) == [], view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if width <= 700:
                assert page.evaluate(WIDE_TABLES) == [], view
        browser.must_be_quiet(path)
    finally:
        browser.page.set_viewport_size({"width": 1280, "height": 900})


@needs_chromium
def test_a_narrow_page_gives_a_line_its_room_and_names_the_file_first(browser: Browser, job: Job, tmp_path: Path) -> None:
    browser.page.set_viewport_size({"width": 400, "height": 900})
    try:
        page = browser.open(tmp_path / "r.html", job.document)
        rows = page.locator("#r1 .rows tbody tr")
        assert rows.count() <= 15, "the others on demand"
        places = page.locator("#r1 .rows td.place", has=page.locator(".folder"))
        assert places.count() > 3
        for place in places.all():
            assert place.evaluate("(one) => one.offsetWidth > 0.9 * one.closest('table').offsetWidth")
            file, folder = (
                place.locator(part).evaluate("(one) => one.getBoundingClientRect().toJSON()") for part in (".file", ".folder")
            )
            assert (file["top"] + 4 < folder["top"]) or file["right"] <= folder["left"]
            assert file["height"] < 30, "one line"
        text = page.locator(".overview tbody tr").first.locator("td[data-head]")
        heads = "(all) => all.map((one) => getComputedStyle(one, '::before').content.replaceAll('\"', '').trim())"
        reported = [head for head in text.evaluate_all(heads) if head != "none"]
        assert {"Can it be trusted?", "Delegated", "Accuracy", "Size", "Memory"} <= set(reported)
        longest = "(one) => Math.max(...[...one.querySelectorAll('i')].map((bar) => bar.offsetWidth)) / one.offsetWidth"
        assert page.locator("#r0 .phases").evaluate(longest) > 0.2
    finally:
        browser.page.set_viewport_size({"width": 1280, "height": 900})


@needs_chromium
def test_a_wide_page_has_all_answers_in_one_line(browser: Browser, job: Job, tmp_path: Path) -> None:
    page = browser.open(tmp_path / "r.html", job.document)
    tiles = page.locator("#r0 .tile")
    assert tiles.count() >= 7
    assert len({round(tile.bounding_box()["y"]) for tile in tiles.all()}) == 1  # type: ignore[index]
    path = page.locator("#r1 .rows td.place .path").first
    assert path.inner_text().startswith("etfarm/client/export/demo_models/ds_cnn.py:"), "whole, to be copied"


@needs_chromium
def test_values_that_were_not_judged_are_not_called_right(browser: Browser, tmp_path: Path) -> None:
    created = document(report(**numerics()))
    created["reports"][0]["numerics"] |= {"first_bad": None, "judged": 0}
    for one in created["reports"][0]["numeric_gap"]:
        one["first_bad"] = False
    path = tmp_path / "r.html"
    page = browser.open(path, created)
    assert "of 3 values could be judged" in page.locator(".first-bad").inner_text()
    assert page.locator(".first-bad .good").count() == 0
    browser.must_be_quiet(path)


@needs_chromium
def test_a_thousand_operators_are_there_at_once_and_all_on_demand(browser: Browser, tmp_path: Path) -> None:
    rows = [row(place, "OPERATOR", f"aten::op{place}.out", 0.001, 1000.0, module=f"m{place % 50}.x") for place in range(1000)]
    path = tmp_path / "r.html"
    page = browser.open(path, document(report(operators=rows)))
    shown = page.locator(".rows tbody tr")
    assert 10 < shown.count() < 100
    page.get_by_role("button", name="Show all 1,000 rows").click()
    assert shown.count() == 1000
    browser.must_be_quiet(path)


def test_a_real_document_with_one_value_exchanged_is_shown_or_refused(job: Job) -> None:
    small = copy.deepcopy(job.document)
    for one in small["reports"]:
        one["latency"]["samples_ns"] = one["latency"]["samples_ns"][:20]
        one["operators"] = [{**row, "times_ns": row["times_ns"][:3]} for row in one["operators"][:8]]
    output = {}
    for text, what in mutated(small, seed=5, number=200):
        try:
            output[what] = read_everywhere(text, small)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert None in output.values() and len(set(output.values())) > 20


def test_parquet_can_be_piped(job: Job) -> None:
    import pyarrow.parquet

    arguments = ["report", "export", job.id, "--format", "parquet", "--what", "samples", "-o", "-", "--server", job.server]
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", *arguments], capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    samples = pyarrow.parquet.read_table(io.BytesIO(done.stdout)).to_pylist()
    assert len(samples) == sum(len(one["latency"]["samples_ns"]) for one in job.document["reports"])
