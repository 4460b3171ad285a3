"""What a restored farm admits is listed, and left out if that is wished."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from etfarm.server.access.tokens import TokenTable, key_of
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.commands import restore_main
from etfarm.server.devices.records import DeviceRecords
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1.common_pb2 import ROLE_AGENT, ROLE_USER
from etfarm.v1.device_pb2 import Device
from tests.support.databases import opened


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
async def backup(tmp_path: Path) -> Path:
    """A backup of a farm with a user, a board, and tokens that nobody can use."""
    data = tmp_path / "data"
    data.mkdir()
    async with opened(SqliteDatabase(data / "farm.sqlite")) as database:
        tokens = TokenTable(database, now)
        await tokens.create("bob", ROLE_USER, by="root", lifetime_s=timedelta(days=1).total_seconds())
        ended, _ = await tokens.create("eve", ROLE_USER, by="root")
        await tokens.revoke(ended.id)
        _, secret = await tokens.create("rack", ROLE_AGENT, by="root", enrolment=True)
        enrolment = tokens.find(key_of(secret))
        assert enrolment is not None
        await tokens.enroll(enrolment, "a1", is_known=False)
        await DeviceRecords(database).save([Device(id="pi", name="board-7", agent_id="a1")])
    await asyncio.to_thread(back_up, data, tmp_path / "backup")
    return tmp_path / "backup"


async def valid(data: Path) -> tuple[int, bool]:
    """Return the number of tokens that the farm takes, and whether it asks for one."""
    async with opened(SqliteDatabase(data / "farm.sqlite")) as database:
        tokens = TokenTable(database, now)
        await tokens.load()
    return len(tokens._valid), not tokens.is_empty


def restored(backup: Path, data: Path, *options: str) -> int:
    return restore_main([str(backup), "--data", str(data), *options])


async def test_a_restore_lists_the_tokens_and_agents_that_it_revives(
    backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(restored, backup, tmp_path / "new") == 0
    printed = capsys.readouterr().out
    assert "2 tokens are usable again; --without-tokens leaves them out:" in printed
    assert "  bob (user, until " in printed and "  rack (agent, of agent a1)" in printed and "eve" not in printed
    assert "1 agent is admitted with a token of the principal:\n  a1  rack, board-7\n" in printed
    assert (await valid(tmp_path / "new"))[1]


async def test_a_restore_without_tokens_revokes_them_and_leaves_the_farm_closed(
    backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(restored, backup, tmp_path / "new", "--without-tokens") == 0
    printed = capsys.readouterr().out
    assert "usable again" not in printed and "bob" not in printed
    assert f"Create an admin's: etfarm tokens init NAME --data {tmp_path / 'new'}\n" in printed
    assert await valid(tmp_path / "new") == (0, True)
