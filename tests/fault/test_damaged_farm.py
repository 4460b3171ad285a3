"""`etfarm serve` with a damaged database exits with an error and a remedy, at start or on detection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from etfarm.v1 import artifact_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.wire import status
from etfarm.wire.channel import Access, open_channel
from tests.support.credentials import ADMIN
from tests.support.farm import Daemon, FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="starts a server for each damage")

ACTS_AS = ADMIN


def damage_artifacts(path: Path, change: Callable[[bytes], bytes] = lambda page: bytes(len(page))) -> None:
    """Change the root page of a table, to zeros if not in another manner."""
    connection = sqlite3.connect(path)
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'artifacts'").fetchone()[0]
    size = connection.execute("PRAGMA page_size").fetchone()[0]
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        page = file.read(size)
        file.seek((root - 1) * size)
        file.write(change(page))


def flip_header(page: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in page[:12]) + page[12:]


@pytest.mark.parametrize("damage", ["zeroed", "flipped", "garbage", "directory"])
def test_a_server_does_not_start_over_a_damaged_database(tmp_path: Path, damage: str) -> None:
    farm = FarmProcess(tmp_path, bundle=False)
    path = tmp_path / "server" / "farm.sqlite"
    if damage == "directory":
        path.mkdir(parents=True)
    elif damage == "garbage":
        path.parent.mkdir()
        path.write_bytes(b"no database\n" * 1000)
    else:
        farm.restart()
        farm.stop()
        damage_artifacts(path, *([flip_header] if damage == "flipped" else []))
    done = etfarm(
        "serve", "--listen", "127.0.0.1:0", "--data", str(path.parent), "--no-bundle", "--exit-with-stdin", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "listening" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("etfarm")]
    assert str(path) in line and "aside" in line
    assert damage == "directory" or f"etfarm restore BACKUP --data {path.parent}" in line


def test_a_server_does_not_begin_empty_beside_the_artifacts_of_a_lost_database(tmp_path: Path) -> None:
    farm = FarmProcess(tmp_path, bundle=False)
    data, backup = tmp_path / "server", tmp_path / "backup"
    farm.restart()
    (tmp_path / "file").write_bytes(b"a model")
    done = etfarm("artifacts", "put", str(tmp_path / "file"), "--server", farm.address, cwd=tmp_path)
    digest = done.stdout.strip()
    farm.stop()
    assert etfarm("backup", str(backup), "--data", str(data), cwd=tmp_path).returncode == 0
    for path in data.glob("farm.sqlite*"):
        path.unlink()
    serve = ("serve", "--listen", "127.0.0.1:0", "--data", str(data), "--no-bundle", "--no-prewarm", "--exit-with-stdin")
    for command in (serve, (*serve, "--check"), ("tokens", "init", "ann", "--data", str(data))):
        done = etfarm(*command, cwd=tmp_path)
        assert done.returncode == 1 and "listening" not in done.stdout
        (line,) = [line for line in (done.stderr + done.stdout).splitlines() if "is empty, but" in line]
        assert f"etfarm restore BACKUP --data {data}" in line and "--begin-empty" in line
        assert not (data / "farm.sqlite").exists()
    # The remedies.
    data.rename(tmp_path / "aside")
    assert etfarm("restore", str(backup), "--data", str(data), cwd=tmp_path).returncode == 0
    try:
        farm.restart()
        with farm.client() as client:
            assert b"".join(client.artifacts.read(digest)) == b"a model"
    finally:
        farm.stop()
    for path in data.glob("farm.sqlite*"):
        path.unlink()
    begun = Daemon([*serve, "--begin-empty"], tmp_path / "begun.log")
    begun.start()
    assert begun.stop() == 0
    try:
        farm.restart()
        with farm.client() as client:
            assert client.collect().count == 0
    finally:
        farm.stop()
    assert (data / "artifacts" / "blobs" / digest[:2] / digest).read_bytes() == b"a model"


def test_a_server_reports_a_damaged_database_and_exits(tmp_path: Path) -> None:
    with FarmProcess(tmp_path, bundle=False) as farm:
        farm.restart()
        path = tmp_path / "server" / "farm.sqlite"
        connection = sqlite3.connect(path)
        rows = [(f"{number:064x}", 1, "ann", "2025-01-02 03:04:05") for number in range(3000)]
        connection.executemany("INSERT INTO artifacts VALUES (?, ?, ?, ?)", rows)
        connection.executemany("INSERT INTO holdings VALUES ('default', ?, 'ann', ?)", [(row[0], row[3]) for row in rows])
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        damage_artifacts(path)

        async def ask() -> grpc.aio.AioRpcError:
            async with open_channel(Access.of(farm.address)) as channel:
                stub = ArtifactServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.List(artifact_pb2.ListArtifactsRequest())
                return failed.value

        error = status.from_rpc_error(asyncio.run(ask()), server=farm.address)
        assert (error.reason, error.fault) == ("DATABASE_DAMAGED", "FARM")
        assert farm.server is not None and farm.server.process is not None
        assert farm.server.process.wait(60) == 1
        log = farm.server.log.read_text()
        assert "Traceback" not in log
        assert "is damaged" in log.splitlines()[-1] and "etfarm restore" in log.splitlines()[-1]
