"""What lists say at a glance: measurements not to rely on, and devices that only look free."""

from __future__ import annotations

import pytest

from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.web.pages.report import MAX_REPORTS
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


def test_a_jobs_report_page_is_bounded_and_leads_to_the_other_reports(simulated: SimulatedWebFarm, viewer: Visit) -> None:
    with simulated.client("user") as farm:
        devices = [f"name={DEVICE}", f"name={OTHER}"]
        models = [PreparedModel(f"model {number}", program=program("add").path) for number in range(17)]
        job = farm.bench(models, devices=devices, iterations=2, min_time_s=0.0)
        job.wait()
        cells = [cell.id for cell in job.info.cells]
    assert len(cells) == MAX_REPORTS + 2
    answer = viewer.get(f"/jobs/{job.id}/report")
    assert answer.status == 200
    assert answer.text.count("<article") == MAX_REPORTS
    assert f'The first 32 reports: <a href="/jobs/{job.id}">the job\'s page</a> opens each of the other 2.' in answer.text
    page = viewer.get(f"/jobs/{job.id}").text
    assert all(f"/jobs/{job.id}/report?cell={cell}" in page for cell in cells)
    rest = viewer.get(f"/jobs/{job.id}/report?cell={cells[-1]}&cell={cells[-2]}")
    assert (rest.status, rest.text.count("<article")) == (200, 2)
    assert "The first" not in rest.text


@pytest.mark.parametrize(
    ("path", "command"), [("/compare", "etfarm compare BASE CANDIDATE"), ("/history", "etfarm history MODEL")]
)
def test_a_page_that_asks_for_a_choice_names_it_in_its_command(viewer: Visit, path: str, command: str) -> None:
    assert f'<code id="command">{command}</code>' in viewer.get(path).text


def test_the_count_of_idle_devices_says_how_many_are_reserved(simulated: SimulatedWebFarm, viewer: Visit) -> None:
    assert wait_until(lambda: "reserved</li>" not in viewer.get("/devices").text)
    with simulated.client("user") as farm:
        reservation = farm.reserve_devices(f"name={OTHER}", minutes=5)
        assert wait_until(lambda: "idle, 1 reserved</li>" in viewer.get("/devices").text)
        farm.release_reservation(reservation.id)
