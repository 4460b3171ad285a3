"""Databases of tests. A new one is a copy of one that was migrated before: the migrations take a tenth of a second each time."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from etfarm.server.state.engine import Database


def new_database(path: Path) -> Database:
    """Return the database of a path, not yet opened; the same path is the same database throughout a test."""
    if not path.exists():
        path.write_bytes(_migrated())
    return Database(path)


@cache
def _migrated() -> bytes:
    """Return a database that no test has written to."""

    async def migrate(path: Path) -> None:
        database = Database(path)
        try:
            await database.open()
        finally:
            database.close()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder) / "farm.sqlite"
        # In an event loop of its own: the caller may be in one.
        thread.submit(lambda: asyncio.run(migrate(path))).result()
        assert not path.with_name("farm.sqlite-wal").exists(), "the file is not the whole database"
        return path.read_bytes()
