"""The pages of devices, the server and the search in a browser: live, by keys, and printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from tests.support.web import CHROMIUM, Tab, WebFarm, start_page

pytestmark = [
    pytest.mark.slow(reason="starts a server, an agent, the page and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]


@pytest.fixture
def drained(web: WebFarm) -> Iterator[str]:
    """The name of the device, which is undrained afterwards."""
    with web.client() as farm:
        device = farm.devices()[0]
        yield device.name
        farm.undrain_device(device.id)


def test_two_browsers_see_a_change_at_once(web: WebFarm, browser: Browser, tab: Tab, drained: str) -> None:
    other = Tab(browser, web.url)
    for each in (tab, other):
        each.sign_in(web.tokens["viewer"])
        each.wait_until_live()
        expect(each.page.locator("nav [aria-current]")).to_have_text("Devices")
    with web.client() as farm:
        farm.drain_device(drained, "new fan")
    for each in (tab, other):
        row = each.page.locator("main tbody tr")
        expect(row).to_contain_text("DRAINING")
        expect(row).to_contain_text("new fan")
        expect(each.page.locator(".counts")).to_contain_text("1 draining")
        expect(each.page.locator("tr.changed"), "a change is marked for a moment").to_have_count(0)
        each.must_be_quiet()
    other.context.close()


def test_a_devices_page_has_its_facts_and_charts(web: WebFarm, tab: Tab, drained: str) -> None:
    tab.sign_in(web.tokens["viewer"])
    tab.page.click("main tbody th a")
    expect(tab.page.locator("h1")).to_have_text(drained)
    expect(tab.page.locator(".facts")).to_contain_text("Architecture")
    tab.page.locator("#telemetry canvas, #telemetry p").first.wait_for()
    expect(tab.page.locator("#command")).to_have_text(f"etfarm devices show {drained}")
    tab.must_be_quiet()


def test_charts_are_printed_in_light_colours(web: WebFarm, browser: Browser, drained: str) -> None:
    dark = Tab(browser, web.url, color_scheme="dark")
    page = dark.sign_in(web.tokens["viewer"])
    page.click("main tbody th a")
    page.wait_for_function(HAS_INK_OF_ITS_STYLE)
    accent = page.evaluate(ACCENT)
    page.route("**/telemetry.json*", lambda route: None)  # a printer does not wait for readings
    page.emulate_media(media="print")
    page.wait_for_function(HAS_INK_OF_ITS_STYLE)
    assert page.evaluate(ACCENT) != accent
    dark.must_be_quiet()
    page.unroute_all(behavior="ignoreErrors")
    dark.context.close()


ACCENT: Final = "getComputedStyle(document.documentElement).getPropertyValue('--accent').trim()"
HAS_INK_OF_ITS_STYLE: Final = f"""() => {{
  const chart = document.querySelector("#telemetry canvas");
  if (!chart) return false;
  const copy = new OffscreenCanvas(chart.width, chart.height).getContext("2d", {{ willReadFrequently: true }});
  copy.drawImage(chart, 0, 0);
  const {{ data }} = copy.getImageData(0, 0, chart.width, chart.height);
  const wanted = {ACCENT}.match(/[0-9a-f]{{2}}/g).map((each) => parseInt(each, 16));
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 250 && wanted.every((value, channel) => Math.abs(data[i + channel] - value) < 3)) return true;
  return false;
}}"""
"""Whether the first chart of a device's page is drawn in the colours that the page has now."""


def test_keys_move_through_rows_open_one_and_search(web: WebFarm, tab: Tab, drained: str) -> None:
    page = tab.sign_in(web.tokens["viewer"])
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("j")
    expect(page.locator("tr[data-selected]")).to_contain_text(drained)
    page.keyboard.press("Enter")
    page.wait_for_url("**/devices/*")
    page.keyboard.press("/")
    page.keyboard.type(drained)
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?*")
    expect(page.locator(".results").first).to_contain_text(drained)
    page.locator("h1").click()
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/server")
    tab.must_be_quiet()


def test_unknown_pages_and_selectors_say_what_to_do(web: WebFarm, tab: Tab) -> None:
    page = tab.sign_in(web.tokens["viewer"])
    for path, status, sentence in (
        ("/devices/nothing", 404, "nothing"),
        ("/devices?selector=colour%3Dred", 400, "colour"),
        ("/somewhere", 404, "no such page"),
    ):
        answer = page.goto(f"{web.url}{path}")
        assert answer is not None and answer.status == status
        expect(page.locator("main .callout")).to_contain_text(sentence)


def test_a_restart_of_the_page_leads_to_the_sign_in(web: WebFarm, browser: Browser, tmp_path: Path) -> None:
    page, url = start_page(web.process.address, tmp_path / "web.log")
    tab = Tab(browser, url)
    tab.sign_in(web.tokens["viewer"])
    tab.wait_until_live()
    assert page.stop() == 0
    expect(tab.page.locator("#connection")).to_have_attribute("data-state", "lost")
    port = url.rpartition(":")[2]
    again, _ = start_page(web.process.address, tmp_path / "web.log", "--listen", f"127.0.0.1:{port}")
    try:
        tab.page.wait_for_url("**/sign-in?next=*")
    finally:
        tab.context.close()
        again.stop()
