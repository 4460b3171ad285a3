"""A farm with tokens, its web page as a process, requests to it without a browser, and Debian's chromium."""

from __future__ import annotations

import asyncio
import http.client
import re
import secrets
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode, urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from etfarm.client import Farm
from etfarm.client.admin.access import open_access
from tests.support.farm import Daemon, FarmProcess, private_file

CHROMIUM: Final = Path("/usr/bin/chromium")
PATIENCE_MS: Final = 120_000
"""With a browser on a busy machine."""
ROLES: Final = ("admin", "user", "viewer", "agent")
expect.set_options(timeout=PATIENCE_MS)
_CSRF: Final = re.compile(r'name="csrf_token" value="([^"]+)"')


class WebFarm:
    """A farm with a token for each role, one agent, and the page of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = {role: f"etf_{secrets.token_urlsafe(24)}" for role in ROLES}
        file = private_file(folder / "tokens", "".join(f"the-{role} {role} {token}\n" for role, token in self.tokens.items()))
        self.process = FarmProcess(folder, bundle=False, serve=["--tokens", str(file)])
        self.page: Daemon | None = None
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> WebFarm:
        """Start the server, an agent and the page."""
        self.process.start(agents=0)
        self.process.add_agent(environment={"ETFARM_TOKEN": self.tokens["agent"]})
        self.page, self.url = start_page(self.process.address, self.folder / "web.log", executes=True)
        return self

    def client(self, role: str = "admin") -> Farm:
        """Return a client of the farm; use it in a with statement."""
        return Farm(self.process.address, token=self.tokens[role])

    def stop(self) -> None:
        """End all of it."""
        if self.page is not None:
            self.page.stop()
        self.process.stop()


def start_page(
    server: str, log: Path, *options: str, environment: dict[str, str] | None = None, executes: bool = False
) -> tuple[Daemon, str]:
    """Start the page of a farm, and return its process and its address without a slash at the end."""
    arguments = ["web", "--server", server, "--listen", "127.0.0.1:0", "--exit-with-stdin", *options]
    page = Daemon(arguments, log, environment, executes=executes)
    page.start()
    return page, page.expect("the page of").rpartition(" ")[2].rstrip("/")


@contextmanager
def running_page(server: str, log: Path, *options: str, **more: Any) -> Iterator[tuple[Daemon, str]]:
    """Run a page for the time of a block; yield what `start_page` returns."""
    page, url = start_page(server, log, *options, **more)
    try:
        yield page, url
    finally:
        assert page.stop() == 0


def listening_port(pid: int) -> int:
    """Return the port on which a process listens."""
    (port,) = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return int(port)


@dataclass(frozen=True)
class Answer:
    """An answer of the page."""

    status: int
    headers: Mapping[str, str]
    text: str


@dataclass
class Visit:
    """Requests of one browser without a browser: it keeps cookies, and sends what a test tells it to."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    """What https trusts; None for http."""
    source: str = "127.0.0.1"
    """The address of loopback that it comes from."""

    def get(self, path: str, **headers: str) -> Answer:
        """Request a page; underscores in the names of headers are dashes."""
        return self._request("GET", path, None, headers)

    def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Answer:
        """Send a form as the page itself would, but for `headers`."""
        return self.post_text(path, urlencode(fields), **headers)

    def post_text(self, path: str, body: str, **headers: str) -> Answer:
        """Send the text of a form as the page itself would, but for `headers`."""
        own = {"origin": self.url, "content_type": "application/x-www-form-urlencoded"}
        return self._request("POST", path, body, {**own, **headers})

    def sign_in(self, token: str, next_path: str = "") -> Answer:
        """Open the sign-in page and send the token."""
        shown = self.get("/sign-in").text
        return self.post("/sign-in", {"csrf_token": csrf_of(shown), "token": token, "next": next_path})

    def _request(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Answer:
        host = urlsplit(self.url).netloc
        connection = (
            http.client.HTTPConnection(host, timeout=60, source_address=(self.source, 0))
            if self.context is None
            else http.client.HTTPSConnection(host, timeout=60, context=self.context, source_address=(self.source, 0))
        )
        sent = {name.replace("_", "-"): value for name, value in headers.items() if value}
        if self.cookies and "cookie" not in sent:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            for cookie in response.headers.get_all("set-cookie") or ():
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value
            return Answer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
            )
        finally:
            connection.close()


def csrf_of(page: str) -> str:
    """Return the token of a page's first form."""
    match = _CSRF.search(page)
    assert match is not None, page
    return match[1]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser that contacts the page alone."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"], timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@dataclass(frozen=True)
class PageMemory:
    """What a page's scripts and elements take, once unused ones are collected."""

    heap_bytes: int
    nodes: int
    """Number of nodes of documents, also of those that only scripts refer to."""


def measure_memory(page: Page) -> PageMemory:
    """Return what a page takes in its process."""
    tools = page.context.new_cdp_session(page)
    try:
        for _ in range(3):
            tools.send("HeapProfiler.collectGarbage")
        counters = tools.send("Memory.getDOMCounters")
        return PageMemory(int(tools.send("Runtime.getHeapUsage")["usedSize"]), int(counters["nodes"]))
    finally:
        tools.detach()


class Tab:
    """A page in a browser of its own, which notes requests, errors and violations of the policy."""

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.context: BrowserContext = browser.new_context(**options)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def sign_in(self, token: str, path: str = "/") -> Page:
        """Open a page, and sign in with a token on the way."""
        self.page.goto(f"{self.url}{path}")
        self.page.fill("#token", token)
        self.page.click("main button")
        wanted = urlsplit(f"{self.url}{path}").path
        self.page.wait_for_url(lambda address: urlsplit(address).path == wanted)
        return self.page

    def wait_until_live(self) -> None:
        """Wait for the stream of live values."""
        self.page.wait_for_selector("#connection[data-state=live]")

    def must_be_quiet(self) -> None:
        """Require that the page had no errors, and contacted no other host."""
        assert self.complaints == [], self.complaints
        assert self.hosts <= {urlsplit(self.url).netloc}, self.hosts


def sign_in_and_reserve(url: str, token: str, source: str, **headers: str) -> None:
    """Sign in with a wrong token and a right one, and try to reserve a device that no farm has."""
    visit = Visit(url, source=source)
    form = csrf_of(visit.get("/sign-in", **headers).text)
    assert visit.post("/sign-in", {"csrf_token": form, "token": "etf_wrong"}, **headers).status == 401
    assert visit.post("/sign-in", {"csrf_token": form, "token": token}, **headers).status == 303
    form = csrf_of(visit.get("/server", **headers).text)
    fields = {"csrf_token": form, "selector": "name=none", "count": "1", "minutes": "1"}
    assert visit.post("/reserve", fields, **headers).status >= 400


def audited_addresses(server: str, token: str, action: str) -> set[str]:
    """Return the addresses in the audit's entries of an action that are not the test's own."""

    async def read() -> set[str]:
        async with open_access(server) as access:
            return {entry.peer for entry in await access.audit(action=action)}

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ETFARM_TOKEN", token)
        return asyncio.run(read())
