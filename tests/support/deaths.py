"""A function of etfarm in processes that are killed before their n-th change of the disk: n from 1 on tries each of its steps.

Run as `python -m tests.support.deaths MODULE:FUNCTION [NAME ...]`; `Deaths` is the other end. The functions get command lines.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.support.unprivileged import become_unprivileged

_CHANGES: Final = frozenset(
    {
        "backup", "chmod", "commit", "connect", "fchmod", "fsync", "link", "mkdir", "open", "rename", "replace", "rmdir",
        "unlink", "write",
    }
)  # fmt: skip
"""Names of Python's own functions before which a process may be killed: what changes files, or begins or ends to do so."""
_LAZY: Final = ("etfarm.server.cluster.stopped", "etfarm.server.state.postgres.database", "etfarm.server.state.postgres.single",
                "obstore.store", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite")  # fmt: skip
"""Modules that commands load only where they need them. They are loaded before a fork: most of a short command's time is that."""
_ROOT: Final = Path(__file__).parents[2]


class Deaths:
    """A process that has loaded the function, and forks one for each call; use it in a with statement.

    Args:
        also: names of functions of Python before which a process may be killed, too, such as those that change a database server.
    """

    def __init__(self, function: str, *also: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.deaths", function, *also], cwd=_ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.steps = 0
        """Number of steps of the last call that counted them and was not killed."""

    def __enter__(self) -> Deaths:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def call(self, *arguments: str | Path, step: int | None = None) -> int:
        """Call the function with a command line, and return its exit code; negative for a signal.

        Args:
            step: the number of the change before which it is killed; 0 counts its changes; None just runs it, which is faster.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        code, steps = map(int, self._process.stdout.readline().split())
        self.steps = steps or self.steps
        return code


def _serve(function: Callable[[list[str]], int], also: frozenset[str]) -> None:
    for line in sys.stdin:
        step, *arguments = json.loads(line)
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os._exit(_call(function, arguments, step, also, writing))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            steps = pipe.read() or "0"
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), steps, flush=True)


def _is_change(called: Any) -> bool:
    """Return whether a function with a name in `_CHANGES` changes files: texts and times have a method `replace`, too."""
    return called.__name__ != "replace" or called.__module__ == os.name


def _call(function: Callable[[list[str]], int], arguments: list[str], step: int | None, also: frozenset[str], counts: int) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    first = left = step or 0

    def on_call(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        # A million events: the quick comparisons come first.
        if (event == "c_call" and called.__name__ in _CHANGES and _is_change(called)) or (
            event == "call" and frame.f_code.co_name in also
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        if os.geteuid() == 0:
            become_unprivileged()  # root may write what an ordinary user may not
        if step is not None:
            threading.setprofile(on_call)
            sys.setprofile(on_call)
        code = function(arguments)
        os.write(counts, str(first - left).encode())
        return code
    except BaseException:  # noqa: BLE001 - a forked process must not return
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    for lazy in _LAZY:
        importlib.import_module(lazy)
    gc.freeze()
    _serve(getattr(importlib.import_module(module), name), frozenset(sys.argv[2:]))
