"""The jail refuses to go on with a network, whatever unshare said."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.server.workers.jail import isolation
from etfarm.wire.sandbox import namespaces
from tests.support.refusals import refuses
from tests.support.worker_pools import worker_pool

ROOT = Path(__file__).resolve().parents[5]

AS_ANOTHER_USER = """
import ctypes, os, pathlib
from etfarm.server.workers.jail import isolation
from etfarm.wire.sandbox import namespaces, syscalls

network = namespaces.network_inode()
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is a daemon's own, as it is a login's
isolation._remove_network()
isolation.check_network(network)
syscalls.drop_capabilities()
status = pathlib.Path("/proc/self/status").read_text()
print(status.partition("CapEff:")[2].split()[0], os.geteuid())
"""


def test_a_process_in_the_daemons_network_is_refused() -> None:
    with refuses("NETWORK_NOT_REMOVED", match="daemon's network namespace"):
        isolation.check_network(namespaces.network_inode())


def test_another_namespace_with_a_network_is_refused() -> None:
    # This test's own namespace has a loopback that is up: like a namespace that somebody else set up.
    with refuses("NETWORK_NOT_REMOVED", match="interface"):
        isolation.check_network(0)


def test_the_environment_carries_no_secret_and_the_processor_that_torch_computes_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", "s3cret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    environment = isolation.clean_environment(tmp_path)
    assert "s3cret" not in environment.values()
    assert environment["ATEN_CPU_CAPABILITY"] == "default"
    assert environment["TMPDIR"] == environment["HOME"] == str(tmp_path)


@pytest.mark.remedy("NETWORK_NOT_REMOVED")
async def test_a_child_whose_network_stays_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PYTHONPATH reaches the forkserver: a module that makes unshare a no-op stands in for a kernel that forbids it.
    (tmp_path / "no_unshare.py").write_text(
        "from etfarm.server.workers.jail import isolation\nisolation._remove_network = lambda: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    events: list[bytes] = []
    async with asyncio.timeout(120), worker_pool(tmp_path, preload=["no_unshare"]) as pool:
        with pytest.raises(Exception, match="network") as caught:
            await pool.run("tests.support.worker_tasks:echo", None, deadline_s=60, on_event=events.append)
        assert getattr(caught.value, "reason", "") == "NETWORK_NOT_REMOVED"
        assert not events
    # A kernel that allows it.
    async with (
        asyncio.timeout(120),
        worker_pool(tmp_path / "again") as pool,
        await pool.run("tests.support.worker_tasks:echo", None, deadline_s=60) as finished,
    ):
        assert finished.result is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try it as one")
def test_another_user_than_root_loses_network_and_capabilities_too() -> None:
    # A process of its own: in a fork of this one, libraries that are loaded here may start threads again, and unshare refuses.
    done = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["0000000000000000", "65534"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its children other users")
async def test_code_that_only_root_reads_costs_the_user_and_not_the_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir(mode=0o700)
    (site / "mine_alone.py").write_text("def task(request, folder, emit):\n    return b'imported'\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{site}")
    async with asyncio.timeout(120), worker_pool(tmp_path) as pool:
        async with await pool.run("mine_alone:task", None, deadline_s=60) as finished:
            assert finished.result == b"imported"
        (missing,) = (await pool.describe_jail()).missing
        assert missing.name == "user"
        assert str(site) in missing.detail


HOME_TASK = """
import os, pathlib

def task(request, folder, emit):
    (folder / "mine").write_text("kept")
    outcomes = [request["artifact"].read_text(), (folder / "mine").read_text()]
    for name in request["others"]:
        try:
            outcomes.append(str(os.listdir(name) if os.path.isdir(name) else pathlib.Path(name).read_text()))
        except OSError as error:
            outcomes.append(type(error).__name__)
    return "|".join(outcomes).encode()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its children other users")
async def test_a_path_of_the_code_above_the_farms_data_takes_no_rights_and_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with PYTHONPATH=$HOME: the farm's data lies below a closed folder of it, beside folders of others."""
    home = tmp_path / "home"
    data, neighbour, other = home / "closed" / "data", home / "closed" / "neighbour", home / "other"
    for path in (data / "jobs" / "job-of-another", neighbour, other):
        path.mkdir(parents=True)
        (path / "secret").write_text("s3cret")
    (home / "closed").chmod(0o700)
    other.chmod(0o700)
    (home / "reads_files.py").write_text(HOME_TASK)
    (data / "artifact").write_text("stored")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{home}")
    others = [
        data / "jobs",
        data / "jobs" / "job-of-another" / "secret",
        neighbour,
        neighbour / "secret",
        other,
        other / "secret",
    ]
    request = {"artifact": data / "artifact", "others": [str(path) for path in others]}
    options = isolation.JailOptions(hidden=(data,))
    async with asyncio.timeout(120), worker_pool(data, options=options) as pool:
        async with await pool.run("reads_files:task", request, deadline_s=60) as finished:
            outcomes = (finished.result or b"").decode().split("|")
        assert not (await pool.describe_jail()).missing
    assert outcomes[:2] == ["stored", "kept"]
    jobs, *rest = outcomes[2:]
    assert "job-of-another" not in jobs and jobs.count("job-") <= 1, jobs  # its own folder alone
    assert rest == ["FileNotFoundError", "FileNotFoundError", "FileNotFoundError", "PermissionError", "PermissionError"]
