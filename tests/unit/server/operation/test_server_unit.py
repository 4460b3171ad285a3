"""The systemd unit of a server: what systemd itself makes of it, and that it is hardened."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from etfarm.server.arguments import parser
from etfarm.server.main import main
from etfarm.server.operation.unit import STATE, UNIT_NAME, USER, unit
from etfarm.wire.errors import UserError
from etfarm.wire.systemd import without_options
from tests.support.systemd import settings_of, systemd_on

PROGRAM = ["/usr/bin/env"]
EXPOSURE = 50
"""systemd's score, 0 to 100; a unit without any protection has 96."""


def test_the_service_waits_for_a_drain_and_may_start_namespaces(tmp_path: Path) -> None:
    arguments = without_options(["--listen", "h:1", "--check"], parser())
    dump = systemd_on(unit(arguments, program=PROGRAM, environment={}, drain_s=45.5), tmp_path)
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


ENVIRONMENT = {
    "PGPASSFILE": "/etc/etfarm/pgpass", "PGPASSWORD": "secret-1", "AWS_ENDPOINT_URL": "https://s3.example",
    "AWS_ACCESS_KEY_ID": "secret-2", "AWS_SECRET_ACCESS_KEY": "secret-3", "AWS_PROFILE": "mine",
    "RAY_AUTH_TOKEN_PATH": "/etc/etfarm/ray-token", "RAY_AUTH_TOKEN": "secret-4", "RAY_USE_TLS": "1",
    "ETFARM_SERVE_DATABASE": "postgresql://etfarm:secret-5@db/farm", "ETFARM_SERVE_WEBHOOK": "https://hooks.example/secret-6",
    "ETFARM_SERVE_TOKENS": "/etc/etfarm/tokens",
}  # fmt: skip
"""What a user's shell may have, for each engine."""
SCALED = ["--blobs", "s3://farm/a", "--compile-pool", "ray://head:10001"]


def test_the_unit_names_what_the_engines_read_and_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main([*SCALED, "--print-unit"]) == 0
    text = capsys.readouterr().out
    assert "secret-" not in text
    dump = systemd_on(text, tmp_path)
    shown = settings_of(dump, "Environment")
    for name in ("PGPASSFILE", "AWS_ENDPOINT_URL", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "ETFARM_SERVE_TOKENS"):
        assert f"{name}={ENVIRONMENT[name]}" in shown
    assert not any(each.startswith("AWS_PROFILE=") for each in shown), "nothing reads it"
    assert settings_of(dump, "EnvironmentFile") == ["/etc/etfarm/server.env"]
    step = next(line for line in text.splitlines() if "install -D -m 600" in line)
    assert "sudo test -e /etc/etfarm/server.env || " in step, "the step must not empty a file that is there"
    secrets = next(line for line in text.splitlines() if "NAME=VALUE" in line)
    for name in ("PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "ETFARM_SERVE_DATABASE",
                 "ETFARM_SERVE_WEBHOOK"):  # fmt: skip
        assert re.search(rf"\b{name}\b", secrets), name
    assert "etfarm must be able to read the files that PGPASSFILE RAY_AUTH_TOKEN_PATH name" in text


def test_the_variables_of_engines_that_a_server_does_not_use_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in ENVIRONMENT.items():
        if not name.startswith("ETFARM"):
            monkeypatch.setenv(name, value)
    assert main(["--print-unit"]) == 0
    text = capsys.readouterr().out
    assert "EnvironmentFile" not in text and not any(name in text for name in ENVIRONMENT)
    assert main(["--blobs", "s3://farm/a", "--blobs-credentials", "/etc/etfarm/s3", "--print-unit"]) == 0
    text = capsys.readouterr().out
    assert "AWS_ENDPOINT_URL" in text and "AWS_ACCESS_KEY_ID" not in text and "PGPASSFILE" not in text


SECRET_OPTIONS = [
    ("database", "postgresql://etfarm:a-secret@db/farm"),
    ("database", "postgresql://etfarm@db/farm?password=a-secret"),
    ("webhook", "https://hooks.example/services/a-secret"),
    ("otlp", "http://etfarm:a-secret@collector:4318"),
    ("otlp", "https://a-secret@collector.example"),
    ("otlp", "https://collector.example/v1?api_key=a-secret"),
    ("database", "postgresql://db/farm?user=x&pass%77ord=a-secret"),
    ("blobs-endpoint", "https://key:a-secret@s3.example"),
    ("compile-pool", "ray://user:a-secret@head:10001"),
]


@pytest.mark.parametrize(("option", "url"), SECRET_OPTIONS)
def test_a_secret_in_the_configuration_file_is_no_obstacle_and_one_in_the_arguments_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, url: str
) -> None:
    (tmp_path / "farm.toml").write_text(f"{option} = {[url] if option == 'webhook' else url!r}\n")
    (tmp_path / "farm.toml").chmod(0o600)
    assert main(["--config", str(tmp_path / "farm.toml"), "--print-unit"]) == 0
    assert "a-secret" not in capsys.readouterr().out
    with pytest.raises(UserError, match=f"would show the secret in --{option}") as refusal:
        main([f"--{option}", url, "--print-unit"])
    assert f"{option} = " in refusal.value.remedy and "a-secret" not in str(refusal.value)


def test_a_collector_and_a_database_without_a_password_may_be_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--otlp", "http://collector:4318", "--database", "postgresql://etfarm@db/farm", "--print-unit"]) == 0
    assert "--otlp http://collector:4318" in capsys.readouterr().out


def test_the_page_of_a_second_server_sets_up_the_user_and_the_folder_of_the_unit() -> None:
    page = (Path(__file__).parents[4] / "docs" / "second-server.md").read_text()
    first = page.partition("## 4.")[2].partition("## 6.")[0]
    assert re.findall(r"^useradd .*", first, re.MULTILINE) == [
        f"useradd --system --home-dir /var/lib/{STATE} --shell /usr/sbin/nologin {USER}"
    ]
    assert f"install -d -m 700 -o {USER} -g {USER} /var/lib/{STATE}\n" in first
    (settings,) = re.findall(r'^settings="(.*)"$', first, re.MULTILINE)
    assert settings.endswith(f" --data /var/lib/{STATE}")
    as_service = re.findall(r"^runuser -u (\S+) -- etfarm (\w+).* \$settings\b", page, re.MULTILINE)
    assert as_service == [(USER, command) for command in ("tokens", "serve", "backup", "restore")]
    assert len(re.findall("runuser", page)) == len(as_service)
    owners = re.findall(r"(?:chown |install [^\n]*-[og] )(\w+)", first)
    assert set(owners) == {USER}
    assert set(re.findall(r"systemctl (?:[a-z]+ )(?:--now |-s KILL )?(etfarm\S*?)(?:`|\s)", page)) == {UNIT_NAME}
    assert f"/etc/systemd/system/{UNIT_NAME}.service\n" in first


def test_the_page_of_a_second_server_stops_the_servers_before_their_last_backup() -> None:
    page = (Path(__file__).parents[4] / "docs" / "second-server.md").read_text()
    move = page.partition("## 8.")[2]
    assert -1 < move.find(f"systemctl disable --now {UNIT_NAME}") < move.find("etfarm backup ") < move.find("etfarm restore ")
