"""`etfarm serve` on a host that lacks a measure of the jail: its report, and when it refuses to start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.server.arguments import config_of, parser
from etfarm.server.workers.jail.measures import NAMES
from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="starts a server for each measure of the jail")

ROOT = Path(__file__).resolve().parents[2]

RESTRICTED = """
import errno, sys
from etfarm.wire.sandbox import seccomp, syscalls
syscalls.forbid_new_privileges()
seccomp.install(seccomp.Policy(dict.fromkeys(sys.argv[1].split(","), errno.EPERM)))
from etfarm.wire.command import main
sys.exit(main(["serve", *sys.argv[2:]]))
"""
"""A host that refuses these system calls, as container runtimes do."""


def serve(refused: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RESTRICTED, refused, *arguments]
    environment = {**os.environ, "COLUMNS": "300"}
    # No input: a server that starts all the same ends at once.
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment, stdin=subprocess.DEVNULL
    )


def measures(output: str) -> dict[str, bool]:
    """Return the jail's lines in the output of --check."""
    lines = output.partition("jail of compile processes\n")[2].splitlines()
    return {name: line[25:].startswith("active") for name in NAMES for line in lines if line[2:24].strip() == name}


@pytest.mark.parametrize(("refused", "missing"), [("bpf", set()), ("mount", {"mounts"}), ("mount_setattr", {"mounts"})])
def test_a_check_names_the_measures_that_the_host_lacks(tmp_path: Path, refused: str, missing: set[str]) -> None:
    checked = serve(refused, "--check", "--data", str(tmp_path / "data"))
    assert {name for name, active in measures(checked.stdout).items() if not active} == missing, checked.stdout + checked.stderr
    assert len(measures(checked.stdout)) == len(NAMES)
    assert checked.returncode == 0
    assert ("warning: " in checked.stdout) is bool(missing)
    assert not (tmp_path / "data").exists()


def test_a_server_does_not_start_without_the_mandatory_measure(tmp_path: Path) -> None:
    checked = serve("unshare", "--check", "--no-require-jail", "--data", str(tmp_path / "data"))
    assert measures(checked.stdout) == dict.fromkeys(NAMES, False)
    assert checked.returncode == 1
    assert "problem: " in checked.stdout


@pytest.mark.remedy("JAIL_INCOMPLETE")
def test_an_incomplete_required_jail_is_fatal(tmp_path: Path) -> None:
    arguments = ["--require-jail", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data")]
    ended = serve("mount", "--no-bundle", "--exit-with-stdin", *arguments)
    assert ended.returncode == 1
    assert "mounts" in ended.stderr
    assert "--no-require-jail" in ended.stderr
    assert "listening" not in ended.stdout
    started = serve("bpf", "--no-bundle", "--exit-with-stdin", *arguments)  # a host with all measures
    assert started.returncode == 0 and "listening on 127.0.0.1:" in started.stdout


@pytest.mark.parametrize("arguments", [["--require-jail"], ["--insecure", "--listen", "0.0.0.0:0"]])
def test_a_check_fails_where_the_jail_is_required_and_incomplete(tmp_path: Path, arguments: list[str]) -> None:
    checked = serve("mount", "--check", "--data", str(tmp_path / "data"), *arguments)
    assert checked.returncode == 1
    assert "problem: " in checked.stdout


def test_on_loopback_a_missing_measure_is_a_warning(tmp_path: Path) -> None:
    started = serve("mount", "--data", str(tmp_path / "data"), "--no-bundle", "--exit-with-stdin", "--listen", "127.0.0.1:0")
    assert started.returncode == 0
    assert "listening on 127.0.0.1:" in started.stdout


@pytest.mark.parametrize(
    ("arguments", "required"),
    [
        (["--listen", "127.0.0.1:0"], False),
        (["--listen", "unix:/run/farm"], False),
        (["--listen", "0.0.0.0:7433"], True),
        (["--listen", "0.0.0.0:7433", "--no-require-jail"], False),
        (["--listen", "[::1]:7433", "--require-jail"], True),
    ],
)
def test_the_jail_is_required_where_other_machines_connect(arguments: list[str], required: bool) -> None:
    assert config_of(parser().parse_args(arguments)).is_jail_required is required


async def test_a_running_server_reports_its_jail_to_admins(tmp_path: Path) -> None:
    with FarmProcess(tmp_path, bundle=False, executes=True) as farm:
        farm.start(agents=0)
        async with open_channel(Access(farm.address)) as channel:
            stub = farm_pb2_grpc.FarmServiceStub(channel)
            async with asyncio.timeout(60):
                while not (info := await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())).jail:
                    pass  # it looks at its jail while it starts, which takes about a second
        assert [measure.name for measure in info.jail] == list(NAMES)
        assert all(measure.active and measure.detail for measure in info.jail)
