"""The page as a process: of its own, beside `etfarm up`, and as a child of `etfarm serve`."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
from starlette.requests import Request
from starlette.responses import Response

from etfarm.client import AsyncFarm
from etfarm.client.admin.access import open_access
from etfarm.client.errors import EtfarmError
from etfarm.client.web.app import _Failures, create_app
from etfarm.client.web.forms import CsrfTokens
from etfarm.client.web.options import WebOptions
from etfarm.client.web.pages.artifacts import _send
from etfarm.client.web.pages.devices import DEVICES
from etfarm.client.web.visitors import Visitors, visitor_of
from tests.support.farm import Daemon, etfarm, serve
from tests.support.refusals import refuses
from tests.support.web import Visit, WebFarm, csrf_of, running_page

pytestmark = pytest.mark.slow(reason="starts servers and pages")


def test_the_server_starts_a_page_that_ends_with_it(tmp_path: Path) -> None:
    # A killed server leaves its page's folder for the next one to remove.
    server = serve(tmp_path, "--web", "127.0.0.1:0", environment={"TMPDIR": str(tmp_path)})
    server.start()
    url = server.expect("web page at").rpartition(" ")[2].rstrip("/")
    visit = Visit(url)
    assert visit.sign_in("").status == 303, "this farm has no tokens"
    assert "There is no device" in visit.get("/devices").text
    children = psutil.Process(server.pid).children(recursive=True)
    page = next(child for child in children if "web" in child.cmdline())
    server.kill9()
    page.wait(timeout=60)


@pytest.mark.remedy("PAGE_FAILED")
def test_a_server_whose_page_cannot_listen_says_why(web: WebFarm, tmp_path: Path) -> None:
    taken = web.url.rpartition(":")[2]
    done = etfarm(
        *("serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"), "--no-bundle", "--no-prewarm"),
        *("--web", f"127.0.0.1:{taken}"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert f"The web page did not start: it cannot listen on 127.0.0.1:{taken}: Address already in use." in done.stderr
    with serve(tmp_path, "--web", "127.0.0.1:0") as server:
        assert server.expect("web page at")


def test_up_prints_a_link_into_the_farm(tmp_path: Path) -> None:
    up = Daemon(["up"], tmp_path / "up.log", {"ETFARM_DATA": str(tmp_path / "data")})
    up.start()
    try:
        link = up.expect("sign in once").rpartition(" ")[2]
        url, _, code = link.partition("/enter?code=")
        visit = Visit(url)
        form = csrf_of(visit.get(f"/enter?code={code}").text)
        assert visit.post("/enter", {"csrf_token": form, "code": code}).status == 303
        assert "local" in visit.get("/devices").text
        page = next(child for child in psutil.Process(up.pid).children() if "web" in child.cmdline())
    finally:
        up.signal(signal.SIGINT)
        assert up.process is not None
        assert up.process.wait(timeout=60) == 0
    page.wait(timeout=60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--listen", "0.0.0.0:0"], "tokens would cross the network in clear text"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key need each other"),
        (["--listen", "unix:/tmp/x"], "--listen must be HOST:PORT"),
        (["--public-url", "farm.example"], "The public URL must be http(s)://HOST[:PORT][/PATH]"),
    ],
)
def test_wrong_options_are_refused(web: WebFarm, tmp_path: Path, options: list[str], sentence: str) -> None:
    done = etfarm("web", "--server", web.process.address, *options, cwd=tmp_path)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr


def test_the_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n")
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", "web", "--server", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "`etfarm web` needs etfarm[web] (starlette is not installed)." in done.stderr
    assert "pip install 'etfarm[web]'" in done.stderr


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_sessions_end_when_idle_too_old_or_too_many(web: WebFarm) -> None:
    clock = Clock()
    options = WebOptions(web.process.address, max_sessions=2, idle_timeout_s=100.0, session_timeout_s=250.0)
    visitors = Visitors(options, lambda name, **values: "", clock)
    idle, active = [await visitors.sign_in(web.tokens["user"]) for _ in range(2)]
    assert idle.account is active.account, "visitors with one token share a client"
    for _ in range(2):
        clock.now_s += 80.0
        active.seen_s = clock.now_s
    assert (visitors.is_expired(idle), visitors.is_expired(active)) == (True, False)
    third = await visitors.sign_in(web.tokens["viewer"])
    assert (third.role, third.may_change) == ("VIEWER", False)
    assert not visitors.is_expired(active), "the one that was idle longest left"
    clock.now_s += 95.0
    active.seen_s = clock.now_s
    assert visitors.is_expired(active), "too old, although it is used"
    await visitors.close()
    with pytest.raises(EtfarmError):
        await active.account.farm.info()


async def test_one_token_does_not_sign_out_everybody_else(web: WebFarm) -> None:
    visitors = Visitors(WebOptions(web.process.address, max_sessions=3), lambda name, **values: "", Clock())
    viewer = await visitors.sign_in(web.tokens["viewer"])
    users = [await visitors.sign_in(web.tokens["user"]) for _ in range(4)]
    assert not visitors.is_expired(viewer)
    assert [visitors.is_expired(user) for user in users] == [True, True, False, False]
    await visitors.close()


@pytest.mark.remedy("NOT_SIGNED_IN")
async def test_a_request_belongs_to_who_has_signed_in(web: WebFarm) -> None:
    with refuses("NOT_SIGNED_IN"):
        visitor_of(Request({"type": "http", "state": {}}))
    visitors = Visitors(WebOptions(web.process.address), lambda name, **values: "")
    visitor = await visitors.sign_in(web.tokens["viewer"])
    assert visitor_of(Request({"type": "http", "state": {"visitor": visitor}})) is visitor
    await visitors.close()


@pytest.mark.remedy("PAGE_NOT_FOUND")
def test_the_navigation_of_a_page_that_is_not_there_leads_to_those_that_are(web: WebFarm) -> None:
    visit = Visit(web.url)
    visit.sign_in(web.tokens["viewer"])
    missing = visit.get("/somewhere")
    assert missing.status == 404 and "no such page" in missing.text and 'href="/devices"' in missing.text
    assert visit.get("/devices").status == 200


@pytest.mark.remedy("PAGE_TIMED_OUT")
async def test_a_page_that_took_too_long_is_shown_when_it_is_loaded_again(web: WebFarm) -> None:
    answers = asyncio.Event()

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await answers.wait()
        await Response("the farm's answer")(scope, receive, send)

    async def load() -> str:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/devices", "query_string": b"", "headers": [], "root_path": ""}
        app = create_app(WebOptions(web.process.address))
        await _Failures(page, timeout_s=0.05)({**scope, "app": app, "state": {}}, send, send)
        return b"".join(message.get("body", b"") for message in sent).decode()

    assert "did not answer within 0.05 s" in await load()
    answers.set()
    assert await load() == "the farm's answer"


@pytest.mark.remedy("DOWNLOAD_TOO_LARGE")
async def test_a_file_that_is_too_large_for_the_page_comes_with_the_command(web: WebFarm, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    server = ("--server", web.process.address)
    environment = {"ETFARM_TOKEN": web.tokens["user"]}
    put = await asyncio.to_thread(etfarm, "artifacts", "put", "file", *server, cwd=tmp_path, environment=environment)
    assert put.returncode == 0, put.stderr
    digest = hashlib.sha256(bytes(100_000)).hexdigest()
    async with AsyncFarm(web.process.address, token=web.tokens["user"]) as farm:
        with refuses("DOWNLOAD_TOO_LARGE"):
            async for _ in _send(b"", farm.artifacts.read(digest), limit=1_000):
                pass
    got = await asyncio.to_thread(
        etfarm, "artifacts", "get", digest, "-o", "copy", *server, cwd=tmp_path, environment=environment
    )
    assert got.returncode == 0, got.stderr
    assert (tmp_path / "copy").read_bytes() == bytes(100_000)


@pytest.mark.remedy("SIGN_IN_LINK_USED")
async def test_a_code_is_for_a_few_minutes(web: WebFarm) -> None:
    clock = Clock()
    visitors = Visitors(WebOptions(web.process.address), lambda name, **values: "", clock)
    code = visitors.create_code(web.tokens["user"])
    clock.now_s += 901.0
    with refuses("SIGN_IN_LINK_USED"):
        await visitors.enter(code)
    assert await visitors.enter(visitors.create_code(web.tokens["user"]))
    await visitors.close()


async def test_a_revoked_token_ends_its_sessions(web: WebFarm) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ETFARM_TOKEN", web.tokens["admin"])
        async with open_access(web.process.address) as access:
            token, secret = await access.create_token("carl", "viewer")
            visitors = Visitors(WebOptions(web.process.address), lambda name, **values: "")
            visitor = await visitors.sign_in(secret)
            feed = await visitor.account.feeds.open(DEVICES)
            await access.revoke_token(token.id)
            ended = asyncio.Event()
            async with asyncio.timeout(60):
                with feed.listen(ended):
                    while not visitors.is_expired(visitor):
                        ended.clear()
                        await ended.wait()
            assert visitors.is_expired(visitor)
            await visitors.close()


def test_csrf_tokens_belong_to_a_cookie_and_differ() -> None:
    tokens, others = CsrfTokens(), CsrfTokens()
    first, second = tokens.create("cookie"), tokens.create("cookie")
    assert first != second
    assert tokens.is_valid(first, "cookie") and tokens.is_valid(second, "cookie")
    for token, cookie in ((first, "other"), (first, ""), ("", "cookie"), ("é.é", "cookie"), (others.create("cookie"), "cookie")):
        assert not tokens.is_valid(token, cookie)


@pytest.mark.remedy("BAD_WEB_OPTION")
@pytest.mark.parametrize(
    "url",
    [
        "farm.example",
        "ftp://farm.example",
        "https://",
        "https://a@farm.example",
        "https://f.example/?q",
        "https://f\u00e9.example",
        "https://f.example:x",
        "https://[::1",
    ],
)
def test_a_public_url_must_be_an_address(url: str) -> None:
    with refuses("BAD_WEB_OPTION"):
        WebOptions("127.0.0.1:1", public_url=url)
    WebOptions("127.0.0.1:1", public_url="https://farm.example")


def test_a_farm_with_tls_has_a_page_by_https(web: WebFarm, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    (tmp_path / "both.pem").chmod(0o600)
    both = str(tmp_path / "both.pem")
    tls = ("--tls-cert", both, "--tls-key", both)
    with serve(tmp_path, "--web", "127.0.0.1:0", *tls, "--tokens", str(web.folder / "tokens")) as server:
        visit = Visit(server.expect("web page at").rpartition(" ")[2].rstrip("/"))
        assert visit.sign_in(web.tokens["viewer"]).status == 303, "the page trusts the server's own certificate"
    with running_page(web.process.address, tmp_path / "web.log", *tls) as (_, url):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        secure = Visit(url, context=context)
        assert url.startswith("https://")
        cookie = secure.sign_in(web.tokens["viewer"]).headers["set-cookie"]
        assert cookie.startswith("__Secure-") and "Secure" in cookie
        assert "max-age" in secure.get("/devices").headers["strict-transport-security"]
