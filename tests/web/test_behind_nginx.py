"""The page behind nginx, configured as its documentation says: https, a path, live events, and a large file."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from playwright.sync_api import Browser, expect

from tests.support.farm import wait_until
from tests.support.programs import program
from tests.support.simulated_web import TOKENS, SimulatedWebFarm
from tests.support.visits import DEVICE, drop
from tests.support.web import CHROMIUM, Tab, listening_port, start_page

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "web.md"
WITHIN_MS = 14_000
"""For a live event, before the next sign of life could push it out of a proxy that holds it back."""

pytestmark = [
    pytest.mark.slow(reason="starts a server, the page, nginx and a browser"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
    pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx-light"),
]

CONFIGURATION = """
daemon off; master_process off; worker_processes 1; error_log {folder}/error.log; pid {folder}/pid;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {folder}/chain.pem; ssl_certificate_key {folder}/key.pem;
    {location}
  }}
}}
"""


def documented_location(page_port: int) -> str:
    """Return the location that the documentation gives, for a page at another port."""
    (text,) = re.findall(r"```nginx\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert "http://127.0.0.1:8080;" in text
    return text.replace("http://127.0.0.1:8080;", f"http://127.0.0.1:{page_port};")


@contextmanager
def nginx(folder: Path, port: int, page_port: int) -> Iterator[None]:
    """Serve https at a port of loopback in front of a page."""
    assert NGINX is not None
    certificate = trustme.CA().issue_cert("127.0.0.1")
    (folder / "chain.pem").write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, port=port, location=documented_location(page_port)))
    log = (folder / "nginx.log").open("wb")
    with log, subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf"], stdout=log, stderr=log) as process:
        try:
            assert wait_until(lambda: is_open(port)), (folder / "nginx.log").read_text()
            yield
        finally:
            process.terminate()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_documented_proxy_serves_pages_events_and_files(
    simulated: SimulatedWebFarm, browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    url = f"https://127.0.0.1:{port}/etfarm"
    served, _ = start_page(simulated.farm.address, tmp_path / "web.log", "--public-url", url, "--trusted-proxy", "127.0.0.1")
    with nginx(tmp_path, port, listening_port(served.pid)):
        tab = Tab(browser, url, ignore_https_errors=True)
        try:
            page = tab.sign_in(TOKENS["user"])
            (cookie,) = [each for each in tab.context.cookies() if each["httpOnly"]]
            assert cookie["secure"] and cookie["path"] == "/etfarm/"
            tab.wait_until_live()
            with simulated.client() as farm:
                farm.drain_device(f"id-of-{DEVICE}", "behind a proxy")
                expect(page.locator("tr", has_text=DEVICE)).to_contain_text("behind a proxy", timeout=WITHIN_MS)
                farm.undrain_device(f"id-of-{DEVICE}")
                expect(page.locator("tr", has_text=DEVICE)).not_to_contain_text("behind a proxy", timeout=WITHIN_MS)
            page.get_by_role("link", name="Submit", exact=True).click()
            drop(page, "large.pte", program("add").bytes + bytes(8 << 20))
            expect(page.locator("#file-state")).to_have_text(re.compile(r"^large\.pte, 8\.\d+ M"))
            page.locator(".who summary").click()
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url("**/etfarm/sign-in")
            tab.must_be_quiet()
        finally:
            tab.context.close()
            assert served.stop() == 0
