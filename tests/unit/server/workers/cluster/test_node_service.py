"""A node's service: its folder, the errors of its calls, and children that no server asks for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

from etfarm.server.workers.cluster import node as nodes
from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.node import NodeService, RelayedChild
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, FarmError
from tests.support.waiting import becomes

PROCESSES, FOLDERS = 3, 60
CREATE = f"""
import tempfile
from etfarm.server.workers.cluster import node
created = [node._create_folder() for _ in range({FOLDERS})]
print(all(folder.is_dir() for folder in created))
"""


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NodeService]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = {"preload": [], "limits": asdict(Limits()), "concurrency": 1, "required": False}
    yield NodeService(json.dumps(settings).encode())


async def call(service: NodeService, method: str, **arguments: object) -> bytes:
    return relay_frames.decode_answer(await service.call(method, json.dumps(arguments).encode(), b""))


def test_processes_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    """Each deletes the folders of processes that have ended, and none that another one has just created."""
    variables = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    starting = [
        subprocess.Popen([sys.executable, "-c", CREATE], env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in starting] == ["True"] * PROCESSES
    (base,) = tmp_path.iterdir()
    assert nodes._lock(base / "of nobody") is None


def test_the_folder_of_a_process_that_has_ended_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = nodes._create_folder().with_name("node-old")
    old.mkdir()
    (old / "file").touch()
    assert nodes._create_folder().is_dir()
    assert not old.exists()


async def test_an_exception_in_a_call_is_answered_as_a_defect_with_its_traceback(service: NodeService) -> None:
    with pytest.raises(FarmError, match="'read' of a compile node failed inside of etfarm: KeyError") as raised:
        await call(service, "read")
    assert raised.value.reason == "INTERNAL"
    assert "in _child" in raised.value.metadata["traceback"]


async def test_a_child_whose_relay_fails_ends_with_the_error(service: NodeService) -> None:
    """Not with a silence until its deadline."""
    await call(service, "open", child="a", task="t", files={})
    (service._folder / "children").mkdir()  # as the start of the pool does, which is missing
    await call(service, "begin", child="a", files=[])
    with pytest.raises(EtfarmError) as raised:
        async with asyncio.timeout(30):
            while True:
                await call(service, "poll", child="a")
    assert raised.value.reason == "WORKERS_DOWN"


async def test_an_error_in_the_end_of_one_child_keeps_no_other_alive(
    service: NodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LEASE_S", 0.3)

    end = RelayedChild.end

    async def fail_once(child: RelayedChild) -> None:
        monkeypatch.setattr(RelayedChild, "end", end)
        raise OSError("the folder cannot be deleted")

    monkeypatch.setattr(RelayedChild, "end", fail_once)
    for child in ("a", "b"):
        await call(service, "open", child=child, task="t", files={})
    watch = asyncio.create_task(service._end_abandoned())
    try:
        await becomes(lambda: not service._children)
        assert not watch.done(), "the error has ended the check"
    finally:
        watch.cancel()
