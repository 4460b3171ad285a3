"""Runner bundles: which one devices are sent, and what is none."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.bundles import Bundles, run_bundle_build
from etfarm.server.state.engine import Database
from etfarm.wire.bundles import NotABundle
from etfarm.wire.errors import FarmError, Kind
from tests.support.refusals import refuses

PROGRAM = b"a program"
FILES = {"ld.so": {"digest": hashlib.sha256(PROGRAM).hexdigest(), "size": len(PROGRAM)}}
MANIFEST = {
    "schema": "etfarm.bundle/1", "arch": "aarch64", "executorch": "1.5.1", "source_digest": "s",
    "backends": ["XnnpackBackend"], "operators": ["aten::add.out"], "files": FILES, "loader": "ld.so", "entry": "ld.so",
}  # fmt: skip


def archive(manifest: object = MANIFEST, name: str = "bundle.json") -> bytes:
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member_name, data in ((name, text), ("ld.so", PROGRAM)):
            member = tarfile.TarInfo(member_name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


class World:
    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self.database = database
        self.store = Store(folder, database)
        self.bundles = self.new_bundles()

    def new_bundles(
        self, own_arch: str = "x86_64", run_build: Callable[..., Awaitable[str]] | None = None, prebuilt: Path | None = None
    ) -> Bundles:
        return Bundles(self.store, self.database, self.folder, own_arch=own_arch, run_build=run_build, prebuilt=prebuilt)

    async def add(self, **change: object) -> str:
        artifact = await self.store.put(archive(MANIFEST | change), "ann")
        await self.bundles.add(artifact.digest)
        return artifact.digest


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


async def test_an_added_bundle_is_offered_with_what_its_manifest_says(world: World) -> None:
    assert world.bundles.get("aarch64") is None
    digest = await world.add()
    bundle = world.bundles.get("aarch64")
    assert bundle is not None
    assert (bundle.artifact.digest, bundle.executorch_version, bundle.source_digest) == (digest, "1.5.1", "s")
    assert (list(bundle.backends), list(bundle.operators)) == (["XnnpackBackend"], ["aten::add.out"])
    assert bundle.artifact.size_bytes == world.store.path(digest).stat().st_size


async def test_the_newest_of_an_architecture_is_used_after_a_restart_too(world: World) -> None:
    first = await world.add(source_digest="1")
    second = await world.add(source_digest="2")
    x86 = await world.add(arch="x86_64")
    for bundles in (world.bundles, world.new_bundles()):
        await bundles.load()
        assert [bundle.artifact.digest for bundle in bundles.list()] == [x86, second]
    await world.bundles.add(first)
    for bundles in (world.bundles, world.new_bundles()):
        await bundles.load()
        assert [bundle.artifact.digest for bundle in bundles.list()] == [first, x86]


async def test_a_runtime_of_the_version_that_the_server_lowers_with_goes_before_a_newer_bundle(world: World) -> None:
    own = version("executorch").partition("+")[0]
    await world.add(executorch="0.0.1")
    bundle = world.bundles.get("aarch64")
    assert bundle is not None and bundle.executorch_version == "0.0.1"
    await world.add(executorch=own)
    await world.add(executorch="99.0.0")
    for bundles in (world.bundles, world.new_bundles()):
        await bundles.load()
        bundle = bundles.get("aarch64")
        assert bundle is not None and bundle.executorch_version == own


async def test_a_bundle_whose_bytes_are_gone_is_not_offered(world: World) -> None:
    digest = await world.add()
    world.store.path(digest).unlink()
    again = world.new_bundles()
    await again.load()
    assert again.list() == []


@pytest.mark.remedy("ARTIFACT_MISSING")
async def test_a_bundle_that_is_not_stored_is_to_be_uploaded_first(world: World) -> None:
    digest = hashlib.sha256(archive()).hexdigest()
    with refuses("ARTIFACT_MISSING") as refused:
        await world.bundles.add(digest)
    assert refused.value.kind is Kind.FAILED_PRECONDITION
    assert (await world.store.put(archive(), "ann")).digest == digest
    await world.bundles.add(digest)


@pytest.mark.remedy("NOT_A_BUNDLE")
@pytest.mark.parametrize(
    "data",
    [
        b"no archive",
        b"",
        archive()[:40],
        gzip.compress(b"x" * 5000),
        archive()[:60] + bytes(40) + archive()[100:],
        archive(name="other.json"),
        archive(b"{"),
        archive(b"[" * 100_000),
        archive(b"\xff"),
        archive([]),
        archive({}),
        archive(MANIFEST | {"schema": "etfarm.bundle/9"}),
        archive(MANIFEST | {"backends": 3}),
        archive(MANIFEST | {"arch": None}),
        archive(MANIFEST | {"arch": "x\x1b[2J"}),
        archive(MANIFEST | {"operators": ["a"] * 10_001}),
        archive(MANIFEST | {"files": {}}),
        archive(MANIFEST | {"files": FILES | {"other": FILES["ld.so"]}}),
        archive(MANIFEST | {"files": {"ld.so": FILES["ld.so"] | {"digest": "0" * 64}}}),
        archive(b" " * (5 << 20)),
    ],
    # Of the bytes themselves they would hold the time of their making.
    ids=itertools.count(),
)
async def test_what_is_no_bundle_is_refused(world: World, data: bytes) -> None:
    artifact = await world.store.put(data, "ann")
    with pytest.raises(NotABundle, match=r"This is not a usable runner bundle: .*etfarm bundle build") as refused:
        await world.bundles.add(artifact.digest)
    assert refused.value.kind is Kind.INVALID_ARGUMENT
    assert world.bundles.list() == []
    assert await world.add()


async def test_what_a_killed_servers_build_left_is_deleted_at_the_next_start(world: World) -> None:
    killed = world.bundles._builds / "tmp123" / "objects"
    killed.mkdir(parents=True)
    (killed / "a.o").write_bytes(b"x")
    await world.bundles.load()
    assert not world.bundles._builds.exists()


async def test_a_demand_for_another_architecture_says_how_to_make_one(world: World) -> None:
    with refuses("BUNDLE_MISSING", match="bundle build --arch riscv64"):
        await world.bundles.demand("riscv64")


async def test_a_demand_waits_while_the_servers_own_is_being_built(world: World) -> None:
    assert world.bundles.starting == "building the runner bundle for x86_64"
    demand = asyncio.create_task(world.bundles.demand("x86_64"))
    await world.add(arch="aarch64")
    assert not demand.done()
    digest = await world.add(arch="x86_64")
    world.bundles.settled.set()
    assert (await demand).artifact.digest == digest
    assert world.bundles.starting == ""


async def test_a_request_for_the_servers_own_bundle_reports_why_its_build_failed(world: World) -> None:
    async def fail(*_: object) -> str:
        raise FarmError("There is no g++.")

    world.bundles = world.new_bundles(run_build=fail)
    await world.bundles.build_own()
    with pytest.raises(FarmError, match=r"There is no g\+\+"):
        await world.bundles.demand("x86_64")
    assert world.bundles.own_error is not None
    digest = await world.add(arch="x86_64")
    assert (await world.bundles.demand("x86_64")).artifact.digest == digest, "one that was offered is used all the same"


@pytest.mark.remedy("BUNDLE_BUILD_FAILED")
@pytest.mark.slow(reason="builds the runner")
async def test_the_servers_own_bundle_is_built_once_there_is_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with refuses("BUNDLE_BUILD_FAILED", match=r"g\+\+"):
            await run_bundle_build(tmp_path, "-o", str(tmp_path / "bundle.tar.gz"))
    await run_bundle_build(tmp_path, "-o", str(tmp_path / "bundle.tar.gz"))
    assert (tmp_path / "bundle.tar.gz").stat().st_size


FITTING = {"arch": "x86_64", "executorch": version("executorch").partition("+")[0], "source_digest": "current"}


async def use_prebuilt(world: World, change: dict[str, str]) -> list[tuple[str, ...]]:
    """Let a farm start with a prebuilt bundle; return the arguments of the builds that it started."""
    prebuilt = world.folder / "prebuilt.tar.gz"
    prebuilt.write_bytes(archive(MANIFEST | FITTING | change))
    builds: list[tuple[str, ...]] = []

    async def build(_: Path, *arguments: str) -> str:
        builds.append(arguments)
        if arguments == ("--source-digest",):
            return "current"
        raise FarmError("There is no g++.")

    world.bundles = world.new_bundles(run_build=build, prebuilt=prebuilt)
    await world.bundles.build_own()
    assert prebuilt.exists()
    return builds


async def test_a_fitting_prebuilt_bundle_is_used_without_a_build(world: World) -> None:
    assert await use_prebuilt(world, {}) == [("--source-digest",)]
    assert world.bundles.own_error is None
    assert (await world.bundles.demand("x86_64")).source_digest == "current"


@pytest.mark.parametrize("change", [{"arch": "aarch64"}, {"executorch": "0.0.1"}, {"source_digest": "former"}, {"schema": "x"}])
async def test_another_prebuilt_bundle_is_refused_and_one_is_built(
    world: World, change: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    builds = await use_prebuilt(world, change)
    assert [arguments[0] for arguments in builds] == ["--source-digest", "-o"]
    assert "the bundle of etfarm-runner is not used" in capsys.readouterr().out
    assert world.bundles.own_error is not None
    assert world.bundles.list() == []
