"""The systemd unit of a server: what systemd itself makes of it, and that it is hardened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from etfarm.server.main import main
from etfarm.server.operation.unit import unit

PROGRAM = ["/usr/bin/env"]
EXPOSURE = 50
"""systemd's score, 0 to 100; a unit without any protection has 96."""


def systemd_on(text: str, folder: Path) -> str:
    """Return what systemd reads in a unit, in its own words; fail with its complaints."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    path = folder / "etfarm-server.service"
    path.write_text(text)
    plain = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "", "")
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    )  # fmt: skip
    return verified.stdout


def settings_of(dump: str, name: str) -> list[str]:
    return re.findall(rf"^\s*{name}: (.*)$", dump, re.MULTILINE)


def test_the_service_waits_for_a_drain_and_may_start_namespaces(tmp_path: Path) -> None:
    dump = systemd_on(unit(["--listen", "h:1", "--check"], program=PROGRAM, environment={}, drain_s=45.5), tmp_path)
    for name, value in (
        ("Restart", "on-failure"), ("KillMode", "mixed"), ("ProtectSystem", "strict"), ("StateDirectory", "etfarm-server"),
        ("TimeoutStopSec", "1min 16s"), ("WatchdogSec", "1min"), ("User", "etfarm"),
        # Parts of /proc that are covered would keep a compilation from mounting its own.
        ("ProtectKernelTunables", "no"), ("ProtectKernelLogs", "no"),
    ):  # fmt: skip
        assert settings_of(dump, name) == [value], name
    (command,) = settings_of(dump, "Command Line")[:1]
    assert command == "/usr/bin/env serve --listen h:1"
    assert settings_of(dump, "Environment") == ["ETFARM_SERVE_DATA=/var/lib/etfarm-server"]


def test_the_unit_is_hardened(tmp_path: Path) -> None:
    path = tmp_path / "etfarm-server.service"
    path.write_text(unit([], program=PROGRAM, environment={}, drain_s=30))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]


def test_the_command_prints_a_unit_with_its_files_and_variables_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETFARM_SERVE_WORKERS", "2")
    (tmp_path / "farm.toml").write_text("drain-timeout = 100\n")
    assert main(["--config", "farm.toml", "--tls-cert", "my cert.pem", "--print-unit"]) == 0
    dump = systemd_on(capsys.readouterr().out, tmp_path)
    assert settings_of(dump, "WorkingDirectory") == [str(tmp_path)]
    assert settings_of(dump, "TimeoutStopSec") == ["2min 10s"]
    assert "ETFARM_SERVE_WORKERS=2" in settings_of(dump, "Environment")
    assert settings_of(dump, "Command Line")[0].endswith('serve --config farm.toml --tls-cert "my cert.pem"')
    assert main(["--data", "here", "--print-unit"]) == 0
    chosen = systemd_on(capsys.readouterr().out, tmp_path)
    assert (settings_of(chosen, "ProtectSystem"), settings_of(chosen, "StateDirectory")) == (["full"], [])
    assert not (tmp_path / "here").exists()
