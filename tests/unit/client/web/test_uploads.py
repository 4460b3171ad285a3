"""Files that visitors have sent: who may use them, how much they may be, and when they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.web import uploads
from etfarm.client.web.uploads import Uploads
from etfarm.wire.errors import EtfarmError, UserError
from tests.support.refusals import refuses


@pytest.fixture
async def stored() -> AsyncIterator[Uploads]:
    kept = Uploads(8_000, 10_000)
    yield kept
    kept.close()


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def accept(path: Path, *, name: str) -> PreparedModel:
    """Describe any file, as a farm does that accepts it."""
    return PreparedModel(name, program=path)


@pytest.mark.remedy("MODEL_FILE_GONE")
async def test_a_file_is_stored_as_it_is_and_removed(stored: Uploads) -> None:
    upload = await stored.store("ann", "token of ann", "net.PT2", chunks(b"ab", b"", b"c"), accept)
    assert upload.path.read_bytes() == b"abc" and upload.path.suffix == ".pt2"
    assert (upload.name, upload.model.name, upload.size_bytes) == ("net.PT2", "net", 3)
    assert stored.get("ann", upload.id) is upload
    with refuses("MODEL_FILE_GONE"):
        stored.get("bob", upload.id)
    stored.remove(upload)
    assert not upload.path.exists()
    with refuses("MODEL_FILE_GONE"):
        stored.get("ann", upload.id)
    again = await stored.store("ann", "token of ann", "net.PT2", chunks(b"abc"), accept)
    assert stored.get("ann", again.id) is again


@pytest.mark.parametrize(("name", "expected"), [("../../x.pte", "x.pte"), ("C:\\models\\x.pte", "x.pte"), ("<b>.pte", "<b>.pte")])
async def test_a_name_selects_no_folder(stored: Uploads, name: str, expected: str) -> None:
    upload = await stored.store("ann", "token of ann", name, chunks(b"x"), accept)
    assert upload.name == expected
    assert upload.path.parent == (await stored.store("ann", "token of ann", "y.pte", chunks(b"y"), accept)).path.parent


@pytest.mark.remedy("MODEL_FILE_REFUSED")
@pytest.mark.parametrize("name", ["", "x.py", "demo:resnet8", "x.pte.txt", ".pte", "a\nb.pte", "x.pte\x00", "a" * 200 + ".pte"])
async def test_other_names_are_refused(stored: Uploads, name: str) -> None:
    with refuses("MODEL_FILE_REFUSED"):
        await stored.store("ann", "token of ann", name, chunks(b"x"), accept)
    assert await stored.store("ann", "token of ann", "x.pte", chunks(b"x"), accept)


@pytest.mark.remedy("MODEL_FILE_NOT_STORED")
async def test_all_files_together_are_bounded(stored: Uploads) -> None:
    await stored.store("ann", "token of ann", "x.pte", chunks(bytes(6_000)), accept)
    with refuses("MODEL_FILE_NOT_STORED"):
        await stored.store("bob", "token of bob", "y.pte", chunks(bytes(6_000)), accept)
    await stored.store("bob", "token of bob", "y.pte", chunks(bytes(4_000)), accept)


async def test_one_token_cannot_take_all_the_room(stored: Uploads) -> None:
    await stored.store("ann", "token of ann", "x.pte", chunks(bytes(6_000)), accept)
    with refuses("MODEL_FILE_NOT_STORED", match="one user's"):
        await stored.store("ann in another browser", "token of ann", "y.pte", chunks(bytes(3_000)), accept)
    await stored.store("bob", "token of bob", "z.pte", chunks(bytes(3_000)), accept)


async def test_files_that_arrive_at_the_same_time_count_together() -> None:
    mebibyte = 1 << 20
    stored = Uploads(3 * mebibyte, 4 * mebibyte)
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield bytes(2 * mebibyte)
        arrived.set()
        await go_on.wait()

    first = asyncio.create_task(stored.store("ann", "token of ann", "x.pte", slowly(), accept))
    await arrived.wait()
    with refuses("MODEL_FILE_NOT_STORED", match="one user's"):
        await stored.store("ann", "token of ann", "y.pte", chunks(bytes(2 * mebibyte)), accept)
    with refuses("MODEL_FILE_NOT_STORED", match="all"):
        await stored.store("bob", "token of bob", "y.pte", chunks(bytes(3 * mebibyte)), accept)
    go_on.set()
    assert (await first).size_bytes == 2 * mebibyte
    await stored.store("ann", "token of ann", "y.pte", chunks(bytes(mebibyte)), accept)
    stored.close()


async def test_a_visitors_oldest_file_leaves_for_another_one(stored: Uploads) -> None:
    sent = [await stored.store("ann", "token of ann", "x.pte", chunks(b"x"), accept) for _ in range(uploads.MAX_OF_VISITOR + 1)]
    assert not sent[0].path.exists() and all(upload.path.exists() for upload in sent[1:])


async def test_old_files_and_those_of_visitors_who_sign_out_are_removed() -> None:
    now_s = 0.0
    stored = Uploads(8_000, 10_000, lambda: now_s)
    old = await stored.store("ann", "token of ann", "x.pte", chunks(b"x"), accept)
    now_s = uploads.KEEP_S + 1
    fresh = await stored.store("bob", "token of bob", "x.pte", chunks(b"x"), accept)
    assert not old.path.exists()
    stored.remove_of("bob")
    assert not fresh.path.exists()
    folder = fresh.path.parent
    stored.close()
    assert not folder.exists()


@pytest.mark.remedy("MODEL_FILE_STALLED")
async def test_a_browser_that_stops_to_send_is_refused(stored: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_WAIT_S", 0.01)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with refuses("MODEL_FILE_STALLED"):
        await stored.store("ann", "token of ann", "x.pte", stalled(), accept)
    assert await stored.store("ann", "token of ann", "x.pte", chunks(b"x"), accept)


async def test_an_empty_file_is_refused(stored: Uploads) -> None:
    with refuses("MODEL_FILE_REFUSED"):
        await stored.store("ann", "token of ann", "x.pte", chunks(), accept)


async def test_a_file_that_the_farm_refuses_is_removed_and_named_as_the_visitor_called_it(stored: Uploads) -> None:
    seen: list[Path] = []

    async def refuse(path: Path, *, name: str) -> PreparedModel:
        seen.append(path)
        raise UserError(f"{path} is not a program.", "Send another one.")

    with pytest.raises(EtfarmError, match=r"^x\.pte is not a program") as refused:
        await stored.store("ann", "token of ann", "x.pte", chunks(b"x"), refuse)
    assert str(seen[0]) not in str(refused.value) and not seen[0].exists()
    await stored.store("ann", "token of ann", "y.pte", chunks(bytes(8_000)), accept)
