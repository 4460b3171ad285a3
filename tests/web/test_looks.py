"""Every page in a browser: for people with assistive technology, narrow, dark, with hostile names, and while the farm is away."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from etfarm.client.models import JobState
from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.web.pages import PAGES
from tests.support import axe, documents
from tests.support.programs import program
from tests.support.simulated_web import SimulatedWebFarm
from tests.support.visits import DEVICE, OTHER, Visits, has_sideways_scroll
from tests.support.web import CHROMIUM

pytestmark = [
    pytest.mark.slow(reason="starts a server, the page and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]

EVIL_DEVICE: Final = "evil-board"
HOSTILE: Final = f"{documents.HOSTILE} onmouseover=alert(3) x="
"""A name that does harm as an element, and as attributes of the one whose value it is."""
NARROW: Final = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def jobs(simulated: SimulatedWebFarm) -> dict[str, str]:
    """The ids of two finished jobs with hostile names, on a device with one, and their program's digest."""
    simulated.agents.add("evil", devices=(EVIL_DEVICE,), shown_name=HOSTILE)
    with simulated.client("user") as farm:
        model = PreparedModel(HOSTILE, program=program("add").path)
        ids = {"digest": hashlib.sha256(program("add").path.read_bytes()).hexdigest()}
        for name in ("job", "again"):
            submitted = farm.bench(
                model, devices=[f"id=id-of-{DEVICE}", f"id=id-of-{EVIL_DEVICE}"], name=HOSTILE, labels={"evil": HOSTILE},
                iterations=2, min_time_s=0.0, threads=[1, 2],
            )  # fmt: skip
            assert submitted.wait() is JobState.SUCCEEDED
            ids[name] = submitted.id
        return ids


@pytest.fixture(scope="module")
def troubled(simulated: SimulatedWebFarm) -> Iterator[dict[str, str]]:
    """A drained and a reserved device with hostile reasons; the reservation's id."""
    with simulated.client() as farm:
        farm.drain_device(f"id-of-{OTHER}", HOSTILE)
        farm.label_device(f"id-of-{EVIL_DEVICE}", {"evil": HOSTILE})
        reserved = farm.reserve_devices(f"id=id-of-{EVIL_DEVICE}", reason=HOSTILE)
        yield {"reservation": reserved.id}
        farm.release_reservation(reserved.id)
        farm.undrain_device(f"id-of-{OTHER}")


VISITS: Final = (
    ("", "/sign-in", 200),
    ("", "/enter?code=a-code", 200),
    ("viewer", "/", 200),
    ("admin", "/devices", 200),
    ("admin", f"/devices/id-of-{EVIL_DEVICE}", 200),
    ("admin", f"/devices/id-of-{OTHER}", 200),
    ("admin", f"/devices/id-of-{EVIL_DEVICE}/drain", 200),
    ("admin", f"/devices/id-of-{OTHER}/undrain", 200),
    ("admin", f"/devices/id-of-{EVIL_DEVICE}/labels", 200),
    ("user", "/reservations", 200),
    ("user", "/reserve", 200),
    ("admin", "/reservations/{reservation}/renew", 200),
    ("admin", "/reservations/{reservation}/release", 200),
    ("user", "/submit", 200),
    ("viewer", "/queue", 200),
    ("viewer", "/jobs", 200),
    ("viewer", f"/jobs?name={quote(HOSTILE)}", 200),
    ("user", "/jobs/{job}", 200),
    ("user", "/jobs/{job}/cancel", 200),
    ("user", "/jobs/{job}/retry", 200),
    ("user", "/jobs/{job}/tag", 200),
    ("user", "/jobs/{job}/tags/a-tag/remove", 200),
    ("viewer", "/jobs/{job}/report", 200),
    ("viewer", "/compare", 200),
    ("viewer", "/compare?report={job}&report={again}", 200),
    ("viewer", "/history", 200),
    ("viewer", f"/history?model={quote(HOSTILE)}", 200),
    ("viewer", "/recipes", 200),
    ("viewer", "/artifacts", 200),
    ("viewer", "/artifacts/{digest}", 200),
    ("viewer", "/server", 200),
    ("admin", "/server", 200),
    ("viewer", "/search?q=script", 200),
    ("viewer", f"/search?q={quote(HOSTILE)}", 200),
    ("viewer", "/nothing", 404),
)
"""Role, address and status of the visits, in which every page is seen."""
NAMING: Final = {
    "/devices", f"/devices/id-of-{EVIL_DEVICE}", "/jobs", "/jobs/{job}", "/jobs/{job}/report", "/artifacts", "/search?q=script",
}  # fmt: skip
"""Pages that show a hostile name."""
NO_PAGES: Final = {"health", "device_telemetry", "job_matrix", "job_log", "artifact_content", "live"}
"""Names of the routes that answer with data, or with a part of a page."""


def test_the_visits_are_to_every_page() -> None:
    shown = {route.name: route for page in PAGES for route in page.ROUTES if "GET" in (route.methods or ())}
    paths = [path.partition("?")[0] for _, path, _ in VISITS]
    assert {name for name, route in shown.items() if not any(map(route.path_regex.fullmatch, paths))} == NO_PAGES


@pytest.mark.parametrize(("role", "path", "status"), VISITS)
def test_every_page_is_legible_and_shows_hostile_names_as_text(
    visits: Visits, jobs: dict[str, str], troubled: dict[str, str], role: str, path: str, status: int
) -> None:
    if path == "/recipes":
        with visits.web.client() as farm:
            farm.recipes()  # which need the compiler, and this server loads it when somebody asks
    # What has just changed has another ground for a second, which would be measured now and then.
    with visits.visit(
        role, path.format(**jobs, **troubled), expected=status, viewport=NARROW, color_scheme="dark", reduced_motion="reduce"
    ) as page:
        page.locator("h1").first.wait_for()
        assert not has_sideways_scroll(page), "at 400 px"
        assert page.locator("main script:not([type='application/json']), main img[src=x], [onmouseover], [onerror]").count() == 0
        if path in NAMING:
            expect(page.locator("main")).to_contain_text("<script>alert(1)</script>")
        findings = axe.find_serious(page)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme="light")
        assert not has_sideways_scroll(page)
        findings += axe.find_serious(page)
        assert findings == [], "\n".join(findings)
        if role:
            command = page.locator("#command")
            assert status != 200 or command.inner_text().startswith("etfarm "), "each page names its command"


def test_a_page_shows_that_the_farm_is_away_and_recovers(visits: Visits, simulated: SimulatedWebFarm) -> None:
    with visits.visit("viewer", "/devices") as page:
        expect_state(page, "live")
        simulated.farm.kill9()
        try:
            expect(page.locator("#connection")).to_have_attribute("data-state", "away")
        finally:
            simulated.farm.restart()
        expect_state(page, "live")
        with simulated.client() as farm:
            farm.drain_device(f"id-of-{DEVICE}", "after the restart")
            expect(page.locator("tr", has_text=DEVICE)).to_contain_text("after the restart")
            farm.undrain_device(f"id-of-{DEVICE}")
        expect(page.locator("tr", has_text=DEVICE)).to_contain_text("IDLE")


def test_the_list_of_free_devices_stays_true(visits: Visits, simulated: SimulatedWebFarm) -> None:
    with visits.visit("viewer", "/devices") as page:
        page.get_by_label("idle").click()
        page.wait_for_url("**/devices?state=idle")
        expect_state(page, "live")
        row = page.locator(f"tr[data-key=id-of-{DEVICE}]")
        expect(row).to_be_visible()
        with simulated.client() as farm:
            farm.drain_device(f"id-of-{DEVICE}", "a new fan")
            expect(row).to_be_hidden()
            farm.undrain_device(f"id-of-{DEVICE}")
        expect(row).to_be_visible()


def test_a_printed_list_has_all_rows_and_no_controls(visits: Visits) -> None:
    with visits.visit("viewer", "/devices") as page:
        page.emulate_media(media="print")
        rows = page.locator("table.devices tbody tr")
        drawn = rows.evaluate_all("(all) => all.map((row) => getComputedStyle(row).contentVisibility)")
        assert drawn and set(drawn) == {"visible"}
        for hidden in (".bar", ".command", "form.tools"):
            expect(page.locator(hidden)).to_be_hidden()


def test_keys_move_through_rows_and_back(visits: Visits) -> None:
    with visits.visit("viewer", "/devices") as page:
        page.keyboard.press("j")
        expect(page.locator("[data-selected]")).to_have_count(1)
        first = page.locator("[data-selected]").get_attribute("data-key")
        page.keyboard.press("j")
        assert page.locator("[data-selected]").get_attribute("data-key") != first
        page.keyboard.press("k")
        assert page.locator("[data-selected]").get_attribute("data-key") == first


def expect_state(page: Page, state: str) -> None:
    expect(page.locator("#connection")).to_have_attribute("data-state", state)
