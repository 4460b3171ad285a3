"""`etfarm serve`: what its options become, and that values which mean nothing are refused."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import fields
from pathlib import Path

import pytest

from etfarm.server import preflight
from etfarm.server.arguments import config_of, parser
from etfarm.server.config import Config
from etfarm.server.operation import web_page
from etfarm.server.reports.latency.thresholds import Thresholds
from tests.support.refusals import refuses


def config(*arguments: str) -> Config:
    return config_of(parser().parse_args(list(arguments)))


def test_limits_of_compilations_are_options() -> None:
    created = config(
        "--workers", "3", "--threads", "2", "--memory-gib", "4", "--cpu-limit", "90", "--compile-timeout", "100",
        "--stage-timeout", "50.5", "--analysis-timeout", "20",
    )  # fmt: skip
    assert (created.workers, created.threads, created.memory_bytes, created.cpu_s) == (3, 2, 4 << 30, 90)
    assert (created.compile_deadline_s, created.stage_deadline_s, created.analysis_deadline_s) == (100.0, 50.5, 20.0)


@pytest.mark.parametrize(("mib", "reserve_mib"), [("8", 8), ("256", 128)])
def test_children_run_while_results_may_use_the_disk(mib: str, reserve_mib: int) -> None:
    assert preflight.reserve_bytes(config("--keep-free-mib", mib)) == reserve_mib << 20


def test_an_option_that_is_left_out_is_what_the_configuration_says() -> None:
    created = config()
    defaults = {field.name: field.default for field in fields(Config)}
    for name in (
        "workers",
        "memory_bytes",
        "cpu_s",
        "compile_deadline_s",
        "stage_deadline_s",
        "analysis_deadline_s",
        "patience_s",
    ):
        assert getattr(created, name) == defaults[name]


@pytest.mark.parametrize("option", ["--compile-timeout", "--stage-timeout", "--analysis-timeout", "--cpu-limit", "--workers"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_an_invalid_limit_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config(option, value)
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_thresholds_of_a_verdict_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("max_drift = 0.25\n")
    assert config("--thresholds", str(tmp_path / "mine.toml")).thresholds == Thresholds(max_drift=0.25)
    assert config().thresholds == Thresholds()
    with refuses("BAD_THRESHOLDS", match="cannot be read"):
        config("--thresholds", str(tmp_path / "none.toml"))


def test_the_help_names_the_folder_that_would_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "100%"))
    assert f"(default: {tmp_path}/100%/server)" in parser().format_help()
    assert config().data == tmp_path / "100%" / "server"
    monkeypatch.delenv("ETFARM_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert f"(default: {tmp_path}/etfarm/server)" in parser().format_help()
    assert config().data == tmp_path / "etfarm" / "server"


def test_the_page_is_started_with_what_reaches_this_server(tmp_path: Path) -> None:
    assert config().web is None
    tls = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    local = config("--web", "127.0.0.1:80", *tls, "--web-public-url", "https://farm.example/etfarm")
    assert web_page.arguments(local, web_page.reachable("0.0.0.0:7433"), 7, "/proc/self/fd/8", "/proc/self/fd/9") == [
        "web", "--server", "127.0.0.1:7433", "--listen", "127.0.0.1:80", "--listen-fd", "7", "--exit-with-stdin",
        "--key-from-stdin", "--tls-ca", "/proc/self/fd/8", "--public-url", "https://farm.example/etfarm",
    ]  # fmt: skip
    exposed = web_page.arguments(
        config("--web", "0.0.0.0:443", *tls), "farm.example:7433", 7, "/proc/self/fd/8", "/proc/self/fd/9"
    )
    assert exposed[2] == "farm.example:7433"
    assert exposed[-4:] == ["--tls-cert", "/proc/self/fd/8", "--tls-key", "/proc/self/fd/9"]


def test_a_server_that_is_to_end_does_not_wait_for_a_database_that_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"postgresql://farm@127.0.0.1:{silent.getsockname()[1]}/farm"
        created = config("--data", str(tmp_path), "--database", url, "--database-wait", "300")

        async def begin_and_end() -> None:
            looking = asyncio.create_task(preflight.require_database(created))
            await asyncio.get_running_loop().sock_accept(silent)
            looking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await looking

        began_s = time.monotonic()
        asyncio.run(begin_and_end())
        assert time.monotonic() - began_s < 150
