"""Work that fails after its caller was cancelled leaves no traceback of asyncio."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from etfarm.wire.shielding import shielded


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_error_is_raised_or_dropped(is_cancelled: bool) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    may_fail = asyncio.Event()

    async def fail() -> None:
        await may_fail.wait()
        raise OSError("the disk is full")

    work = asyncio.create_task(fail())
    caller = asyncio.create_task(shielded(work))
    await asyncio.sleep(0)
    if is_cancelled:
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not work.done()
    may_fail.set()
    await asyncio.wait({work})
    if not is_cancelled:
        with pytest.raises(OSError, match="full"):
            await caller
    del work, caller
    gc.collect()
    assert logged == []
