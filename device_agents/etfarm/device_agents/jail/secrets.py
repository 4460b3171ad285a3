"""Protection of the agent's own secrets from processes of the same user, and from reading its environment."""

from __future__ import annotations

import contextlib
import ctypes
import os

from etfarm.wire.names import TOKEN_VARIABLE
from etfarm.wire.sandbox import syscalls


def forget_variable(name: str = TOKEN_VARIABLE) -> None:
    """Remove a variable from the environment, and its value from the memory that /proc/PID/environ shows.

    Call it before starting any thread or process: the value is overwritten in the memory where the kernel placed it.
    """
    if name not in os.environ:
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_void_p
    address = getenv(os.fsencode(name))
    if address:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
    del os.environ[name]


def hide_memory() -> None:
    """Hide this process's memory and environment from processes of the same user, for ptrace and /proc."""
    with contextlib.suppress(OSError):  # an emulated kernel lacks it; the runners' own confinement remains
        syscalls.hide_memory()
