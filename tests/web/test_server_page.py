"""The page of the server: admins see its settings without secrets, and its metrics; others do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from etfarm.client import Farm
from etfarm.client.cli.commands import server
from tests.support.farm import private_file, serve
from tests.support.refusals import refuses
from tests.support.simulated_web import TOKENS
from tests.support.web import Visit, WebFarm

pytestmark = pytest.mark.slow(reason="starts a server and its page")

SECRET: Final = "hunter2-T0000"
SIGNING: Final = "signs-the-notices-0123456789"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server with secrets in its options, and of the page that it starts."""
    folder: Path = tmp_path_factory.mktemp("served")
    tokens = private_file(folder / "tokens", "".join(f"{role} {role} {token}\n" for role, token in TOKENS.items()))
    signing = private_file(folder / "signing", f"{SIGNING}\n")
    options = ["--tokens", str(tokens), "--workers", "3", "--webhook-secret", str(signing)]
    options += ["--webhook", f"https://hooks.example/services/{SECRET}"]
    with serve(folder, "--web", "127.0.0.1:0", *options) as daemon:
        address = daemon.expect("listening on").rpartition(" ")[2]
        yield address, daemon.expect("web page at").rpartition(" ")[2].rstrip("/")


def show(url: str, role: str) -> str:
    visit = Visit(url)
    assert visit.sign_in(TOKENS[role]).status == 303
    shown = visit.get("/server")
    assert shown.status == 200
    return shown.text


def test_an_admin_sees_settings_and_metrics_without_secrets(served: tuple[str, str]) -> None:
    text = show(served[1], "admin")
    settings = text.partition('id="settings"')[2]
    assert "https://hooks.example/…" in settings
    assert '<code>workers</code></th><td data-head="Value">3</td><td data-head="From">--workers</td>' in settings
    metrics = text.partition('id="metrics"')[2].partition("</section>")[0]
    for name in ("etfarm_rpcs", "etfarm_disk_free_bytes", "process_resident_memory_bytes"):
        assert f">{name}<" in metrics
    for secret in (SECRET, SIGNING, *TOKENS.values()):
        assert secret not in text


def test_the_command_of_the_page_prints_the_same(
    served: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert '<code id="command">etfarm server</code>' in show(served[1], "admin")
    monkeypatch.setenv("ETFARM_TOKEN", TOKENS["admin"])
    assert server.main(["--server", served[0]]) == 0
    brief = capsys.readouterr().out
    assert re.search(r"^You are +admin, admin$", brief, re.MULTILINE)
    assert re.search(r"^workers +3 +--workers$", brief, re.MULTILINE)
    assert re.search(r"^etfarm_disk_free_bytes +- +[\d.]+ [GT]iB ", brief, re.MULTILINE)
    assert "etfarm_rpcs " not in brief and "process_resident_memory_bytes" not in brief
    assert server.main(["--server", served[0], "--all"]) == 0
    everything = capsys.readouterr().out
    assert re.search(r"^webhook +https://hooks.example/… ", everything, re.MULTILINE)
    assert re.search(r"^[\w-]+ +.* default$", everything, re.MULTILINE)
    assert re.search(r"^etfarm_rpcs +.*rpc=", everything, re.MULTILINE) and "process_resident_memory_bytes" in everything
    for secret in (SECRET, SIGNING, *TOKENS.values()):
        assert secret not in everything


@pytest.mark.parametrize("role", ["user", "viewer"])
def test_the_command_shows_others_the_server_alone(
    served: tuple[str, str], role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", TOKENS[role])
    assert server.main(["--server", served[0]]) == 0
    shown = capsys.readouterr().out
    assert f"{role}, {role}" in shown and "An admin also sees" in shown and "SETTING" not in shown
    assert server.main(["--server", served[0], "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)["server"]
    assert document["role"] == role.upper() and document["settings"] is None and document["metrics"] is None


@pytest.mark.parametrize("role", ["user", "viewer"])
def test_others_see_neither(served: tuple[str, str], role: str) -> None:
    text = show(served[1], role)
    assert "Runner bundles" in text
    assert 'id="settings"' not in text and 'id="metrics"' not in text
    with Farm(served[0], token=TOKENS[role]) as farm, refuses("PERMISSION_DENIED"):
        farm.server_status()


def test_a_server_that_does_not_measure_itself_says_how_it_would(web: WebFarm) -> None:
    visit = Visit(web.url)
    visit.sign_in(web.tokens["admin"])
    text = visit.get("/server").text
    assert "collects no metrics" in text
    assert 'id="settings"' in text
