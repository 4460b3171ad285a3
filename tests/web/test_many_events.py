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


async def _change(agent: SimulatedAgent, first: int, count: int) -> None:
    """Give the agent's devices, in turns, a label with the number of the change."""
    devices = list(agent.devices.values())
    for number in range(count):
        device = devices[number % len(devices)]
        device.labels["event"] = str(first + number)
        agent.bring_back(device.id)
        if number % BATCH == 0:
            await asyncio.sleep(BATCH_S)
