"""A real job's reports in every format, by the command line; the HTML page in a real browser without a network."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Page, Route, sync_playwright

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


def test_exported_tables_contain_the_documents_values(job: Job) -> None:
    import pyarrow.parquet

    (job.folder / "tables").mkdir()
    for name in ("csv", "parquet"):
        done = job.export("--format", name, "-o", "tables")
        assert done.returncode == 0, done.stderr
    assert not list((job.folder / "tables").glob("*.generation.*")), "no model of the job generates text"
    for what in ("operators", "samples"):
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


def test_json_and_markdown_go_to_stdout_and_a_file_exports_like_its_job(job: Job) -> None:
    text = job.export("--format", "json").stdout
    assert json.loads(text)["reports"] == job.document["reports"]
    (job.folder / "kept.json").write_text(text)
    table = job.export("--format", "markdown").stdout
    again = etfarm("report", "export", "kept.json", "--format", "markdown", cwd=job.folder)
    assert again.stdout == table
    assert "**ds_cnn · xnnpack_fp32" in table and "ds_cnn.py" in table


def test_exported_executorch_files_open_in_the_inspector(job: Job) -> None:
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


def test_bench_writes_its_page_even_if_a_cell_fails(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def factory():\n    raise ValueError('no weights here')\n")
    done = etfarm("bench", "broken.py:factory", "--html", "r.html", "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 1
    page = (tmp_path / "r.html").read_text()
    assert "FACTORY_FAILED" in page and "no weights here" in page


def test_the_page_shows_regressions(job: Job) -> None:
    done = job.export("--format", "html", "--against", job.id, "-o", "compared.html", "--report", "0")
    assert done.returncode == 0, done.stderr
    page = (job.folder / "compared.html").read_text()
    assert "Did it get worse?" in page and "1.000x" in page and "Both sides are the same." in page
    refused = job.export("--format", "csv", "--against", "latest")
    assert refused.returncode == 2 and "--against requires html, got csv." in refused.stderr


@dataclass
class Browser:
    """A page, with its requests and errors."""

    page: Page
    requests: list[str]
    complaints: list[str]

    def open(self, path: Path, created: dict[str, Any]) -> Page:
        """Write the page of a document and open it."""
        path.write_bytes(html.write(created))
        self.requests.clear()
        self.page.goto(path.as_uri())
        return self.page

    @contextmanager
    def sized(self, width: int) -> Iterator[None]:
        """Let the window have a width in the block."""
        self.page.set_viewport_size({"width": width, "height": 900})
        try:
            yield
        finally:
            self.page.set_viewport_size({"width": 1280, "height": 900})

    def must_be_quiet(self, path: Path) -> None:
        """Require that the page requested only its own file, and had no errors."""
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
def test_a_screenshot_of_the_whole_page_is_saved(browser: Browser, job: Job, tmp_path: Path) -> None:
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
def test_a_hostile_name_is_shown_without_effect(browser: Browser, tmp_path: Path) -> None:
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
        page.wait_for_function("() => document.querySelector('canvas').getBoundingClientRect().width < innerWidth")
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
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
def test_a_real_page_is_readable_at_any_width(browser: Browser, job: Job, tmp_path: Path, width: int) -> None:
    created = copy.deepcopy(job.document)
    long = report(**numerics())
    where = {"file": "a/folder/with/a/long/name/models/networks/residual.py", "line": 131, "code": "y = self.conv2(y)"}
    for one in (*long["operators"], *long["numeric_gap"]):
        one["source"] = where if one["source"] else None
    created["reports"].append(long)
    path = tmp_path / "r.html"
    with browser.sized(width):
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


@needs_chromium
def test_a_narrow_page_shows_the_file_name_before_the_source_line(browser: Browser, job: Job, tmp_path: Path) -> None:
    with browser.sized(400):
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


@needs_chromium
def test_a_wide_page_shows_all_answers_in_a_row(browser: Browser, job: Job, tmp_path: Path) -> None:
    page = browser.open(tmp_path / "r.html", job.document)
    tiles = page.locator("#r0 .tile")
    assert tiles.count() >= 7
    assert len({round(tile.bounding_box()["y"]) for tile in tiles.all()}) == 1  # type: ignore[index]
    path = page.locator("#r1 .rows td.place .path").first
    assert path.inner_text().startswith("etfarm/client/export/demo_models/ds_cnn.py:"), "whole, to be copied"


@needs_chromium
def test_contents_stay_at_the_side_and_mark_what_is_read(browser: Browser, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    with browser.sized(1400):
        page = browser.open(path, job.document)
        contents = page.locator(".contents")
        assert contents.bounding_box()["x"] < 200 < page.locator("main").bounding_box()["x"]  # type: ignore[index]
        contents.get_by_role("link", name="ds_cnn · portable").click()
        page.wait_for_function("() => document.querySelector('.contents .current > a')?.hash === '#r1' && scrollY > 1000")
        page.locator("#r1-facts").wait_for()
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        contents.locator("a[href='#r1-facts']").click()
        page.wait_for_function("() => document.querySelector('.contents [aria-current]')?.hash === '#r1-facts'")
        assert 0 <= contents.bounding_box()["y"] < 900  # type: ignore[index]
        assert not contents.locator("a[href='#r0-facts']").is_visible(), "only the parts of the report that is read"
        page.set_viewport_size({"width": 1000, "height": 900})
        page.wait_for_function("() => !document.querySelector('.contents details').open")
        browser.must_be_quiet(path)


@needs_chromium
def test_the_page_is_used_with_keys_alone(browser: Browser, job: Job, tmp_path: Path) -> None:
    page = browser.open(tmp_path / "r.html", job.document)
    beside = page.locator(".beside")
    beside.locator("[data-view=module]").focus()
    page.keyboard.press("ArrowRight")
    assert beside.locator("[aria-selected=true]").inner_text() == "By line"
    assert page.evaluate("document.activeElement.dataset.view") == "line"
    boxes = page.locator("#r1 .icicle g")
    before = boxes.count()
    page.locator("#r1 .icicle g[data-box=block2]").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert "block2" in page.locator("#tip").inner_text()
    page.keyboard.press("Enter")
    assert 0 < boxes.count() < before
    assert page.evaluate("document.activeElement.dataset.box") == "block2", "the focus stays"


@needs_chromium
def test_cells_stand_side_by_side_on_one_scale(browser: Browser, job: Job, tmp_path: Path) -> None:
    page = browser.open(tmp_path / "r.html", job.document)
    rows = page.locator(".beside tbody tr")
    assert rows.count() <= 15
    assert page.locator(".beside thead a").all_inner_texts() == ["xnnpack_fp32", "portable"]
    largest = max(
        (
            group
            for report in page.evaluate("JSON.parse(document.getElementById('data').textContent)")
            for group in report["views"]["module"]
        ),
        key=lambda group: group["own_ns"] or 0,
    )
    assert rows.first.locator("td").first.inner_text() == largest["key"]
    bars = [bar.evaluate("(one) => one.offsetWidth") for bar in page.locator(".cells .track i").all()]
    p50s = [one["latency"]["p50_ns"] for one in job.document["reports"]]
    assert (bars[0] < bars[1]) == (p50s[0] < p50s[1])


@needs_chromium
def test_a_row_with_an_interval_shows_its_mean_and_a_doubtful_trace_says_why(browser: Browser, tmp_path: Path) -> None:
    created = document(report())
    operators, profile = created["reports"][0]["operators"], created["reports"][0]["profile"]
    operators[1] |= {"mean_ns": 770_000.0, "mean_ci95_ns": [750_000.0, 790_000.0]}
    profile["verdict"] = {"status": "INVALID", "reasons": [{"code": "DRIFT", "message": "The traced median moved."}]}
    page = browser.open(tmp_path / "r.html", created)
    assert page.locator("tr[data-index='1'] td.time").inner_text().split("\n") == ["770 µs", "±2.6 %"]
    assert "The traced median moved." in page.locator("#r0-operators").inner_text()


@needs_chromium
def test_runs_are_dots_on_one_scale(browser: Browser, tmp_path: Path) -> None:
    runs = [{"iterations": 2, "p50_ns": p50_ns, "p50_ci95_ns": [p50_ns - 1e4, p50_ns + 1e4]} for p50_ns in (1.84e6, 1.9e6)]
    spread = {"source": "REPEATS", "runs": 2, "relative_stddev": 0.02, "p50_ci95_ns": [1.8e6, 1.95e6]}
    path = tmp_path / "r.html"
    page = browser.open(path, document(report(runs=runs, run_spread=spread)))
    left, right = (dot.bounding_box()["x"] for dot in page.locator(".dots i").all())  # type: ignore[index]
    assert left < right
    assert "±2.0 % between runs" in page.locator("#r0-latency").inner_text()
    browser.must_be_quiet(path)


MODEL_EXPLORER = importlib.util.find_spec("model_explorer")
needs_model_explorer = pytest.mark.skipif(
    MODEL_EXPLORER is None or not MODEL_EXPLORER.origin, reason="pip install --no-deps ai-edge-model-explorer"
)


@needs_chromium
@needs_model_explorer
def test_model_explorer_opens_the_graph_and_its_times(browser: Browser, job: Job) -> None:
    """Its page is served from the package's files: its server would need far more than the page."""
    done = job.export("--format", "model-explorer", "-o", "explorer/", "--report", "1")
    assert done.returncode == 0, done.stderr
    stem = f"explorer/ds_cnn-{job.id}"
    assert MODEL_EXPLORER is not None and MODEL_EXPLORER.origin is not None
    files = Path(MODEL_EXPLORER.origin).parent / "web_app"
    adapter = {"type": "adapter", "id": "builtin_json", "name": "JSON adapter", "description": "", "fileExts": ["json"]}

    def serve(route: Route) -> None:
        url = urlsplit(route.request.url)
        file = files / (url.path.strip("/") or "index.html")
        if url.path == "/api/v1/get_extensions":
            route.fulfill(json=[adapter])
        elif url.hostname == "explorer.test" and file.is_file():
            route.fulfill(path=file)
        else:
            route.abort()

    assert browser.page.context.browser is not None
    page = browser.page.context.browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/*", serve)
    page.goto("http://explorer.test/")
    page.locator("input[type=file]").set_input_files(job.folder / f"{stem}.graph.json")
    page.get_by_text("View selected models").click()
    nodes = sum(one["kind"] in ("OPERATOR", "KERNEL") for one in job.document["reports"][1]["operators"])
    information = page.locator("info-panel")
    information.get_by_text("data flow").locator("visible=true").first.wait_for()
    text = " ".join(information.inner_text().split())
    assert f"op node count {nodes}" in text and "verdict" in text, text
    page.get_by_text("Add per-node data").click()
    page.locator("input.upload-per-node-data-input").set_input_files(job.folder / f"{stem}.times.json")
    page.get_by_text("mean time, µs").locator("visible=true").first.wait_for()
    assert errors == []
    page.close()


@needs_chromium
def test_unjudged_values_are_not_shown_as_correct(browser: Browser, tmp_path: Path) -> None:
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
def test_a_thousand_operators_are_shown_at_once_and_the_rest_on_demand(browser: Browser, tmp_path: Path) -> None:
    rows = [row(place, "OPERATOR", f"aten::op{place}.out", 0.001, 1000.0, module=f"m{place % 50}.x") for place in range(1000)]
    path = tmp_path / "r.html"
    page = browser.open(path, document(report(operators=rows)))
    shown = page.locator(".rows tbody tr")
    assert 10 < shown.count() < 100
    page.get_by_role("button", name="Show all 1,000 rows").click()
    assert shown.count() == 1000
    browser.must_be_quiet(path)


def test_a_mutated_document_is_shown_or_refused(job: Job) -> None:
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
