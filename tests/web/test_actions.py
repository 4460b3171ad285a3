"""What visitors do on the page, by role: each action, what it shows, and what the farm refuses."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect

from etfarm.client import Job
from etfarm.client.models import JobState
from tests.support.programs import program
from tests.support.simulated_web import SimulatedWebFarm
from tests.support.visits import BROKEN, DEVICE, OTHER, STUCK, Visits, drop, forge
from tests.support.web import CHROMIUM

pytestmark = [
    pytest.mark.slow(reason="starts a server, the page and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]


def address(device: str) -> str:
    return f"/devices/id-of-{device}"


def submit(web: SimulatedWebFarm, device: str, name: str = "") -> Job:
    """Submit a program as a user would in a terminal."""
    with web.client("user") as farm:
        return farm.bench(program("add").path, device=f"name={device}", name=name, iterations=2, min_time_s=0.0)


@contextmanager
def two_visitors(visits: Visits, path: str) -> Iterator[tuple[Page, Page]]:
    with visits.visit("admin", path) as acting, visits.visit("viewer", path) as watching:
        yield acting, watching


def test_an_admin_drains_and_undrains_a_device_while_another_visitor_watches(visits: Visits) -> None:
    with two_visitors(visits, address(OTHER)) as (page, watcher):
        page.get_by_role("link", name="Drain").click()
        page.fill("[name=reason]", "new SD card")
        expect(page.locator("#command")).to_have_text(f"etfarm devices drain id-of-{OTHER} --reason 'new SD card'")
        page.get_by_role("button", name="Drain").click()
        for each in (page, watcher):
            expect(each.locator("[data-live]")).to_contain_text("new SD card")
        page.get_by_role("link", name="Undrain").click()
        page.get_by_role("button", name="Undrain").click()
        expect(page.locator(".actions")).to_contain_text("Drain")
        expect(watcher.locator("[data-live]")).not_to_contain_text("new SD card")


def test_an_admin_sets_and_removes_labels(visits: Visits) -> None:
    with visits.visit("admin", address(OTHER)) as page:
        page.get_by_role("link", name="Labels").click()
        page.fill("[name=set]", "no equals sign")
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_role("alert")).to_contain_text("each line must be key=value")
        expect(page.locator("[name=set]")).to_have_value("no equals sign")
        page.fill("[name=set]", "rack=3\nroom=a b")
        expect(page.locator("#command")).to_have_text(f"etfarm devices label id-of-{OTHER} rack=3 'room=a b'")
        page.get_by_role("button", name="Change").click()
        expect(page.locator("main")).to_contain_text("room=a b")
        page.get_by_role("link", name="Labels").click()
        page.get_by_label("Remove rack=3").check()
        expect(page.locator("#command")).to_have_text(f"etfarm devices label id-of-{OTHER} --remove rack")
        page.get_by_role("button", name="Change").click()
        expect(page.locator("h1")).to_have_text(OTHER)
        expect(page.locator("main")).not_to_contain_text("rack=3")


def test_a_user_reserves_renews_and_releases_a_device(visits: Visits) -> None:
    with visits.visit("user", address(DEVICE)) as page, visits.visit("viewer", "/devices") as watcher:
        page.get_by_role("link", name="Reserve", exact=True).click()
        page.fill("[name=selector]", "arch=nothing")
        page.fill("[name=reason]", "bisect")
        page.get_by_role("button", name="Reserve").click()
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.locator("[name=reason]")).to_have_value("bisect")
        page.fill("[name=selector]", f"name={DEVICE}")
        page.fill("[name=minutes]", "45")
        expect(page.locator("#command")).to_have_text(f"etfarm devices reserve name={DEVICE} --for 45m --reason bisect")
        page.get_by_role("button", name="Reserve").click()
        row = page.locator("tbody tr", has_text="bisect")
        expect(row).to_contain_text(DEVICE)
        expect(watcher.locator("tr", has_text=DEVICE)).to_contain_text("user")
        before = row.inner_text()
        row.get_by_role("link", name="Renew").click()
        page.fill("[name=minutes]", "90")
        page.get_by_role("button", name="Renew").click()
        assert row.inner_text() != before
        row.get_by_role("link", name="Release").click()
        page.get_by_role("button", name="Release").click()
        expect(page.locator("main")).to_contain_text("No device is reserved")
        expect(watcher.locator("tr", has_text=DEVICE)).not_to_contain_text("bisect")


def test_a_user_drops_a_program_and_submits_it(visits: Visits) -> None:
    with visits.visit("user", "/submit") as page:
        page.locator("#submit").click()
        expect(page.locator("#file-state")).to_have_text("Choose a model first.")
        drop(page, "notes.txt", b"hello")
        expect(page.locator("#file-state")).to_contain_text("neither a .pt2 nor a .pte")
        drop(page, "broken.pte", b"hello")
        expect(page.locator("#file-state")).to_contain_text("broken.pte")
        expect(page.locator("#file-state")).to_have_class(re.compile("bad"))
        drop(page, "keyword spotter.pte", program("add").bytes)
        expect(page.locator("#file-state")).to_have_text(re.compile("^keyword spotter.pte, "))
        page.get_by_label(DEVICE).check()
        page.fill("[name=repeat]", "1.5")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("alert")).to_contain_text("Repeats must be a whole number, got 1.5")
        expect(page.locator("#file-state")).to_contain_text("keyword spotter.pte")
        expect(page.get_by_label(DEVICE)).to_be_checked()
        page.fill("[name=repeat]", "2")
        page.fill("[name=labels]", "commit=abc")
        expect(page.locator("#command")).to_have_text(
            f"etfarm bench 'keyword spotter.pte' --recipe xnnpack_fp32 --device id=id-of-{DEVICE} --repeat 2 "
            "--label commit=abc --detach"
        )
        page.get_by_role("button", name="Submit").click()
        page.wait_for_url(re.compile(r"/jobs/[^/]+$"))
        expect(page.locator("main")).to_contain_text("keyword spotter")
        job_id = page.url.rpartition("/")[2]
    with visits.web.client("user") as farm:
        job = farm.job(job_id)
        assert job.wait() is JobState.SUCCEEDED
        assert job.info.owner == "user" and job.info.labels == {"commit": "abc"}
        assert [cell.model for cell in job.info.cells] == ["keyword spotter"]


def test_a_user_cancels_a_job(visits: Visits) -> None:
    job = submit(visits.web, STUCK, "never ends")
    with visits.visit("user", f"/jobs/{job.id}") as page:
        page.get_by_role("link", name="Cancel").click()
        expect(page.locator("#command")).to_have_text(f"etfarm jobs cancel {job.id}")
        page.get_by_role("button", name="Cancel the job").click()
        page.wait_for_url(re.compile(rf"/jobs/{job.id}$"))
        expect(page.locator("main")).to_contain_text("CANCELLED")
    with visits.web.client("user") as farm:
        assert farm.job(job.id).state is JobState.CANCELLED


def test_a_user_runs_what_failed_again_and_tags_it(visits: Visits) -> None:
    job = submit(visits.web, BROKEN)
    with visits.web.client("user") as farm:
        assert farm.job(job.id).wait() is JobState.FAILED
    with visits.visit("user", f"/jobs/{job.id}") as page:
        page.get_by_role("link", name="Run what failed again").click()
        page.get_by_role("button", name="Run again").click()
        page.wait_for_url(re.compile(rf"/jobs/(?!{job.id})[^/]+$"))
        again = page.url.rpartition("/")[2]
        page.get_by_role("link", name="Tag", exact=True).click()
        page.fill("[name=tag]", "no spaces please")
        page.get_by_role("button", name="Tag").click()
        expect(page.get_by_role("alert")).to_be_visible()
        page.fill("[name=tag]", "candidate")
        page.get_by_role("button", name="Tag").click()
        page.get_by_role("link", name="Remove tag candidate").click()
        page.get_by_role("button", name="Remove").click()
        page.wait_for_url(re.compile(rf"/jobs/{again}$"))
        expect(page.get_by_role("link", name="Remove tag candidate")).to_have_count(0)
    with visits.web.client("user") as farm:
        assert farm.job(again).info.labels["retry_of"] == job.id


def test_a_viewer_sees_no_buttons_and_the_farm_refuses_forged_forms(visits: Visits) -> None:
    job = submit(visits.web, STUCK, "of a user")
    with visits.visit("viewer", address(DEVICE)) as page:
        expect(page.locator(".actions")).to_have_count(0)
        expect(page.get_by_role("link", name="Submit")).to_have_count(0)
        visits.go(page, f"/jobs/{job.id}")
        expect(page.get_by_role("link", name="Cancel")).to_have_count(0)
        device = address(DEVICE)
        for path in (f"{device}/drain", f"{device}/undrain", f"/jobs/{job.id}/cancel", f"/jobs/{job.id}/retry", "/submit"):
            assert forge(page, path) == 403, path
        assert forge(page, f"{device}/labels", set="a=b") == 403
        assert forge(page, f"/jobs/{job.id}/tag", tag="mine") == 403
        assert forge(page, "/reserve", selector="", count="1", minutes="5") == 403
        assert send_file(page, "x.pte", program("add").bytes)["reason"] == "PERMISSION_DENIED"
    with visits.web.client() as farm:
        assert not farm.reservations() and farm.device(f"id-of-{DEVICE}").drain is None
        known = farm.job(job.id)
        assert known.state is JobState.RUNNING
        known.cancel()


def test_a_user_cannot_do_what_admins_do(visits: Visits) -> None:
    with visits.visit("user", address(DEVICE)) as page:
        expect(page.locator(".actions")).to_contain_text("Reserve")
        expect(page.get_by_role("link", name="Drain")).to_have_count(0)
        for path in ("drain", "undrain"):
            assert forge(page, f"{address(DEVICE)}/{path}") == 403
        assert forge(page, f"{address(DEVICE)}/labels", set="a=b") == 403


def test_a_file_belongs_to_its_visitor_and_names_no_file_of_the_page(visits: Visits) -> None:
    with visits.visit("user", "/submit") as page, visits.visit("admin", "/submit") as other:
        sent = send_file(page, "../../x.pte", program("add").bytes)
        assert sent["name"] == "x.pte"
        assert forge(other, "/submit", upload=sent["id"], recipe="portable") == 404
        # A recipe that ends with .toml is a file on the command line, and none here.
        assert forge(page, "/submit", upload=sent["id"], recipe="/etc/hostname.toml") == 400
        assert send_file(page, "demo:resnet8", b"x")["reason"] == "MODEL_FILE_REFUSED"
        assert send_file(page, "empty.pte", b"")["reason"] == "MODEL_FILE_REFUSED"


def send_file(page: Page, name: str, content: bytes) -> dict[str, str]:
    """Send a file as the form's script does, and return the answer."""
    answer: dict[str, str] = page.evaluate(
        """async ([name, encoded]) => {
          const headers = {
            "X-CSRF-Token": document.querySelector('meta[name="csrf-token"]').content, "Content-Type": "application/octet-stream",
          };
          const body = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
          return (await fetch(`/uploads?name=${encodeURIComponent(name)}`, {method: "POST", body, headers})).json();
        }""",
        [name, base64.b64encode(content).decode()],
    )
    return answer
