"""Pictures of the farm's web page for docs/ and README.md; `record.py` takes them of the farm that it runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

START: Final = "the page of"


def take(pages: Mapping[str, str], pictures: Path, environment: Mapping[str, str]) -> list[Path]:
    """Take pictures of pages, and return their files.

    Args:
        pages: the page's address, from the slash on, by the picture's name.
        pictures: the folder of the pictures.
        environment: of a command that uses the farm, which has no tokens.
    """
    from playwright.sync_api import sync_playwright

    chromium_path = shutil.which("chromium")
    if chromium_path is None:
        raise SystemExit("pictures need chromium: apt-get install chromium")
    web = subprocess.Popen(
        ["etfarm", "web", "--exit-with-stdin"], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert web.stdin is not None and web.stdout is not None
    taken = []
    try:
        url = next(line for line in web.stdout if START in line).split()[-1].rstrip("/")
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=chromium_path, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = chromium.new_context(
                viewport={"width": 1200, "height": 800}, color_scheme="light", device_scale_factor=1.5
            ).new_page()
            page.goto(f"{url}/sign-in")
            page.click("main button")
            for name, path in pages.items():
                page.goto(f"{url}{path}")
                page.wait_for_timeout(1_500)  # charts
                taken.append(pictures / f"{name}.png")
                page.screenshot(path=taken[-1])
            chromium.close()
    finally:
        web.stdin.close()
        web.wait(30)
    return taken
