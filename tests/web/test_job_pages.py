"""The pages of jobs, their reports, comparisons and history in a browser, and what they refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import pytest
from playwright.sync_api import Page, Route, expect

from etfarm.client import Job
from tests.support.programs import program
from tests.support.web import CHROMIUM, Tab, Visit, WebFarm

pytestmark = [
    pytest.mark.slow(reason="starts a server, an agent, the page and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]

HOSTILE: Final = """<script>alert(1)</script><img src=x onerror=alert(2)>"' x='"""


def submit(web: WebFarm, name: str, **options: object) -> Job:
    """Submit a short measurement."""
    with web.client("user") as farm:
        settings = {"name": name, "iterations": 20, "min_time_s": 0.0, "labels": {"commit": "c0ffee", "evil": HOSTILE[:40]}}
        return farm.bench(program("add").path, **(settings | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(web: WebFarm) -> Iterator[tuple[str, str]]:
    """The ids of two jobs of one program, whose names have markup."""
    jobs = [submit(web, f"{index} {HOSTILE}").id for index in range(2)]
    with web.client("user") as farm:
        for each in jobs:
            assert [report["error"] for report in farm.job(each).result().json()["reports"]] == [None]
    yield jobs[0], jobs[1]


def open_page(web: WebFarm, tab: Tab, path: str) -> Page:
    """Open a page as a viewer."""
    page = tab.sign_in(web.tokens["viewer"])
    answer = page.goto(f"{web.url}{path}")
    assert answer is not None and answer.status == 200, answer and answer.text()
    return page


def test_a_job_is_watched_from_the_list_to_its_report(web: WebFarm, tab: Tab) -> None:
    page = open_page(web, tab, "/jobs")
    with web.client() as farm:
        device = farm.devices()[0].id
        farm.drain_device(device)
        try:
            job = submit(web, "watched")
            page.get_by_role("link", name="watched").click()
            expect(page.locator("h1")).to_have_text("watched")
            cell = page.locator("main tbody tr").first
            expect(cell).to_contain_text("WAITING FOR DEVICE")
        finally:
            farm.undrain_device(device)
    expect(cell).to_contain_text("SUCCEEDED")
    expect(page.locator("[data-key=job]")).to_contain_text("1 of 1 cells done")
    expect(page.locator(".matrix .entry")).to_contain_text("s")
    cell.get_by_role("link", name="open").click()
    page.locator("canvas").first.wait_for()
    expect(page.locator("article .tiles")).to_contain_text("How fast?")
    expect(page.locator(".rows tbody tr").first).to_be_visible()
    expect(page.locator("#command")).to_have_text(f"etfarm report show {job.id}")
    tab.must_be_quiet()


@pytest.mark.parametrize("kept", ["script", "picture"])
def test_the_matrix_comes_also_if_the_cell_ends_while_the_page_is_made(web: WebFarm, tab: Tab, kept: str) -> None:
    page = open_page(web, tab, "/jobs")
    delayed: list[Route] = []
    with web.client() as farm:
        device = farm.devices()[0].id
        farm.drain_device(device)
        try:
            job = submit(web, "ends early")
            if kept == "script":  # the page shows the end before its script is there
                page.route("**/job.js", lambda route: delayed.append(route))
            page.goto(f"{web.url}/jobs/{job.id}", wait_until="commit")
            expect(page.locator("main tbody tr").first).to_contain_text("WAITING FOR DEVICE")
        finally:
            farm.undrain_device(device)
    expect(page.locator("main tbody tr").first).to_contain_text("SUCCEEDED")
    if kept == "picture":  # its cells are newer than its matrix
        expect(page.locator(".matrix .entry")).to_be_visible()
        page.route(
            f"**/jobs/{job.id}", lambda route: route.fulfill(response=(old := route.fetch()), body=without_matrix(old.text()))
        )
        page.reload()
    for route in delayed:
        route.continue_()
    expect(page.locator(".matrix .entry")).to_contain_text("s")
    tab.must_be_quiet()


def without_matrix(text: str) -> str:
    """Return the page of a job that has ended as the server makes it if the cell ends between its matrix and its cells."""
    before, begin, rest = text.partition('<div id="matrix" data-ended="1"')
    opening, _, rest = rest.partition(">")
    shown, end, after = rest.partition('</div>\n<section class="card">\n  <h2>Log</h2>')
    assert 'class="entry' in shown and end
    return f"{before}{begin.replace('1', '0')}{opening}>{end}{after}"


def test_a_comparison_has_a_ratio_with_its_interval(web: WebFarm, tab: Tab, measured: tuple[str, str]) -> None:
    base, candidate = measured
    page = open_page(web, tab, f"/compare?report={base}&report={candidate}&report=nothing-like-it")
    expect(page.locator(".pair-card .callout")).to_contain_text("x [")
    expect(page.locator(".ratio b")).to_be_visible()
    expect(page.locator(".side-by-side tbody tr").first).to_be_visible()
    expect(page.locator("[role=alert]")).to_contain_text("nothing-like-it")
    expect(page.locator("#command")).to_contain_text(f"etfarm compare {base} {candidate}")
    tab.must_be_quiet()


def test_a_history_has_a_chart_and_the_commits(web: WebFarm, tab: Tab, measured: tuple[str, str]) -> None:
    page = open_page(web, tab, "/history")
    page.locator(".results").get_by_role("link", name="program").click()
    page.locator("canvas").first.wait_for()
    expect(page.locator("figure.trend").first).to_have_attribute("data-by", "commit")
    expect(page.locator("table.list tbody tr").first).to_contain_text("c0ffee")
    page.locator("figure.trend .u-over").first.click()
    page.wait_for_url("**/jobs/*")
    tab.must_be_quiet()


def test_an_artifact_is_downloaded_as_it_is(web: WebFarm, tab: Tab, measured: tuple[str, str]) -> None:
    page = open_page(web, tab, "/artifacts")
    row = page.locator("main tbody tr").filter(has_text="program of").first
    address = row.get_by_role("link", name="Download").get_attribute("href")
    assert address is not None
    answer = page.request.get(web.url + address)
    assert hashlib.sha256(answer.body()).hexdigest() == address.split("/")[2]
    assert answer.headers["content-disposition"].endswith('.pte"')
    assert answer.headers["content-type"] == "application/octet-stream"
    for missing in (
        f"/artifacts/{'0' * 64}",
        f"/artifacts/{'0' * 64}/content",
        "/artifacts/..%2fetc",
        "/artifacts/..%2fetc/content",
    ):
        assert page.request.get(web.url + missing).status == 404


def test_an_artifacts_page_names_the_jobs_that_use_it(web: WebFarm, tab: Tab, measured: tuple[str, str]) -> None:
    with web.client("user") as farm:
        uses = [use for of_digest in farm.artifacts.uses().values() for use in of_digest]
    digest = next(use.digest for use in uses if use.job_id == measured[0] and use.kind == "program")
    page = open_page(web, tab, "/artifacts")
    page.locator(f'main tbody a[href="/artifacts/{digest}"]').click()
    page.wait_for_url("**/artifacts/*")
    rows = page.locator("main tbody tr")
    for job in measured:
        expect(rows.filter(has=page.locator(f'a[href="/jobs/{job}"]')).filter(has_text="program").first).to_be_visible()
    expect(page.locator("#command")).to_have_text(f"etfarm artifacts get {digest}")
    expect(page.locator(".facts")).to_contain_text(digest)
    tab.must_be_quiet()


def test_the_queue_says_what_a_run_waits_for(web: WebFarm, tab: Tab) -> None:
    page = open_page(web, tab, "/queue")
    expect(page.locator("main")).to_contain_text("Nothing waits for a device.")
    with web.client() as farm:
        device = farm.devices()[0].id
        farm.drain_device(device)
        try:
            job = submit(web, "queued")
            expect(page.locator("main tbody tr")).to_contain_text("queued")
            expect(page.locator("main tbody tr")).to_contain_text("drain")
            farm.job(job.id).cancel()
            expect(page.locator("main tbody tr")).to_have_count(0)
        finally:
            farm.undrain_device(device)
    tab.must_be_quiet()


def test_conditions_choose_jobs_and_wrong_ones_say_what_to_write(web: WebFarm, visit: Visit, measured: tuple[str, str]) -> None:
    visit.sign_in(web.tokens["viewer"])
    for query, is_there in (("state=SUCCEEDED&model=program", True), ("state=FAILED", False), ("label=commit%3Dc0ffee", True)):
        assert (measured[0] in visit.get(f"/jobs?{query}").text) is is_there, query
    for path in ("/jobs?since=tomorrow", "/jobs?state=LAZY", "/jobs?page=x", "/history?model=program&threads=-1"):
        assert visit.get(path).status == 400, path
    assert visit.get("/jobs/nothing-like-it").status == 404
    assert visit.get(f"/jobs/{measured[0]}/report?cell=other").status == 404
    assert visit.get(f"/jobs/{measured[0][:8]}").headers["location"] == f"/jobs/{measured[0]}"
    log = visit.get(f"/jobs/{measured[0]}/log.txt")
    assert log.status == 200
    assert log.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("name", ["/etc/hostname.json", "x.json", "folder/report", "../x.json%231"])
def test_a_comparison_reads_no_files_of_the_server(web: WebFarm, visit: Visit, name: str) -> None:
    visit.sign_in(web.tokens["viewer"])
    answer = visit.get(f"/compare?report={name}&report=latest")
    assert answer.status == 400
    assert "must be a job" in answer.text
