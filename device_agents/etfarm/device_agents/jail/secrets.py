"""The agent's own secrets: out of its environment once they are read, and out of reach of processes of the same user."""

from __future__ import annotations

import contextlib
import ctypes
import os

from etfarm.wire.names import TOKEN_VARIABLE
from etfarm.wire.sandbox import syscalls


def forget_variable(name: str = TOKEN_VARIABLE) -> None:
    """Remove a variable from the environment, and its value from the block that /proc/PID/environ shows for good.

    Nothing else may have been started yet: the value is overwritten where the kernel put it.
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
    """Keep this process's memory and environment from processes of the same user, by ptrace and /proc."""
    with contextlib.suppress(OSError):  # an emulated kernel lacks it; the runners' own confinement remains
        syscalls.hide_memory()
