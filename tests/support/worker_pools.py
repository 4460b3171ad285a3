"""Pools of workers that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers


@asynccontextmanager
async def worker_pool(folder: Path, **options: Any) -> AsyncIterator[Workers]:
    """Start a pool of one child at a time, with its jobs in a folder, unless the options say otherwise."""
    usual: dict[str, Any] = {"preload": [], "limits": Limits(), "folder": folder / "jobs", "concurrency": 1}
    pool = Workers(**usual | options)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()
