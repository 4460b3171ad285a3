"""The jail refuses to go on with a network, whatever unshare said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etfarm.server.workers import jail
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers

ROOT = Path(__file__).resolve().parents[2]


def test_a_process_in_the_daemons_network_is_refused() -> None:
    with pytest.raises(jail.NetworkNotRemoved, match="daemon's network namespace"):
        jail.check_network(jail.network_namespace())


def test_another_namespace_with_a_network_is_refused() -> None:
    # This test's own namespace has a loopback that is up: like a namespace that somebody else set up.
    with pytest.raises(jail.NetworkNotRemoved, match="interface"):
        jail.check_network(0)


def test_the_environment_carries_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", "s3cret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    environment = jail.clean_environment(tmp_path)
    assert "s3cret" not in environment.values()
    assert environment["TMPDIR"] == environment["HOME"] == str(tmp_path)


async def test_a_child_whose_network_stays_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PYTHONPATH reaches the forkserver: a module that makes unshare a no-op stands in for a kernel that forbids it.
    (tmp_path / "no_unshare.py").write_text("from etfarm.server.workers import jail\njail._remove_network = lambda: None\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    pool = Workers(preload=["no_unshare"], limits=Limits(), folder=tmp_path / "jobs", concurrency=1)
    pool.start()
    events: list[bytes] = []
    with pytest.raises(Exception, match="network") as caught:
        await pool.run("tests.support.worker_tasks:echo", None, deadline_s=20, on_event=events.append)
    assert getattr(caught.value, "reason", "") == "NETWORK_NOT_REMOVED"
    assert not events
    await asyncio.wait_for(pool.stop(), 5)
