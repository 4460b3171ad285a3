"""Runs a fresh program once on this host, in a process that may crash.

Compiling well is not running: complex operators compile and fail at execute. The process is forked before any model was
touched: one that is forked after torch has worked on several threads hangs.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from etfarm.server.workers.faults import signal_name

HOST_BACKENDS = frozenset({"XnnpackBackend"})
"""Backends that executorch's wheel can execute here; QnnBackend and OpenvinoBackend are registered without their SDKs."""

_CODES = {
    0x01: "internal error", 0x02: "invalid state", 0x10: "not supported", 0x11: "not implemented",
    0x12: "an operator refused its arguments", 0x13: "an operator refused a type", 0x14: "an operator has no kernel",
    0x20: "not found", 0x21: "out of planned memory", 0x22: "access failed", 0x23: "invalid program",
    0x25: "out of resources", 0x30: "incompatible delegate", 0x31: "a delegate ran out of memory",
    0x32: "a delegate could not be made",
}  # fmt: skip
"""executorch::runtime::Error in words. Source: executorch/runtime/core/error.h."""

_CODE = re.compile(r"[Ee]rror:?\s*(?:code\s*)?0x:?([0-9a-fA-F]+)")
_LOG_LINE = re.compile(r"^(?:[IEWF] )?(?:[\d:.]+ )?(?:executorch:)?(?:[\w.\-]+:\d+\]|\[[\w.\-]+:\d+\])\s*(.+)$")


@dataclass(frozen=True)
class Outcome:
    """What came of a smoke run."""

    ran: bool
    method: str = ""
    why: str = ""
    """Words for a sentence; empty when it ran."""
    log: str = ""
    timed_out: bool = False


class SmokeRunner:
    """A process forked now for a run later. Fork it before any torch work; `close` it in any case.

    Args:
        log: file that its stdout and stderr go to.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._channel, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._channel.close()
            _serve(theirs, log)
        theirs.close()

    def run(self, pte: Path, inputs: Mapping[str, Path], timeout_s: float) -> Outcome:
        """Executes each method of `inputs` once on the flat leaves of its tensor file. Can be called once."""
        order = {"pte": str(pte), "inputs": {method: str(path) for method, path in inputs.items()}}
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        ready, _, _ = select.select([self._channel], [], [], timeout_s)
        if not ready:
            return Outcome(False, timed_out=True, why=f"it did not end within {timeout_s:g} s", log=self._told())
        answer = b""
        while part := self._channel.recv(1 << 16):
            answer += part
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        log = self._told()
        if code < 0:
            return Outcome(False, next(iter(inputs), ""), f"it crashed with {signal_name(-code)}", log)
        try:
            said = json.loads(answer)
        except ValueError:
            return Outcome(False, next(iter(inputs), ""), f"it ended with exit code {code}", log)
        if said["ran"]:
            return Outcome(True, log=log)
        return Outcome(False, said["method"], explain(said["error"], log), log)

    def close(self) -> None:
        """Ends the process if it still runs."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        self._channel.close()

    def _told(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def explain(error: str, log: str) -> str:
    """The runtime's reason in one line: what its log said first, and its error code in words."""
    found = _CODE.search(error)
    code = int(found[1], 16) if found else 0
    words = f"{_CODES[code]} (0x{code:x})" if code in _CODES else error.strip().splitlines()[0][:200]
    for line in log.splitlines():
        told = _LOG_LINE.match(line.strip())
        if told and "cpuinfo" not in line and not told[1].startswith(("Failed to execute", "KernelCall failed")):
            return f"{words}: {told[1][:200].rstrip('. ')}"
    return words


def _serve(channel: socket.socket, log: Path) -> NoReturn:
    code = 1
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        order = channel.makefile("rb").readline()
        if order:
            channel.sendall(json.dumps(_run(json.loads(order))).encode())
            code = 0
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(order: dict[str, object]) -> dict[str, object]:
    from executorch.runtime import Runtime, Verification

    from etfarm.server.compile.values import to_leaf
    from etfarm.wire import tensors

    inputs = order["inputs"]
    assert isinstance(inputs, dict)
    method = ""
    try:
        program = Runtime.get().load_program(Path(str(order["pte"])), verification=Verification.InternalConsistency)
        for method, path in inputs.items():
            loaded = program.load_method(method)
            assert loaded is not None
            loaded.execute([to_leaf(value) for value in tensors.decode(Path(path).read_bytes())])
    except Exception as error:  # noqa: BLE001 - whatever the runtime said is the answer
        traceback.print_exc()
        return {"ran": False, "method": method, "error": str(error)}
    return {"ran": True}
