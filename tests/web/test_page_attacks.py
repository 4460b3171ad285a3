"""Requests that no page sends: forged, malformed, slow."""

from __future__ import annotations

import asyncio
import http.client
from urllib.parse import urlsplit

import pytest

from etfarm.client.admin.access import open_access
from tests.support.web import Visit, WebFarm, csrf_of

pytestmark = pytest.mark.slow(reason="starts a server, an agent and the page")

DIGITS = "9" * 5_000
"""More digits than `int` reads."""


@pytest.fixture
def user(web: WebFarm, visit: Visit) -> Visit:
    visit.sign_in(web.tokens["user"])
    return visit


@pytest.mark.parametrize("origin", ["http://[", "http://", "null", "http://127.0.0.1"])
def test_a_malformed_origin_is_refused(user: Visit, origin: str) -> None:
    token = csrf_of(user.get("/server").text)
    refused = user.post("/sign-out", {"csrf_token": token}, origin=origin)
    assert refused.status == 403
    assert "content-security-policy" in refused.headers


@pytest.mark.parametrize("path", [f"/history?model=x&threads={DIGITS}", "/history?model=x&threads=0"])
def test_a_wrong_number_is_a_sentence(user: Visit, path: str) -> None:
    refused = user.get(path)
    assert refused.status == 400
    assert "number of threads" in refused.text


def test_a_reservation_of_no_device_is_refused(user: Visit) -> None:
    token = csrf_of(user.get("/server").text)
    refused = user.post("/reserve", {"csrf_token": token, "selector": "", "count": "0", "minutes": "1"})
    assert refused.status == 400
    assert "at least 1" in refused.text


@pytest.mark.parametrize("name", ["#1", "a?b#1", "a#b#2", "%2e%2e"])
def test_names_of_reports_stay_within_their_links(user: Visit, name: str) -> None:
    shown = user.get(f"/compare?report={name.replace('%', '%25').replace('#', '%23')}&report=latest")
    assert shown.status == 200
    links = [part.partition('"')[0] for part in shown.text.split('href="/jobs/')[1:]]
    assert links and not any(set(link) & set("?#/") for link in links), links


def test_signing_out_ends_the_streams_of_a_token_that_others_use(web: WebFarm, user: Visit) -> None:
    other = Visit(web.url)
    other.sign_in(web.tokens["user"])
    connection = http.client.HTTPConnection(urlsplit(web.url).netloc, timeout=8)  # less than the pause of a stream's beats
    cookies = "; ".join(f"{name}={value}" for name, value in user.cookies.items())
    connection.request("GET", "/live?topic=devices", headers={"cookie": cookies})
    stream = connection.getresponse()
    assert b"devices" in stream.read1() + stream.read1()
    assert user.post("/sign-out", {"csrf_token": csrf_of(user.get("/server").text)}).status == 303
    stream.read()
    connection.close()
    assert other.get("/server").status == 200


async def test_a_page_of_a_revoked_token_leads_to_the_sign_in(web: WebFarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", web.tokens["admin"])
    async with open_access(web.process.address) as access:
        token, secret = await access.create_token("dora", "viewer")
        visit = Visit(web.url)
        await asyncio.to_thread(visit.sign_in, secret)
        await access.revoke_token(token.id)
    refused = await asyncio.to_thread(visit.get, "/server")
    assert refused.status == 401, refused.text
    assert (await asyncio.to_thread(visit.get, "/server")).status == 303


@pytest.mark.parametrize("topic", ["devices:x%0adata:y", "devices:x%0d%0a", "devices:x%20y", "nothing", ""])
def test_a_topic_cannot_contain_lines_of_the_stream(user: Visit, topic: str) -> None:
    assert user.get(f"/live?topic={topic}").status == 400
