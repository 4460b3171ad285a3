"""What a power cut leaves in an agent's data folder: files that are empty, cut short, full of zeros or not there at all. The
agent trusts none of them, starts, and works; and what it has said to be written is there."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.device_agents.daemon.result_outbox import ResultOutbox
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.wire import tensors
from etfarm.wire.atomic_write import write_atomically
from tests.support.agent import Connection, Launch, Server, launch, server
from tests.support.programs import program
from tests.support.runner import close

pytestmark = pytest.mark.slow(reason="starts an agent for each damage")

__all__ = ["launch", "server"]


def _zeros(path: Path) -> None:
    """Return zeros in place of the content, as in blocks that were allocated but never written."""
    path.write_bytes(bytes(path.stat().st_size))


def _garbage(path: Path) -> None:
    path.write_bytes(random.Random(7).randbytes(path.stat().st_size))


def _hole_in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = bytes(third)
    path.write_bytes(data)


def _never_renamed(path: Path) -> None:
    """The last step of writing it is lost, and what was written is zeros."""
    path.with_name(f"{path.name}.part").write_bytes(bytes(path.stat().st_size))
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: os.truncate(path, 0),
    "cut_short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": _zeros,
    "garbage": _garbage,
    "hole_in_the_middle": _hole_in_the_middle,
    "never_renamed": _never_renamed,
    "gone": Path.unlink,
}


async def _outputs(server: Server, connection: Connection, attempt: str) -> bool:
    """Run a program and require the correct outputs."""
    connection.start(attempt, server.candidate("conv"), deadline_s=60)
    (cell,) = (await connection.result(attempt)).candidates
    assert not cell.HasField("error"), cell.error
    return close(tensors.decode(server.blobs[cell.outputs.digest]), program("conv").expected)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_agent_starts_with_damaged_files_in_its_data_folder(
    server: Server, launch: Launch, tmp_path: Path, damage: str
) -> None:
    data = tmp_path / "agent"
    agent = await launch()
    connection = await server.connected()
    assert await _outputs(server, connection, "a1")
    agent.process.kill()
    await agent.ended()
    (data / "governors.json").write_text('{"/sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave"}')
    shutil.copytree(data / "cache" / "bundles", data / "runs" / "a-run-that-was-cut" / "bundles")
    files = [path for path in sorted(data.rglob("*")) if path.is_file()]
    names = {path.relative_to(data).parts[0] for path in files}
    assert {"agent_id", "cache", "results", "runs", "governors.json", "lock"} <= names
    for path in files:
        DAMAGES[damage](path)
    agent = await launch()
    again = await server.connected()
    # A result that is not whole is none: the server places the run again.
    assert not again.hello.unacknowledged_attempts and not again.hello.active_attempts
    assert again.hello.devices[0].cores == connection.hello.devices[0].cores
    assert await _outputs(server, again, "a2")
    assert not (data / "runs" / "a-run-that-was-cut").exists()
    assert not list(data.glob("results/*.part"))


async def test_a_written_agent_id_persists(server: Server, launch: Launch) -> None:
    agent = await launch()
    first = await server.connected()
    agent.process.kill()  # as early as anybody can know the id
    await agent.ended()
    await launch()
    assert (await server.connected()).hello.agent_id == first.hello.agent_id


async def test_a_complete_result_is_sent_despite_damaged_neighbours(server: Server, launch: Launch, tmp_path: Path) -> None:
    results = ResultOutbox(tmp_path / "agent" / "results")
    kept = agent_pb2.RunResult(attempt_id="whole", device_id="d", error=common_pb2.Error(message="of an earlier life"))
    await results.put(kept)
    (path,) = (tmp_path / "agent" / "results").iterdir()
    for name, data in (
        ("empty.result", b""),
        ("cut.result", path.read_bytes()[:-1]),
        ("bare.pb", kept.SerializeToString()),
        (f"{path.name}.part", b"\0" * 100),
    ):
        path.with_name(name).write_bytes(data)
    path.with_name("folder").mkdir()
    agent = await launch()
    connection = await server.connected()
    assert connection.hello.unacknowledged_attempts == ["whole"]
    assert await connection.result("whole") == kept
    assert agent.log.count("is not a complete result and is deleted") == 4
    assert {each.name for each in path.parent.iterdir()} == {path.name, "folder"}


def test_a_truncated_message_is_not_parsed(tmp_path: Path) -> None:
    results = ResultOutbox(tmp_path)
    whole = agent_pb2.RunResult(
        attempt_id="a", device_id="d", candidates=[agent_pb2.CandidateResult(cell_id=cell) for cell in ("one", "two")]
    )
    asyncio.run(results.put(whole))
    (path,) = tmp_path.iterdir()
    kept = path.read_bytes()
    for length in range(len(kept)):
        path.write_bytes(kept[:length])
        assert not ResultOutbox(tmp_path).waiting
    path.write_bytes(kept)
    assert dict(ResultOutbox(tmp_path).waiting) == {"a": whole}


def test_a_file_is_synced_before_its_rename_and_its_folder_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    synced: list[tuple[Path, bytes]] = []
    fsync = os.fsync

    def observed(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", observed)
    write_atomically(path, b"new", durable=True)
    assert synced == [(tmp_path / "file.part", b"old"), (tmp_path, b"new")]
