"""Screening by digest: once each, in jailed children of its own, and nothing is remembered of what failed."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from etfarm.server.compile import upload_screening
from etfarm.server.compile.upload_screening import CHILDREN, LIMITS, PRELOAD, Screening
from etfarm.server.workers.child_pool import Finished
from etfarm.server.workers.errors import WorkersDown
from etfarm.server.workers.pool import Workers
from etfarm.v1.compile_pb2 import ModelFormat
from etfarm.wire.errors import EtfarmError
from tests.support import hostile
from tests.support.programs import program

LIMITS_HERE: Final = replace(LIMITS, memory_bytes=256 << 20)


class Recorded(Workers):
    """Workers that hold their tasks until they are opened, and record them."""

    ran: list[str]
    urgent: list[bool]
    opened: asyncio.Event
    entered: asyncio.Semaphore
    error: Exception | None

    async def run(self, task: str, request: object, **more: object) -> Finished:
        self.ran.append(request.file.name)  # type: ignore[attr-defined]
        self.urgent.append(bool(more["urgent"]))
        self.entered.release()
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        return await super().run(task, request, **more)  # type: ignore[arg-type]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Recorded]:
    created = Recorded(preload=PRELOAD, limits=LIMITS_HERE, folder=tmp_path / "children", concurrency=CHILDREN)
    created.ran, created.urgent, created.error = [], [], None
    created.opened, created.entered = asyncio.Event(), asyncio.Semaphore(0)
    created.start()
    yield created
    created.opened.set()
    await created.stop()


@pytest.fixture
def screening(pool: Recorded, tmp_path: Path) -> Screening:
    return Screening(pool, lambda digest: tmp_path / digest)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Writes a .pt2 with other members, and returns its name."""
    contents = hostile.members(hostile.host(), tmp_path)

    def create(name: str = "good", changes: Mapping[str, bytes] | None = None) -> str:
        hostile.write(tmp_path / name, contents | {**(changes or {})})
        return name

    return create


async def test_submissions_of_the_same_file_screen_it_once(
    screening: Screening, pool: Recorded, model: Callable[..., str]
) -> None:
    name = model()
    waiting = [asyncio.create_task(screening.screen_pt2(name, "p")) for _ in range(20)]
    await pool.entered.acquire()
    pool.opened.set()
    await asyncio.gather(*waiting)
    await screening.screen_pt2(name, "p")
    assert (pool.ran, pool.urgent) == ([name], [True]), "a submission goes before descriptions"


async def test_a_project_does_not_wait_for_the_turn_of_another_with_the_same_file(
    screening: Screening, pool: Recorded, model: Callable[..., str]
) -> None:
    name = model()
    waiting = [asyncio.create_task(screening.screen_pt2(name, project)) for project in ("p", "q")]
    for _ in waiting:
        await pool.entered.acquire()
    pool.opened.set()
    await asyncio.gather(*waiting)
    assert pool.ran == [name, name]
    await screening.screen_pt2(name, "r")
    assert pool.ran == [name, name]


async def test_a_project_leaves_a_child_for_descriptions_of_another(
    screening: Screening, pool: Recorded, model: Callable[..., str]
) -> None:
    many = [asyncio.create_task(screening.inspect(model(f"p{index}"), "p")) for index in range(4)]
    await pool.entered.acquire()
    other = asyncio.create_task(screening.inspect(model("q0"), "q"))
    await pool.entered.acquire()
    assert sorted(pool.ran) == ["p0", "q0"]
    pool.opened.set()
    await asyncio.gather(*many, other)
    assert len(pool.ran) == 5


async def test_a_file_that_failed_is_screened_again(screening: Screening, pool: Recorded, model: Callable[..., str]) -> None:
    pool.opened.set()
    bad = model("bad", {"data/aotinductor/x.so": b"\x7fELF"})
    for _ in range(2):
        with pytest.raises(EtfarmError, match="native code") as refused:
            await screening.screen_pt2(bad, "p")
        assert refused.value.reason == "UNSAFE_MODEL"
    assert pool.ran == ["bad", "bad"]


async def test_a_caller_that_goes_away_leaves_the_others_their_answer(
    screening: Screening, pool: Recorded, model: Callable[..., str]
) -> None:
    name = model()
    gone, stays = (asyncio.create_task(screening.screen_pt2(name, "p")) for _ in range(2))
    await pool.entered.acquire()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    pool.opened.set()
    await stays
    assert pool.ran == [name]


async def test_what_no_child_can_screen_is_left_to_the_compilation(screening: Screening, pool: Recorded) -> None:
    pool.error = WorkersDown("The host has no memory left.")
    pool.opened.set()
    await screening.screen_pt2("any", "p")
    with pytest.raises(WorkersDown):
        await screening.inspect("any", "p")


async def test_what_passed_is_remembered_up_to_a_bound(
    screening: Screening, pool: Recorded, model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_screening, "MAX_KEPT", 2)
    pool.opened.set()
    for name in ("a", "b", "c", "c", "a"):
        await screening.screen_pt2(model(name), "p")
    assert pool.ran == ["a", "b", "c", "a"]


async def test_an_exported_program_and_a_program_are_described(
    screening: Screening, pool: Recorded, model: Callable[..., str], tmp_path: Path
) -> None:
    pool.opened.set()
    (tmp_path / "pte").write_bytes(program("add").bytes)
    described = await screening.inspect(model(), "p")
    assert described.format == ModelFormat.MODEL_FORMAT_PT2 and len(described.input_names) == 1
    assert not described.quantized and not described.transformed
    ready = await screening.inspect("pte", "p")
    assert ready.format == ModelFormat.MODEL_FORMAT_PTE and list(ready.facts.methods) == ["forward"]
    for name, is_program, reason in (("pte", False, "NOT_A_PT2"), ("good", True, "NOT_A_PTE")):
        with pytest.raises(EtfarmError) as refused:
            await screening.inspect(name, "p", is_program=is_program)
        assert refused.value.reason == reason
    assert pool.urgent == [False] * 4


def bomb(member: str, size_bytes: int) -> bytes:
    """Return a .pt2 whose graph expands a thousandfold."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/archive_format", b"pt2")
        archive.writestr(member, b'{"graph_module": [' + b"[]," * (size_bytes // 3) + b"0]}")
    return file.getvalue()


@pytest.mark.remedy("UNSAFE_MODEL")
async def test_a_bomb_is_refused_and_a_graph_that_needs_too_much_memory_ends_its_child_alone(
    screening: Screening, pool: Recorded, model: Callable[..., str], tmp_path: Path
) -> None:
    pool.opened.set()
    (tmp_path / "bomb").write_bytes(bomb("archive/models/model.json", 64 << 20))
    with pytest.raises(EtfarmError, match="is compressed, which torch never does") as refused:
        await screening.inspect("bomb", "p")
    assert refused.value.reason == "UNSAFE_MODEL"
    graph = b'{"graph_module": [' + b'{"a":[]},' * (2 << 20) + b"0]}"
    with pytest.raises(EtfarmError) as refused:
        await screening.inspect(model("large", {hostile.MODEL: graph}), "p")
    assert refused.value.reason == "CHILD_OUT_OF_MEMORY"
    assert (await screening.inspect(model(), "p")).input_names
