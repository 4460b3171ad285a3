"""The version of etfarm that an uploaded wheel has."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.wheel_check import NotAWheel, read_version
from etfarm.server.devices.wheels import AgentWheel
from etfarm.server.state.engine import Database
from etfarm.wire import digest

AGENT = {"etfarm/device_agents/main.py": ""}
INFO = "etfarm-0.3.0.dist-info/METADATA"
GOOD = {**AGENT, INFO: "Name: etfarm\nVersion: 0.3.0\n"}


def wheel(folder: Path, files: Mapping[str, str] | bytes) -> Path:
    path = folder / "x.whl"
    if isinstance(files, bytes):
        path.write_bytes(files)
        return path
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_the_version_is_that_of_the_metadata(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.4\nName: etfarm\nVersion: 0.3.0\n\nVersion: 9\n"
    assert read_version(wheel(tmp_path, {**AGENT, INFO: metadata})) == "0.3.0"


@pytest.mark.remedy("NOT_A_WHEEL")
@pytest.mark.parametrize(
    "files",
    [
        b"PK\x03\x04" + bytes(100),
        {},
        AGENT,
        {INFO: "Name: etfarm\nVersion: 0.3.0\n"},
        {**AGENT, INFO: "Name: other\nVersion: 0.3.0\n"},
        {**AGENT, INFO: "Name: etfarm\nVersion: ../0.3.0\n"},
        {**AGENT, INFO: "Name: etfarm\n"},
        {**GOOD, "etfarm-0.4.0.dist-info/METADATA": "Name: etfarm\nVersion: 0.4.0\n"},
    ],
)
def test_another_file_is_refused(tmp_path: Path, files: dict[str, str] | bytes) -> None:
    with pytest.raises(NotAWheel):
        read_version(wheel(tmp_path, files))
    assert read_version(wheel(tmp_path, GOOD)) == "0.3.0"


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_compression_is_refused(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(INFO, "Name: etfarm\nVersion: 0.3.0\n" * 50)
        archive.writestr("etfarm/device_agents/main.py", "")
    data = bytearray(path.read_bytes())
    begin = data.index(INFO.encode()) + len(INFO)
    data[begin : begin + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(NotAWheel):
        read_version(path)


async def test_the_configured_wheel_is_stored_when_it_is_needed_and_must_be_the_same(tmp_path: Path, database: Database) -> None:
    path = wheel(tmp_path, GOOD)
    configured = AgentWheel.read(path)
    assert configured.version == "0.3.0"
    store = Store(tmp_path, database)
    await configured.put(store, "ann", "default")
    assert store.path(configured.digest).read_bytes() == path.read_bytes()
    path.unlink()
    await configured.put(store, "ann", "default")  # it is stored already
    await store.remove([configured.digest], unused_since_s=float("inf"))
    with pytest.raises(NotAWheel, match="cannot be read any more"):
        await configured.put(store, "ann", "default")
    path.write_bytes(b"another one")
    with pytest.raises(NotAWheel, match="has changed since the server started"):
        await configured.put(store, "ann", "default")
    store.close()


async def test_a_wheel_is_hashed_without_holding_up_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    configured = AgentWheel.read(wheel(tmp_path, GOOD))
    threads = []

    def of_bytes(data: bytes) -> str:
        threads.append(threading.current_thread())
        return hashlib.sha256(data).hexdigest()

    monkeypatch.setattr(digest, "of_bytes", of_bytes)
    store = Store(tmp_path, database)
    await configured.put(store, "ann", "default")
    assert threads and threading.main_thread() not in threads
    store.close()
