"""Fault attribution: the program is to blame for an abnormal end if the runner passes its self-test right after without it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from typing import Final

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.base import Provisions, Target
from etfarm.wire.errors import EtfarmError, error_for

log = logging.getLogger(__name__)

ABNORMAL_EXITS: Final = (errors.ProgramCrashed, errors.ProgramHung, errors.ProgramOutOfMemory)
"""Errors for which the program or the device may be to blame."""


def self_test_limit_s(target: Target, provisions: Provisions) -> float:
    """Return the deadline of a self-test; the Python runner has more time, since importing torch takes seconds on a board."""
    return target.self_test_s * (1 if provisions.bundle else 3)


async def attribute_fault(error: EtfarmError, starting: AbstractAsyncContextManager[RemoteRunner], limit_s: float) -> EtfarmError:
    """Return `error` if the program is to blame, or DEVICE_SELF_TEST_FAILED if the device fails without the program too.

    Args:
        error: one of ABNORMAL_EXITS.
        starting: starts a fresh runner of the same kind.
        limit_s: the self-test's deadline.
    """
    try:
        async with asyncio.timeout(limit_s), starting as runner:
            await runner.hello()
            await runner.self_test()
    except (EtfarmError, TimeoutError) as failure:
        why = str(failure) or f"no answer within {limit_s:g} s"
        log.error("the self-test failed: %s", why)
        values = error.metadata | {"self_test": why, "program_error": error.reason, "program_message": error.message}
        return error_for(
            "DEVICE_SELF_TEST_FAILED",
            f"The runner no longer answers on this device ({why}), after a program ended with {error.reason}.",
            "Check the device: memory, disk, temperature, the kernel's log.",
            stage=error.stage, **values,
        )  # fmt: skip
    error.metadata["self_test"] = "passed"
    return error
