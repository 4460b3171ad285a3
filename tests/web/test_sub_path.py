"""The page in a browser under a path, as a reverse proxy serves it: every address that templates and scripts make."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.support.programs import program
from tests.support.simulated_web import TOKENS, SimulatedWebFarm
from tests.support.visits import DEVICE, drop
from tests.support.web import CHROMIUM, Tab, listening_port, start_page

pytestmark = [
    pytest.mark.slow(reason="starts a server, the page and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]


def test_a_visit_under_a_path_stays_below_it(simulated: SimulatedWebFarm, browser: Browser, tmp_path: Path) -> None:
    served, _ = start_page(simulated.farm.address, tmp_path / "web.log", "--public-url", "http://127.0.0.1/farm")
    tab = Tab(browser, f"http://127.0.0.1:{listening_port(served.pid)}/farm")
    answers: list[tuple[int, str]] = []
    tab.page.on("response", lambda answer: answers.append((answer.status, urlsplit(answer.url).path)))
    try:
        page = tab.sign_in(TOKENS["user"])
        tab.wait_until_live()
        page.get_by_role("link", name=DEVICE, exact=True).click()
        page.locator("#telemetry canvas, #telemetry p").first.wait_for()

        page.get_by_role("link", name="Submit", exact=True).click()
        page.wait_for_url("**/farm/submit")
        drop(page, "add.pte", program("add").bytes)
        expect(page.locator("#file-state")).to_contain_text("add.pte")
        page.get_by_label(DEVICE).check()
        page.fill("[name=iterations]", "2")
        page.get_by_role("button", name="Submit").click()
        page.wait_for_url("**/farm/jobs/*")
        expect(page.locator("table.cells")).to_contain_text("SUCCEEDED")
        expect(page.locator("#matrix .entry")).to_be_visible()
        page.get_by_role("link", name="All reports").click()
        page.locator("canvas").first.wait_for()

        page.keyboard.press("/")
        page.keyboard.type(DEVICE)
        page.keyboard.press("Enter")
        page.wait_for_url("**/farm/search?*")
        page.goto(f"{tab.url}/devices/id-of-{DEVICE}")
        page.get_by_role("link", name="Reserve", exact=True).click()
        page.get_by_role("button", name="Reserve").click()
        page.wait_for_url("**/farm/reservations")
        page.get_by_role("link", name="Release").click()
        page.get_by_role("button", name="Release").click()
        expect(page.locator("main")).to_contain_text("No device is reserved.")
        page.locator(".who summary").click()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/farm/sign-in")
        tab.must_be_quiet()
        assert [answer for answer in answers if answer[0] >= 400 or not answer[1].startswith("/farm/")] == []
    finally:
        tab.context.close()
        assert served.stop() == 0
