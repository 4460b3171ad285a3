"""Addresses: what is one, and which only this machine reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.wire.channel import Access, open_channel, parse_address
from etfarm.wire.errors import Kind
from tests.support.golden import Golden
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", "localhost:7433", "board-7.lab:1", "[::1]:80", "[fe80::1]:65535", "unix:/run/farm.sock", "unix:farm"]
)
def test_addresses(text: str) -> None:
    assert parse_address(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":80", "host:port", "host:65536", "host:-1", "host: 80", "host:\u0661", "::1:80", "[]:80", "[zz]:80",
        "http://host:80", "unix:", "a b:80", "user@host:80", "host:80\n", "[::1", "::1]:80",
    ],
)  # fmt: skip
def test_other_texts_are_refused_with_the_forms_that_there_are(golden: Golden, text: str) -> None:
    with golden.refuses("BAD_ADDRESS") as refused:
        parse_address(text)
    assert refused.value.metadata == {"address": text}


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1", "unix:/tmp/x"])
def test_only_this_machine_reaches(text: str) -> None:
    assert parse_address(text).is_local


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "192.168.1.2:1", "[::]:1", "board:1", "localhost.example:1", "127.0.0.1.example:1"]
)
def test_others_may_reach(text: str) -> None:
    assert not parse_address(text).is_local


def test_access_takes_token_and_authority_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", "secret")
    monkeypatch.setenv("ETFARM_TLS_CA", "/ca.pem")
    assert Access.of("h:1") == Access("h:1", "secret", Path("/ca.pem"))
    assert Access.of("h:1", "/other.pem").tls_ca == Path("/other.pem")
    monkeypatch.delenv("ETFARM_TOKEN")
    monkeypatch.delenv("ETFARM_TLS_CA")
    assert Access.of("h:1") == Access("h:1", "", None)


async def test_a_token_is_not_sent_in_the_clear_to_another_machine() -> None:
    with refuses("BAD_ADDRESS", match="unencrypted"):
        open_channel(Access("board:1", token="secret"))
    for access in (Access("127.0.0.1:1", token="secret"), Access("board:1")):
        await open_channel(access).close()


async def test_a_missing_authority_is_named(golden: Golden, tmp_path: Path) -> None:
    with golden.refuses("BAD_TLS_FILE"):
        open_channel(Access("board:1", tls_ca=tmp_path / "ca.pem"))


@pytest.mark.remedy("BAD_TOKEN")
@pytest.mark.parametrize("token", ["é", "etf_\x00", "a\r\nb", "etf_x\n", "\u2028"])
async def test_a_token_that_no_header_can_have_is_refused_before_anything_is_sent(token: str) -> None:
    with refuses("BAD_TOKEN") as refused:
        open_channel(Access("127.0.0.1:1", token))
    await open_channel(Access("127.0.0.1:1", "etf_x")).close()
    assert (refused.value.reason, refused.value.kind) == ("BAD_TOKEN", Kind.UNAUTHENTICATED)
    assert token not in str(refused.value)
