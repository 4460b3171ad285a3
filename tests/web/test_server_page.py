"""The page of the server: admins see its settings without secrets, and its metrics; others do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from etfarm.client import EtfarmError, Farm
from tests.support.farm import Daemon
from tests.support.simulated_web import TOKENS
from tests.support.web import Visit, WebFarm

pytestmark = pytest.mark.slow(reason="starts a server and its page")

SECRET: Final = "hunter2-T0000"
SIGNING: Final = "signs-the-notices-0123456789"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server with secrets in its options, and of the page that it starts."""
    folder: Path = tmp_path_factory.mktemp("served")
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("".join(f"{role} {role} {token}\n" for role, token in TOKENS.items()))
    signing = folder / "signing"
    signing.touch(mode=0o600)
    signing.write_text(f"{SIGNING}\n")
    options = ["--tokens", str(tokens), "--workers", "3", "--webhook-secret", str(signing)]
    options += ["--webhook", f"https://hooks.example/services/{SECRET}"]
    server = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--no-prewarm", "--exit-with-stdin",
         "--web", "127.0.0.1:0", *options],
        folder / "serve.log",
    )  # fmt: skip
    server.start()
    try:
        address = server.expect("listening on").rpartition(" ")[2]
        yield address, server.expect("web page at").rpartition(" ")[2].rstrip("/")
    finally:
        assert server.stop() == 0


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


@pytest.mark.parametrize("role", ["user", "viewer"])
def test_others_see_neither(served: tuple[str, str], role: str) -> None:
    text = show(served[1], role)
    assert "Runner bundles" in text
    assert 'id="settings"' not in text and 'id="metrics"' not in text
    with Farm(served[0], token=TOKENS[role]) as farm, pytest.raises(EtfarmError) as refused:
        farm.server_status()
    assert refused.value.reason == "PERMISSION_DENIED"


def test_a_server_that_does_not_measure_itself_says_how_it_would(web: WebFarm) -> None:
    visit = Visit(web.url)
    visit.sign_in(web.tokens["admin"])
    text = visit.get("/server").text
    assert "does not measure itself" in text
    assert 'id="settings"' in text
