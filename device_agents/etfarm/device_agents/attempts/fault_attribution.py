"""Whose fault it is that a program ended badly: its own, if the runner answers right after without it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from typing import Final

from etfarm.device_agents.errors import SelfTestFailed
from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.base import Provisions, Target
from etfarm.wire.errors import EtfarmError

log = logging.getLogger(__name__)

BAD_ENDS: Final = (errors.ProgramCrashed, errors.ProgramHung, errors.ProgramOutOfMemory)
"""Ends that the device may be to blame for."""


def self_test_limit_s(target: Target, provisions: Provisions) -> float:
    """How long a self-test may take. Importing torch alone takes seconds on a board."""
    return target.self_test_s * (1 if provisions.bundle else 3)


async def judged(error: EtfarmError, starting: AbstractAsyncContextManager[RemoteRunner], limit_s: float) -> EtfarmError:
    """`error` as the program's, or SelfTestFailed where the device fails without the program too.

    Args:
        error: one of BAD_ENDS.
        starting: gives a fresh runner of the same kind.
        limit_s: for the self-test.
    """
    try:
        async with asyncio.timeout(limit_s), starting as runner:
            await runner.hello()
            await runner.self_test()
    except (EtfarmError, TimeoutError) as failure:
        why = str(failure) or f"no answer within {limit_s:g} s"
        log.error("the self-test failed: %s", why)
        return SelfTestFailed(why, error)
    error.metadata["self_test"] = "passed"
    return error
