"""Runs a fresh program on this host, in processes that may crash.

Compiling well is not running: complex operators compile and fail at execute. The process that forks the runs was itself
forked before any model was touched: one that is forked after torch has worked on several threads hangs. It never works
with torch, so that every run is a fork of it with a fresh state of mutable buffers, and a crash ends one run only.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from etfarm.server.workers.errors import is_out_of_memory, signal_name

HOST_BACKENDS = frozenset({"XnnpackBackend"})
"""Backends that executorch's wheel can execute here; QnnBackend and OpenvinoBackend are registered without their SDKs."""

MAX_DATA_FILES: Final = 1
"""How many named data files (.ptd) executorch.runtime can give a program."""

_CLOSE_S: Final = 5.0
"""How long the forking process may take to end by itself."""

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
class Run:
    """One execution of one method."""

    method: str
    inputs: Path
    """A tensor file of flat leaves."""
    outputs: Path
    """Is written: a tensor file of flat outputs, which have their positions for names."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    ran: bool
    method: str = ""
    why: str = ""
    """Words for a sentence; empty when it ran."""
    log: str = ""
    timed_out: bool = False
    out_of_memory: bool = False
    """The process had no memory left, which says nothing against the program."""


class SmokeRunner:
    """A process forked now for runs later. Fork it before any torch work; `close` it in any case.

    Args:
        log: file that its stdout and stderr go to; run N has its own, `log` with `.N` behind it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._count = 0
        self._begun: tuple[Run, Path, float]
        # Pipes: a child may make no sockets, not even a pair.
        their_orders, self._orders = os.pipe()
        answers, their_answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            os.close(answers)
            _serve(their_orders, their_answers, log)
        os.close(their_orders)
        os.close(their_answers)
        self._answers = os.fdopen(answers, "rb")

    def run(self, pte: Path, data: Mapping[str, Path] | None, runs: Sequence[Run], timeout_s: float) -> list[Outcome]:
        """Executes each of `runs` in a process of its own, one after the other. Gives one outcome a run, in order.

        Args:
            data: the program's named data files; at most MAX_DATA_FILES.
            timeout_s: for each run.
        """
        outcomes = []
        for run in runs:
            self.start(pte, data, run, timeout_s)
            outcomes.append(self.finish())
        return outcomes

    def start(self, pte: Path, data: Mapping[str, Path] | None, run: Run, timeout_s: float) -> None:
        """Begins one run, which goes on beside what this process does until `finish`; the arguments are those of `run`."""
        log = self._log.with_name(f"{self._log.name}.{self._count}")
        self._count += 1
        order = {
            "pte": str(pte), "data": [str(path) for path in (data or {}).values()], "method": run.method,
            "inputs": str(run.inputs), "outputs": str(run.outputs), "log": str(log), "timeout_s": timeout_s,
        }  # fmt: skip
        self._begun = (run, log, timeout_s)
        try:
            _write_all(self._orders, json.dumps(order).encode() + b"\n")
        except OSError:
            traceback.print_exc()

    def finish(self) -> Outcome:
        """Waits for the run that was begun."""
        run, log, timeout_s = self._begun
        line = b""
        try:
            line = self._answers.readline()
        except OSError:
            traceback.print_exc()
        told = _read(log)
        if not line:
            return Outcome(False, run.method, "the process that tries programs is gone", told or _read(self._log))
        said = json.loads(line)
        memory = is_out_of_memory(RuntimeError(f"{said.get('error', '')}\n{told}"))
        if said["ran"]:
            return Outcome(True, run.method, log=told)
        if said.get("timed_out"):
            return Outcome(False, run.method, f"it did not end within {timeout_s:g} s", told, timed_out=True)
        if "signal" in said:
            return Outcome(False, run.method, f"it crashed with {signal_name(said['signal'])}", told, out_of_memory=memory)
        if "exit" in said:
            return Outcome(False, run.method, f"it ended with exit code {said['exit']}", told, out_of_memory=memory)
        return Outcome(False, run.method, explain(said["error"], told), told, out_of_memory=memory)

    def close(self) -> None:
        """Ends the process, and a run that is still going."""
        if not self._pid:
            return
        self._answers.close()
        os.close(self._orders)
        until = time.monotonic() + _CLOSE_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.005)
        self._pid = 0


def explain(error: str, log: str) -> str:
    """The runtime's reason in one line: what its log said first, and its error code in words."""
    found = _CODE.search(error)
    code = int(found[1], 16) if found else 0
    words = f"{_CODES[code]} (0x{code:x})" if code in _CODES else (error.strip().splitlines() or ["no reason"])[0][:200]
    for line in log.splitlines():
        told = _LOG_LINE.match(line.strip())
        if told and "cpuinfo" not in line and not told[1].startswith(("Failed to execute", "KernelCall failed")):
            return f"{words}: {told[1][:200].rstrip('. ')}"
    return words


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _serve(orders: int, answers: int, log: Path) -> NoReturn:
    """The forking process: an order a line, an answer a line, until the orders end."""
    code = 1
    try:
        _redirect(log)
        for line in os.fdopen(orders, "rb"):
            _write_all(answers, json.dumps(_forked(json.loads(line), orders, answers)).encode() + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _forked(order: dict[str, Any], orders: int, outcomes: int) -> dict[str, object]:
    """Runs one order in a fork. Ends the fork when its time is up, or when nobody waits for the answer any more."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        os.close(orders)
        os.close(outcomes)
        _child(order, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as answers:
        waited: list[Any] = [answers, orders]
        ready, _, _ = select.select(waited, [], [], order["timeout_s"])
        if answers not in ready:
            os.kill(pid, signal.SIGKILL)
        answer = answers.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answers not in ready:
        return {"ran": False, "timed_out": True}
    if code < 0:
        return {"ran": False, "signal": -code}
    if code > 0 or not answer:
        return {"ran": False, "exit": code}
    said: dict[str, object] = json.loads(answer)
    return said


def _child(order: dict[str, Any], answers: int) -> NoReturn:
    code = 1
    try:
        _redirect(Path(order["log"]))
        os.write(answers, json.dumps(_run(order)).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - as in _serve
        traceback.print_exc()
    finally:
        os._exit(code)


def _redirect(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run(order: dict[str, Any]) -> dict[str, object]:
    from executorch.runtime import Runtime, Verification

    from etfarm.server.compile.program.values import to_leaf, to_value
    from etfarm.wire import tensors

    try:
        program = Runtime.get().load_program(
            Path(order["pte"]), verification=Verification.InternalConsistency, data_path=next(iter(order["data"]), None)
        )
        method = program.load_method(order["method"])
        assert method is not None
        outputs = method.execute([to_leaf(value) for value in tensors.decode(Path(order["inputs"]).read_bytes())])
        values = [to_value(str(index), leaf) for index, leaf in enumerate(outputs)]
        Path(order["outputs"]).write_bytes(tensors.encode(values))
    except Exception as error:  # noqa: BLE001 - whatever the runtime said is the answer
        traceback.print_exc()
        return {"ran": False, "error": str(error) or type(error).__name__}
    return {"ran": True}
