"""One POST of a notice, to friendly and hostile receivers."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from etfarm.server.notices.addresses import AllowList, parse, system_lookup
from etfarm.server.notices.posting import MAX_ANSWER, Outcome, Poster, tls_context
from tests.support import receivers
from tests.support.receivers import raw, receiver, status

LISTED = AllowList.of(["127.0.0.1", "hooks.lab"])
DEADLINE_S = 60.0
"""Deadline of a receiver that answers, on a busy machine, too."""
SHORT_S = 0.5
"""Deadline of one that does not."""
BODY = b'{"text":"hello"}'


def poster(
    *,
    allowed: AllowList = LISTED,
    authorities: bytes | None = None,
    lookup: object = system_lookup,
    deadline_s: float = DEADLINE_S,
) -> Poster:
    return Poster(allowed, tls_context(authorities), lookup, deadline_s, "9.9")  # type: ignore[arg-type]


def post(url: str, sender: Poster | None = None) -> Outcome:
    return (sender or poster()).post(parse(url), BODY, "a secret", 1_700_000_000, {"X-Etfarm-Event": "job.ended"})


def test_a_notice_arrives_signed() -> None:
    with receiver(status(200, "thanks")) as there:
        outcome = post(there.url("/a?b=c"))
        request = there.requests.get(timeout=60)
    assert outcome == Outcome(200, "", "thanks")
    assert (request.path, request.body) == ("/a?b=c", BODY)
    assert request.headers["Host"] == f"127.0.0.1:{there.port}" and request.headers["User-Agent"] == "etfarm/9.9"
    assert request.headers["X-Etfarm-Event"] == "job.ended" and request.headers["Content-Type"] == "application/json"
    # As a receiver verifies it.
    parts = dict(part.split("=", 1) for part in request.headers["X-Etfarm-Signature"].split(","))
    expected = hmac.new(b"a secret", f"{parts['t']}.".encode() + request.body, hashlib.sha256).hexdigest()
    assert parts["t"] == "1700000000" and hmac.compare_digest(parts["v1"], expected)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(code: int) -> None:
    with receiver() as elsewhere, receiver(status(code, Location=elsewhere.url())) as there:
        outcome = post(there.url())
        assert outcome.status == code and "not followed" in outcome.error and outcome.is_final
        assert elsewhere.requests.empty()


@pytest.mark.parametrize(
    ("code", "is_final"), [(400, False), (404, False), (410, True), (429, False), (500, False), (503, False)]
)
def test_a_refusal_is_told_with_the_beginning_of_the_answer(code: int, is_final: bool) -> None:
    with receiver(status(code, "x" * 5_000)) as there:
        outcome = post(there.url())
    assert (outcome.status, outcome.is_final, outcome.answer) == (code, is_final, "x" * MAX_ANSWER)
    assert str(code) in outcome.error


@pytest.mark.parametrize("talk", [receivers.hang, receivers.drip, receivers.flood_of_headers, receivers.babble])
def test_a_hostile_receiver_costs_its_time_limit_at_most(talk: Callable[..., None]) -> None:
    with raw(talk) as there:
        before = time.monotonic()
        outcome = post(there.url(), poster(deadline_s=SHORT_S))
        took_s = time.monotonic() - before
    assert outcome.error and outcome.status is None and not outcome.is_final
    assert took_s < DEADLINE_S


def test_of_an_answer_without_end_the_beginning_is_read() -> None:
    with raw(receivers.flood) as there:
        outcome = post(there.url())
    assert outcome == Outcome(200, "", "x" * MAX_ANSWER)


def test_a_handshake_that_never_ends_is_cut() -> None:
    with raw(receivers.hang) as there:
        before = time.monotonic()
        outcome = post(there.url().replace("http:", "https:"), poster(deadline_s=SHORT_S))
        assert "did not answer" in outcome.error and time.monotonic() - before < DEADLINE_S


def test_a_port_where_nothing_listens_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    outcome = post(f"http://127.0.0.1:{port}/")
    assert "refused" in outcome.error and not outcome.is_final


def test_a_certificate_must_be_valid_for_the_name(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    trusting = poster(authorities=authority.cert_pem.bytes(), lookup=lambda host, port: ["127.0.0.1"])

    def context(*names: str, by: trustme.CA = authority) -> ssl.SSLContext:
        identity = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        by.issue_cert(*names).configure_cert(identity)
        return identity

    with receiver(identity=context("hooks.lab")) as there:
        assert post(there.url(host="hooks.lab"), trusting).status == 200
        wrong_name = post(there.url(), trusting)
        assert "certificate is not valid" in wrong_name.error and wrong_name.status is None
        assert "certificate is not valid" in post(there.url(host="hooks.lab"), poster(lookup=lambda *_: ["127.0.0.1"])).error
    with receiver(identity=context("hooks.lab", by=other)) as there:
        assert "certificate is not valid" in post(there.url(host="hooks.lab"), trusting).error
        assert there.requests.empty()


def test_a_name_that_resolves_to_loopback_is_refused_before_a_connection() -> None:
    with receiver() as there:
        outcome = post(
            there.url(host="public.example"), poster(allowed=AllowList.of([]), lookup=lambda host, port: ["127.0.0.1"])
        )
        assert outcome.is_final and "not public" in outcome.error
        assert there.requests.empty()


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """A name that changes its address between the check and the connection (rebinding) is resolved once."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    asked: list[str] = []

    def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers.pop(0)

    with receiver() as there:
        assert post(there.url(host="hooks.lab"), poster(lookup=lookup)).status == 200
        assert there.requests.get(timeout=60).headers["Host"] == f"hooks.lab:{there.port}"
    assert asked == ["hooks.lab"]


def test_a_name_that_cannot_be_resolved_is_tried_again() -> None:
    def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    outcome = post("http://hooks.lab/", poster(lookup=lookup))
    assert "cannot be resolved" in outcome.error and not outcome.is_final


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as proxy, receiver() as there:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        assert post(there.url()).status == 200
        assert proxy.requests.empty() and there.requests.get(timeout=60)
