"""Visitors of the farm's page in a real browser: one farm, one page and one chromium for all tests of a process."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tests.support.simulated_web import TOKENS, Act, SimulatedWebFarm
from tests.support.web import PATIENCE_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Response

    from etfarm.v1 import agent_pb2

WIDE: Final = {"width": 1280, "height": 900}
STUCK, BROKEN, DEVICE, OTHER = "stuck-board", "broken-board", "pi5-a", "pi5-b"
"""Devices: what runs on the first never ends, on the second it fails, on the others it succeeds."""


class Visits:
    """Pages of visitors, and what each of them complained about."""

    def __init__(self, web: SimulatedWebFarm, chromium: Browser) -> None:
        self.web = web
        self._chromium = chromium
        self._states: dict[str, Any] = {}

    @contextmanager
    def visit(self, role: str = "admin", path: str = "/", *, expected: int = 200, **context: Any) -> Iterator[Page]:
        """Open a page as a visitor with a role (empty: nobody) in a browser of its own.

        In the end, the page must have had no error, no violation of its policy, and no request to another host.
        """
        opened = self._chromium.new_context(**{"viewport": WIDE, "storage_state": self._state(role)} | context)
        complaints: list[str] = []
        try:
            page = opened.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda message: complaints.append(message.text) if _is_complaint(message.text) else None)
            page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
            page.on("request", lambda request: complaints.append(request.url) if self._is_foreign(request.url) else None)
            response = page.goto(self.web.url + path)
            assert response is not None and response.status == expected, (path, response and response.status)
            yield page
        finally:
            opened.close()
        assert complaints == []

    def go(self, page: Page, path: str) -> Response:
        """Open another address."""
        response = page.goto(self.web.url + path)
        assert response is not None
        return response

    def _is_foreign(self, url: str) -> bool:
        parts = urlsplit(url)
        return parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.web.url

    def _state(self, role: str) -> Any:
        if not role:
            return None
        if role not in self._states:
            context = self._chromium.new_context()
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.goto(self.web.url + "/sign-in")
            page.fill("#token", TOKENS[role])
            page.click("button.main")
            page.locator("h1", has_text="Devices").wait_for()
            self._states[role] = context.storage_state()
            context.close()
        return self._states[role]


def forge(page: Page, path: str, **fields: str) -> int:
    """Send a form that the page does not show, with the page's own token; return the status."""
    status: int = page.evaluate(
        """async ([path, fields]) => {
          const token = document.querySelector('meta[name="csrf-token"]').content;
          const body = new URLSearchParams({...fields, csrf_token: token});
          return (await fetch(path, {method: "POST", body, redirect: "manual"})).status;
        }""",
        [path, fields],
    )
    return status


def drop(page: Page, name: str, content: bytes) -> None:
    """Drop a file on the form of a submission."""
    page.evaluate(
        """([name, encoded]) => {
          const bytes = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], name));
          document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
        }""",
        [name, base64.b64encode(content).decode()],
    )


def has_sideways_scroll(page: Page) -> bool:
    """Return whether a page is wider than its window."""
    wider: bool = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return wider


def _is_complaint(text: str) -> bool:
    """Return whether a message of the console is about more than an answer with an error, which tests ask for."""
    return not text.startswith(("Failed to load resource", "[DOM]"))


def open_simulated(folder: Path) -> SimulatedWebFarm:
    """Start a farm with its page, and devices of several kinds."""
    running = SimulatedWebFarm(folder)
    running.agents.add("rack", devices=(DEVICE, OTHER), run_s=0.05)
    running.agents.add("trouble", devices=(STUCK, BROKEN), act=_misbehave)
    return running


def _misbehave(start: agent_pb2.StartRun) -> Act:
    return Act.HANG if start.device_id.endswith(STUCK) else Act.USER_FAULT
