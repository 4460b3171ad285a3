"""How long the calls of a client wait for a server that is away: `--server-wait`, ETFARM_SERVER_WAIT and `server_wait_s`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from etfarm.wire.durations import read_period_s
from etfarm.wire.errors import error_for
from etfarm.wire.names import SERVER_WAIT_VARIABLE

BRIEF_S: Final = 30.0
"""Seconds that a first answer, a list or another call may wait: a restart takes seconds."""

LASTING_S: Final = 600.0
"""Seconds that the calls of a submitted job or a session may wait: the job goes on meanwhile, or can be submitted still."""

CHOSEN_WAIT_S: Final[ContextVar[float | None]] = ContextVar("chosen_wait_s", default=None)
"""The time of `--server-wait`, for every farm that a command connects to."""

SAY_AWAY: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("say_away", default=None)
"""Shows that the server is away, and that it is back, for every farm that a command connects to without `on_status`."""


def read_server_wait_s(name: str, text: str) -> float:
    """Return the time of `--server-wait` or ETFARM_SERVER_WAIT in seconds.

    Raises:
        BAD_SERVER_WAIT: it is neither a duration nor 0.
    """
    wait_s = 0.0 if text.strip() == "0" else read_period_s(text)
    if wait_s is None or not math.isfinite(wait_s):
        raise error_for(
            "BAD_SERVER_WAIT",
            f"{name} requires a duration or 0, got {text[:80]!r}.",
            "Give for example 10m (s, m, h or d), or 0.",
            value=text[:80],
        )
    return wait_s


def chosen_wait_s(argument_s: float | None) -> float | None:
    """Return the time in seconds that all calls may wait; None for the defaults.

    Args:
        argument_s: of the library's caller; None for that of the command or its environment.

    Raises:
        BAD_SERVER_WAIT: it is negative or no number, or ETFARM_SERVER_WAIT is no duration.
    """
    if argument_s is not None:
        if not 0 <= argument_s < math.inf:
            raise error_for(
                "BAD_SERVER_WAIT",
                f"server_wait_s must be 0 or more seconds, got {argument_s}.", "Give for example server_wait_s=600.",
                value=argument_s,
            )  # fmt: skip
        return argument_s
    if (command_s := CHOSEN_WAIT_S.get()) is not None:
        return command_s
    text = os.environ.get(SERVER_WAIT_VARIABLE)
    return read_server_wait_s(SERVER_WAIT_VARIABLE, text) if text else None
