"""A page that stays open while the farm changes ten thousand times."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from playwright.sync_api import expect

from etfarm.client.web.pages.devices import FIRST_ROWS
from tests.support.simulated_agent import SimulatedAgent
from tests.support.simulated_web import SimulatedWebFarm
from tests.support.visits import Visits
from tests.support.web import CHROMIUM, measure_memory

pytestmark = [
    pytest.mark.slow(reason="starts a server, the page and a browser, and changes devices for 20 s"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]

EVENTS: Final = 10_000
DEVICES: Final = FIRST_ROWS + 20
"""More than the first picture of the page has."""
BATCH, BATCH_S = 25, 0.05
MAX_GROWTH_BYTES, MAX_NODES_GROWTH = 2_000_000, 200


def test_a_page_that_has_seen_ten_thousand_events_is_current_and_has_not_grown(
    visits: Visits, simulated: SimulatedWebFarm
) -> None:
    names = tuple(f"flood-{number:02}" for number in range(DEVICES))
    agent = simulated.agents.add("flood", devices=names)
    with visits.visit("viewer", "/devices") as page:
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        rows = page.locator("tbody tr[data-key^=id-of-flood]")
        expect(rows).to_have_count(DEVICES)
        expect(page.locator("table.devices tbody")).to_have_count(1)

        def flood(first: int, count: int) -> None:
            simulated.agents.run(_change(agent, first, count))
            last = first + count - DEVICES
            expect(rows).to_contain_text([f"event={last + index}" for index in range(DEVICES)])
            expect(page.locator("tr.changed")).to_have_count(0)

        flood(0, 4 * DEVICES)
        before = measure_memory(page)
        flood(4 * DEVICES, EVENTS)
        after = measure_memory(page)
        assert after.heap_bytes - before.heap_bytes < MAX_GROWTH_BYTES
        assert after.nodes - before.nodes < MAX_NODES_GROWTH
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")


def test_a_page_whose_frames_are_late_shows_only_the_last_of_many_changes(visits: Visits, simulated: SimulatedWebFarm) -> None:
    agent = simulated.agents.add("late")
    row = "tbody tr[data-key=id-of-late]"
    with visits.visit("viewer", "/devices") as page, visits.visit("viewer", "/devices") as other:
        for each in (page, other):
            expect(each.locator("#connection")).to_have_attribute("data-state", "live")
            expect(each.locator(row)).to_have_count(1)
        page.evaluate(
            """() => {
              const real = window.requestAnimationFrame;
              const late = [];
              window.shown = 0;
              window.requestAnimationFrame = (apply) => late.push(apply);
              window.release = () => { window.requestAnimationFrame = real; late.forEach(real); };
              const count = (records) => { for (const record of records) window.shown += record.addedNodes.length; };
              new MutationObserver(count).observe(document.querySelector("table.devices tbody"), {childList: true});
            }"""
        )
        simulated.agents.run(_change(agent, 0, 100, batch=1))
        expect(other.locator(row)).to_contain_text("event=99")
        page.evaluate("release()")
        expect(page.locator(row)).to_contain_text("event=99")
        assert page.evaluate("shown") < 20


async def _change(agent: SimulatedAgent, first: int, count: int, *, batch: int = BATCH) -> None:
    """Give the agent's devices, in turns, a label with the number of the change."""
    devices = list(agent.devices.values())
    for number in range(count):
        device = devices[number % len(devices)]
        device.labels["event"] = str(first + number)
        agent.bring_back(device.id)
        if number % batch == 0:
            await asyncio.sleep(BATCH_S)
