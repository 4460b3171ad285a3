"""Expectation of an error by its reason, since most errors have no class of their own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error


def refuses(reason: str, match: str | re.Pattern[str] | None = None) -> pytest.RaisesExc[EtfarmError]:
    """Expect an error with a reason in the block, as `pytest.raises`."""
    return pytest.raises(EtfarmError, match=match, check=lambda error: error.reason == reason)


async def refusal(awaited: Awaitable[Any], within_s: float = 120.0) -> EtfarmError:
    """Return the error of a call or of a stream's next message."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async with asyncio.timeout(within_s):
            await awaited
    return from_rpc_error(failed.value, server="here")
