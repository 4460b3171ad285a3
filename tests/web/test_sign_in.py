"""Who gets in: tokens, the one-time link, cookies, and requests that other sites make a browser send."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client.web.security import CONTENT_SECURITY_POLICY
from tests.support.web import Visit, WebFarm, csrf_of, listening_port, running_page

pytestmark = pytest.mark.slow(reason="starts a server, an agent and the page")


def test_a_page_leads_to_the_sign_in_and_back(web: WebFarm, visit: Visit) -> None:
    sent = visit.get("/devices?selector=arch%3Dx86_64")
    assert (sent.status, sent.headers["location"]) == (303, "/sign-in?next=%2Fdevices%3Fselector%3Darch%253Dx86_64")
    welcome = visit.sign_in(web.tokens["viewer"], "/devices?selector=arch%3Dx86_64")
    assert (welcome.status, welcome.headers["location"]) == (303, "/devices?selector=arch%3Dx86_64")
    page = visit.get("/devices")
    assert page.status == 200
    assert "the-viewer" in page.text
    assert web.tokens["viewer"] not in page.text
    assert all(web.tokens["viewer"] not in value for value in visit.cookies.values())


def test_the_cookie_is_for_this_page_alone(web: WebFarm, visit: Visit) -> None:
    cookie = visit.sign_in(web.tokens["user"]).headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}


@pytest.mark.parametrize("path", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)", ""])
def test_the_sign_in_leads_to_this_page_only(web: WebFarm, visit: Visit, path: str) -> None:
    assert visit.sign_in(web.tokens["user"], path).headers["location"] == "/devices"


def test_a_wrong_token_is_refused_with_the_farms_sentence(visit: Visit) -> None:
    refused = visit.sign_in("etf_wrong<b>")
    assert refused.status == 401
    assert 'role="alert"' in refused.text
    assert visit.get("/devices").status == 303


def test_signing_out_ends_the_session(web: WebFarm, visit: Visit) -> None:
    visit.sign_in(web.tokens["user"])
    cookies = dict(visit.cookies)
    assert visit.post("/sign-out", {"csrf_token": csrf_of(visit.get("/server").text)}).status == 303
    visit.cookies = cookies
    assert visit.get("/server").status == 303, "the cookie is worth nothing any more"


def test_a_link_from_another_site_opens_without_signing_in_again(web: WebFarm, visit: Visit) -> None:
    visit.sign_in(web.tokens["user"])
    cookies, visit.cookies = visit.cookies, {}  # the browser withholds a strict cookie from such a link
    from_chat = visit.get("/server", sec_fetch_site="cross-site", sec_fetch_mode="navigate")
    assert from_chat.status == 200
    assert 'http-equiv="refresh"' in from_chat.text
    visit.cookies = cookies
    assert visit.get("/server", sec_fetch_site="same-origin").status == 200


def test_a_form_must_come_from_the_page_itself(web: WebFarm, visit: Visit) -> None:
    visit.sign_in(web.tokens["user"])
    token = csrf_of(visit.get("/server").text)
    other = Visit(web.url)
    other.sign_in(web.tokens["user"])
    foreign = csrf_of(other.get("/server").text)
    attempts = [
        visit.post("/sign-out", {"csrf_token": token}, origin="https://evil.example"),
        visit.post("/sign-out", {"csrf_token": token}, origin="null"),
        visit.post("/sign-out", {"csrf_token": token}, origin="", sec_fetch_site="same-site"),
        visit.post("/sign-out", {"csrf_token": foreign}),
        visit.post("/sign-out", {}),
        visit.post("/sign-out", {"csrf_token": token}, content_type="text/plain"),
        visit.post("/sign-in", {"token": web.tokens["admin"]}),
    ]
    assert [answer.status for answer in attempts] == [403] * len(attempts)
    assert visit.get("/server").status == 200
    assert visit.post("/sign-out", {}, x_csrf_token=token).status == 303


def test_other_hosts_and_large_bodies_are_refused(web: WebFarm, visit: Visit) -> None:
    assert visit.get("/sign-in", host="evil.example").status == 400
    assert visit.get("/sign-in", host="127.0.0.1.evil.example:80").status == 400
    for malformed in ("127.0.0.1:80:evil.example", "[::1]evil.example", "evil@127.0.0.1", "127.0.0.1.", "[::1]:80:90", ":80"):
        assert visit.get("/sign-in", host=malformed).status == 400, malformed
    for own in ("127.0.0.1", "LocalHost:1", "[0:0::1]:8080"):
        assert visit.get("/sign-in", host=own).status == 200, own
    assert visit.post("/sign-in", {"token": "x" * (2 << 20)}).status == 413


def test_every_answer_confines_the_browser(web: WebFarm, visit: Visit) -> None:
    refused = visit.post("/sign-out", {})
    visit.sign_in(web.tokens["user"])
    shown = visit.get("/devices")
    script = shown.text.partition('src="')[2].partition('"')[0]
    for answer in (refused, shown, visit.get("/nothing"), visit.get(script), visit.get("/static/x/nothing.js")):
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert shown.headers["cache-control"] == "no-store"
    assert "immutable" in visit.get(script).headers["cache-control"]
    assert "<style" not in shown.text and "style=" not in shown.text and "<script>" not in shown.text


@pytest.mark.parametrize(
    "path", ["/static/x/../app.py", "/static/x/templates/report.html", "/static/x/__init__.py", "/static/x/"]
)
def test_only_static_files_are_served(visit: Visit, path: str) -> None:
    assert visit.get(path).status == 404


def test_the_link_signs_in_once(web: WebFarm, tmp_path: Path) -> None:
    own = {"ETFARM_TOKEN": web.tokens["user"]}
    with running_page(web.process.address, tmp_path / "web.log", "--link", environment=own) as (page, url):
        path = page.expect("sign in once").rpartition(" ")[2].removeprefix(url)
        first, second = Visit(url), Visit(url)
        forms = [visit.get(path).text for visit in (first, second)]
        code = path.partition("code=")[2]
        assert first.post("/enter", {"csrf_token": csrf_of(forms[0]), "code": code}).status == 303
        assert "the-user" in first.get("/devices").text
        late = second.post("/enter", {"csrf_token": csrf_of(forms[1]), "code": code})
        assert late.status == 401
        assert "used before" in late.text
        assert Visit(url).get("/devices").status == 303, "the command's own token is for the link alone"


def test_the_page_is_served_under_a_path_behind_a_proxy(web: WebFarm, tmp_path: Path) -> None:
    public = "https://farm.example/etfarm"
    with running_page(web.process.address, tmp_path / "web.log", "--public-url", public) as (page, url):
        assert url == public
        local = f"http://127.0.0.1:{listening_port(page.pid)}"
        visit = Visit(local)
        proxied = {"host": "farm.example", "origin": "https://farm.example"}
        for prefix in ("/etfarm", ""):  # a proxy may remove the path, or keep it
            visit.cookies = {}
            form = csrf_of(visit.get(f"{prefix}/sign-in", host="farm.example").text)
            welcome = visit.post(f"{prefix}/sign-in", {"csrf_token": form, "token": web.tokens["user"]}, **proxied)
            assert welcome.headers["location"] == "/etfarm/devices"
            cookie = welcome.headers["set-cookie"]
            assert cookie.startswith("__Secure-")
            assert {"Secure", "Path=/etfarm/"} <= {part.strip() for part in cookie.split(";")}
            shown = visit.get(f"{prefix}/devices", host="farm.example")
            assert shown.status == 200
            assert 'href="/etfarm/server"' in shown.text
            assert 'href="/server"' not in shown.text
            script = shown.text.partition('src="')[2].partition('"')[0]
            assert visit.get(script.removeprefix("/etfarm") if not prefix else script, host="farm.example").status == 200
