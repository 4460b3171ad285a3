"""What lists say at a glance: measurements not to rely on, and devices that only look free."""

from __future__ import annotations

import pytest

from tests.support.farm import wait_until
from tests.support.programs import program
from tests.support.simulated_web import TOKENS, SimulatedWebFarm
from tests.support.visits import DEVICE, OTHER
from tests.support.web import Visit

pytestmark = pytest.mark.slow(reason="starts a server and the page")


@pytest.fixture
def viewer(simulated: SimulatedWebFarm) -> Visit:
    visit = Visit(simulated.url)
    visit.sign_in(TOKENS["viewer"])
    return visit


def test_the_list_of_jobs_marks_an_invalid_measurement(simulated: SimulatedWebFarm, viewer: Visit) -> None:
    with simulated.client("user") as farm:
        job = farm.bench(program("add").path, device=f"name={DEVICE}", iterations=2, min_time_s=0.0)
        job.wait()
        assert [cell.verdict for cell in job.info.cells] == ["INVALID"]
    row = viewer.get("/jobs").text.partition(f'data-key="{job.id}"')[2].partition("</tr>")[0]
    assert "chip invalid" in row


def test_the_count_of_idle_devices_says_how_many_are_reserved(simulated: SimulatedWebFarm, viewer: Visit) -> None:
    assert wait_until(lambda: "reserved</li>" not in viewer.get("/devices").text)
    with simulated.client("user") as farm:
        reservation = farm.reserve_devices(f"name={OTHER}", minutes=5)
        assert wait_until(lambda: "idle, 1 reserved</li>" in viewer.get("/devices").text)
        farm.release_reservation(reservation.id)
