"""The runner of local sessions: that of the user's embedded farm, or one that is built once."""

from __future__ import annotations

import asyncio
import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from etfarm.client.embedded.lease import Place
from etfarm.client.sessions import local
from etfarm.device_agents.daemon import local_bundle, serve_local
from etfarm.device_agents.native.build import source_digest
from etfarm.device_agents.runners.bundle import unpack
from etfarm.v1 import session_pb2
from etfarm.wire import digest
from etfarm.wire.bundles import MANIFEST_NAME, BundledFile, BundleManifest
from etfarm.wire.names import DATA_VARIABLE, embedded_farm_folder
from tests.support.runner import runner_archive


def keep(data: Path, name: str, *, arch: str = platform.machine(), executorch: str = "1.5.1", sources: str = "s") -> Path:
    """Put a runner into the cache of the embedded farm's agent, and return its archive."""
    cache = data / "agent" / "cache"
    folder, archive = cache / "bundles" / name, cache / "blobs" / name
    folder.mkdir(parents=True)
    archive.parent.mkdir(exist_ok=True)
    archive.write_bytes(b"archive")
    files = {"runner": BundledFile("0" * 64, 1)}
    manifest = BundleManifest(arch, executorch, sources, (), (), files, "runner", "runner")
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()))
    return archive


def test_only_a_runner_of_this_machine_version_and_sources_is_taken(tmp_path: Path) -> None:
    assert local_bundle.find_farm_runner(tmp_path, "1.5.1", "s") is None
    keep(tmp_path, "a", arch="riscv64")
    keep(tmp_path, "b", executorch="1.4.0")
    keep(tmp_path, "c", sources="older")
    keep(tmp_path, "d").unlink()
    (tmp_path / "agent/cache/bundles/e").mkdir()
    (tmp_path / "agent/cache/bundles/e" / MANIFEST_NAME).write_text("{")
    assert local_bundle.find_farm_runner(tmp_path, "1.5.1", "s") is None
    assert local_bundle.find_farm_runner(tmp_path, "1.5.1+cpu", "s") is None
    archive = keep(tmp_path, "f")
    assert local_bundle.find_farm_runner(tmp_path, "1.5.1+cpu", "s") == archive


async def test_the_farms_runner_needs_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    built = runner_archive()
    name = digest.of_file(built)
    farm = embedded_farm_folder()
    assert farm == Place.of_user().data, "where embedded farms are"
    cache = farm / "agent" / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / name).write_bytes(built.read_bytes())
    unpack(built, cache / "bundles" / name)
    builds: list[str] = []
    bundle = await local_bundle.local_bundle(lambda: builds.append("built"))
    assert builds == []
    assert bundle.folder.is_relative_to(tmp_path / "local")
    assert bundle.manifest.source_digest == source_digest()
    assert bundle.manifest.executorch == version("executorch").partition("+")[0]


async def test_a_prebuilt_runner_needs_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = runner_archive()
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_bundle, "prebuilt_runner", lambda: archive)
    bundle = await local_bundle.local_bundle(lambda: pytest.fail("nothing is built"))
    assert bundle.folder.is_relative_to(tmp_path / "local") and bundle.manifest.source_digest == source_digest()


async def test_another_prebuilt_runner_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_bundle, "prebuilt_runner", runner_archive)
    assert local_bundle.find_prebuilt_runner(version("executorch"), "of other sources") is None
    (tmp_path / "bundle.tar.xz").write_bytes(b"no archive")
    monkeypatch.setattr(local_bundle, "prebuilt_runner", lambda: tmp_path / "bundle.tar.xz")
    assert local_bundle.find_prebuilt_runner(version("executorch"), source_digest()) is None


def test_a_build_is_reported_without_a_follower(capsys: pytest.CaptureFixture[str]) -> None:
    local._report_build("preparing the runner for this machine")
    assert capsys.readouterr().err == ""
    local._report_build(serve_local.BUILDING)
    assert capsys.readouterr().err == f"etfarm: {serve_local.BUILDING}\n"
    local._report_build(f"{serve_local.FALLBACK}: there is no compiler.")
    assert capsys.readouterr().err == f"etfarm: {serve_local.FALLBACK}: there is no compiler.\n"


async def test_no_build_is_announced_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    builds: list[str] = []
    with pytest.raises(local_bundle.RunnerUnbuilt, match=r"needs the compiler .*, which is not installed\. Install it"):
        await local_bundle.local_bundle(lambda: builds.append("built"))
    assert builds == []


async def test_a_generation_that_was_withdrawn_before_its_turn_is_not_started() -> None:
    class Program:
        """Counts its calls; the first one takes until `done`."""

        def __init__(self) -> None:
            self.done = asyncio.Event()
            self.calls = 0

        async def answer(self, *_: object) -> tuple[session_pb2.SessionAnswer, None]:
            self.calls += 1
            await self.done.wait()
            return session_pb2.SessionAnswer(), None

    session, program, stop = serve_local._LocalSession("s"), Program(), asyncio.Event()
    session.program = program  # type: ignore[assignment]
    first = asyncio.create_task(session.answer(session_pb2.SessionTask(), None, asyncio.Event()))
    withdrawn = asyncio.create_task(session.answer(session_pb2.SessionTask(), None, stop))
    await asyncio.sleep(0)
    stop.set()
    program.done.set()
    await asyncio.gather(first, withdrawn)
    assert program.calls == 1
    await session.answer(session_pb2.SessionTask())
    assert program.calls == 2
