"""What a colleague does without a terminal: see what is free, submit a model, watch it, read and compare its report."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from tests.support import models
from tests.support.visits import drop
from tests.support.web import CHROMIUM, Tab, WebFarm

pytestmark = [
    pytest.mark.slow(reason="starts a server, an agent, the page and a browser, and compiles a model"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]

COMPILED_MS: Final = 240_000
"""Patience with a server that loads its compiler first."""


def submit(page: Page, model: Path, name: str, *, is_dropped: bool) -> None:
    """Submit a model with the form, by drag and drop or with the file dialog, and watch it until its end."""
    page.get_by_role("link", name="Submit", exact=True).click()
    page.wait_for_url("**/submit")
    if is_dropped:
        drop(page, model.name, model.read_bytes())
    else:
        page.set_input_files("#file", model)
    expect(page.locator("#file-state")).to_contain_text(model.name)
    assert page.evaluate("document.getElementById('file').files[0].name") == model.name, "the file dialog names it too"
    page.fill("[name=name]", name)
    page.fill("[name=iterations]", "20")
    expect(page.locator("#command")).to_have_text(
        f"etfarm bench {model.name} --recipe xnnpack_fp32 --iterations 20 --name '{name}' --detach"
    )
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/jobs/*")
    expect(page.locator("h1")).to_have_text(name)
    expect(page.locator("table.cells")).to_contain_text("SUCCEEDED", timeout=COMPILED_MS)
    expect(page.locator("#matrix .entry")).to_be_visible()


def test_a_colleague_needs_no_terminal(web: WebFarm, tab: Tab, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "conv.pt2")
    page = tab.sign_in(web.tokens["user"])

    page.locator(".counts .idle a").click()
    expect(page.locator("table.devices tbody tr:visible")).to_have_count(1)

    submit(page, model, "last week", is_dropped=True)
    page.get_by_role("link", name="Tag").click()
    page.fill("[name=tag]", "last-week")
    page.get_by_role("button", name="Tag").click()
    expect(page.locator("[data-key=job]")).to_contain_text("last-week")
    submit(page, model, "this week", is_dropped=False)

    page.get_by_role("link", name="All reports").click()
    expect(page.locator("article .tiles")).to_contain_text("How fast?")
    page.locator("canvas").first.wait_for()

    page.get_by_role("link", name="Compare with an earlier job").click()
    expect(page.locator("main h2")).to_have_text("With which job is this week compared?")
    page.locator("tbody tr", has_text="last-week").get_by_role("link").click()
    expect(page.locator(".compared-side h2")).to_have_text("this week against last week")
    expect(page.locator(".pair-card .callout")).to_contain_text("x [")
    expect(page.locator("[name=report]").nth(1)).not_to_have_value("")
    tab.must_be_quiet()
