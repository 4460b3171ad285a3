"""The systemd unit of an agent: what systemd itself makes of it, and what it must never hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.device_agents.config import default_data_folder
from etfarm.device_agents.daemon.systemd import TOKEN_FILE, unit, unit_of_this
from etfarm.device_agents.main import main
from etfarm.device_agents.runners.child import spawn_here
from etfarm.wire.errors import UserError
from tests.support.systemd import settings_of, systemd_on

PROGRAM = ["/usr/bin/env", "etfarm", "agent"]
ODD = [
    "plain", "two words", "$HOME", "${HOME}", "$$", "50%", "%h", 'a "quoted" word', "it's", "back\\slash", "\\n", "\\", ";", "",
    " ", "new\nline", "tab\t", "\x01\x7f", "#comment", "-", "@", "é→", "[fe80::1]:7070", "K=V W", "'", "a;b", "~", "*",
]  # fmt: skip
"""Words that mean something to systemd, or to a shell."""


def words(line: str) -> list[str]:
    """Return a command line as systemd writes it: words, quoted where it takes that, with C's escapes."""
    result = []
    for quoted, plain in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line):
        result.append(re.sub(r"\\([0-7]{3}|.)", lambda escape: _unescaped(escape.group(1)), plain or quoted))
    return result


def _unescaped(escape: str) -> str:
    return chr(int(escape, 8)) if len(escape) == 3 else {"n": "\n", "t": "\t"}.get(escape, escape)


def test_systemd_starts_the_very_command(tmp_path: Path) -> None:
    folder = tmp_path / "a b%h $x"
    folder.mkdir()
    program = folder / "et farm"
    program.symlink_to("/bin/true")
    dump = systemd_on(unit(ODD, program=[str(program), "agent"]), tmp_path)
    (command,) = settings_of(dump, "Command Line")
    assert words(command) == [str(program), "agent", *ODD]


def test_the_service_is_there_for_good_and_outlives_its_programs(tmp_path: Path) -> None:
    dump = systemd_on(unit(["--server", "farm:7070"], program=PROGRAM), tmp_path)
    for name, value in (
        ("Restart", "always"), ("OOMScoreAdjust", "-500"), ("OOMPolicy", "continue"), ("KillMode", "mixed"),
        ("ProtectSystem", "strict"), ("ProtectKernelTunables", "no"), ("StateDirectory", "etfarm"),
        ("CapabilityBoundingSet", "cap_chown cap_dac_read_search cap_kill cap_setgid cap_setuid cap_setpcap"),
    ):  # fmt: skip
        assert settings_of(dump, name) == [value], name
    assert settings_of(dump, "EnvironmentFile") == [f"-{TOKEN_FILE}"]
    assert re.search(r"^\s*After: network-online\.target", dump, re.MULTILINE)
    # These filter system calls, which costs time in each of them.
    assert not settings_of(dump, "SystemCallFilter") and settings_of(dump, "LockPersonality") == settings_of(
        dump, "ProtectClock"
    ) == ["no"]


def test_without_a_folder_of_its_own_the_agent_works_below_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = systemd_on(unit(["--server", "farm:7070"], program=PROGRAM), tmp_path)
    (setting,) = settings_of(dump, "Environment")
    name, _, value = setting.partition("=")
    monkeypatch.delenv("ETFARM_DATA", raising=False)
    monkeypatch.setenv(name, value)
    # The default, so that the device's id is the machine's, and stays when the agent is installed again.
    assert default_data_folder() == Path("/var/lib/etfarm/agent")


@pytest.mark.parametrize("variables", [{}, {"ETFARM_DATA": "/data/my agent 100%"}])
def test_a_folder_that_was_chosen_stays_writable(variables: dict[str, str], tmp_path: Path) -> None:
    arguments = [] if variables else ["--data", "/data/agent"]
    dump = systemd_on(unit(arguments, program=PROGRAM, environment=variables, own_data=True), tmp_path)
    assert (settings_of(dump, "ProtectSystem"), settings_of(dump, "StateDirectory")) == (["full"], [])
    assert settings_of(dump, "Environment") == [f"{name}={value}" for name, value in variables.items()]


def test_an_agent_of_phones_may_start_adb_where_its_keys_are(tmp_path: Path) -> None:
    values = {"ANDROID_ADB_SERVER_PORT": "5038"}
    dump = systemd_on(unit(["--adb"], program=PROGRAM, environment=values, phones=True), tmp_path)
    assert (settings_of(dump, "ProtectSystem"), settings_of(dump, "ProtectHome"), settings_of(dump, "StateDirectory")) == (
        ["full"],
        ["no"],
        ["etfarm"],
    )
    assert settings_of(dump, "Environment") == ["ANDROID_ADB_SERVER_PORT=5038", "XDG_DATA_HOME=/var/lib"]


def test_the_environment_is_kept_but_for_the_token(tmp_path: Path) -> None:
    values = {"ETFARM_SERVER": "farm:7070", "ETFARM_TLS_CA": "/my certificates/ca.pem", "ETFARM_TOKEN": "s3cret", "OTHER": "x"}
    text = unit(["--name", "pi"], program=PROGRAM, environment=values)
    assert "s3cret" not in text and "OTHER" not in text
    settings = settings_of(systemd_on(text, tmp_path), "Environment")
    assert settings[:2] == ["ETFARM_SERVER=farm:7070", "ETFARM_TLS_CA=/my certificates/ca.pem"]
    assert "ETFARM_SERVER" not in unit(["--server", "other:7070"], program=PROGRAM, environment=values)


@pytest.mark.parametrize("left_out", ["--print-unit", "--print", "--exit-with-stdin", "--exit"])
def test_options_that_are_no_services_are_left_out(left_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", "farm:7070", left_out, "--emulate", "aarch64", "--print-unit"]) == 0
    dump = systemd_on(capsys.readouterr().out, tmp_path)
    assert words(settings_of(dump, "Command Line")[0])[-5:] == ["agent", "--server", "farm:7070", "--emulate", "aarch64"]


def test_the_unit_of_this_process_finds_this_program_and_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "50% here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("ETFARM_DATA", "ETFARM_SERVER", "ETFARM_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    dump = systemd_on(unit_of_this(["--server", "h:1", "--tls-ca", "ca.pem"], {"tls_ca": Path("ca.pem"), "data": None}), tmp_path)
    assert settings_of(dump, "WorkingDirectory") == [str(folder)]
    program, *rest = words(settings_of(dump, "Command Line")[0])
    assert rest[-5:] == ["agent", "--server", "h:1", "--tls-ca", "ca.pem"]
    done = subprocess.run([program, *rest[:-4], "--help"], cwd="/", env={}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: etfarm agent")
    absolute = unit_of_this(["--server", "h:1", "--tls-ca", "/ca.pem"], {"tls_ca": Path("/ca.pem"), "server": "h:1"})
    assert "WorkingDirectory" not in absolute and str(Path(sys.executable).parent) in absolute
    assert "ProtectSystem=strict" in absolute
    chosen = unit_of_this(["--server", "h:1", "--data", "here"], {"data": Path("here")})
    assert f"WorkingDirectory={tmp_path}" in chosen and "ProtectSystem=full" in chosen


def test_the_command_prints_a_unit_and_does_nothing_else(tmp_path: Path) -> None:
    values = ["--server", "farm:7070", "--name", "the pi", "--tls-ca", "ca.pem", "--governor", "keep"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ETFARM_TOKEN": "s3cret"}
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", "agent", *values, "--print-unit"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "s3cret" not in done.stdout and not done.stderr and not list(tmp_path.iterdir())
    dump = systemd_on(done.stdout, tmp_path)
    assert words(settings_of(dump, "Command Line")[0])[-9:] == ["agent", *values]
    assert settings_of(dump, "WorkingDirectory") == [str(tmp_path)]


def test_what_a_unit_cannot_hold_is_refused() -> None:
    with pytest.raises(UserError, match="is not UTF-8") as refused:
        unit(["--name", os.fsdecode(b"\xff")], program=PROGRAM)
    assert str(refused.value).isprintable()


async def test_where_memory_runs_out_the_program_goes_before_the_agent(tmp_path: Path) -> None:
    child = await spawn_here(["/bin/sleep", "60"], tmp_path)
    try:
        score = int(Path(f"/proc/{child.pid}/oom_score_adj").read_text())
        assert score == 800 > int(Path("/proc/self/oom_score_adj").read_text())
    finally:
        child.kill()
        await child.wait()
