"""Runs of a new program on this host, in processes that may crash.

A program that compiles does not necessarily run: complex operators compile but fail in execute. Runs are forks of a process
that was itself forked before any model was loaded, because a fork of a process whose torch has used several threads hangs.
That process never uses torch, so every run starts with the initial values of mutable buffers, and a crash ends a single run.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from etfarm.server.graphs import custom_operators
from etfarm.server.workers.errors import is_out_of_memory, signal_name

HOST_BACKENDS = frozenset({"XnnpackBackend"})
"""Backends that ExecuTorch's wheel can execute here. It registers QnnBackend and OpenvinoBackend without their SDKs."""

MAX_DATA_FILES: Final = 1
"""Maximum number of named data files (.ptd) that executorch.runtime can load with a program."""

MAX_REPEATED_S: Final = 0.5
"""Seconds of a first execution up to which there is a second one: portable kernels take many for large models."""

_CLOSE_S: Final = 5.0
"""Maximum time in seconds in which the forking process may end by itself."""

_CODES = {
    0x01: "internal error", 0x02: "invalid state", 0x10: "not supported", 0x11: "not implemented",
    0x12: "an operator refused its arguments", 0x13: "an operator refused a type", 0x14: "an operator has no kernel",
    0x20: "not found", 0x21: "out of planned memory", 0x22: "access failed", 0x23: "invalid program",
    0x25: "out of resources", 0x30: "incompatible delegate", 0x31: "a delegate ran out of memory",
    0x32: "a delegate could not be created",
}  # fmt: skip
"""Descriptions of executorch::runtime::Error. Source: executorch/runtime/core/error.h."""

_CODE = re.compile(r"[Ee]rror:?\s*(?:code\s*)?0x:?([0-9a-fA-F]+)")
_NO_KERNEL = re.compile(r"kernel '([\w:.]+)' not found")
_LOG_LINE = re.compile(r"^(?:[IEWF] )?(?:[\d:.]+ )?(?:executorch:)?(?:[\w.\-]+:\d+\]|\[[\w.\-]+:\d+\])\s*(.+)$")


@dataclass(frozen=True)
class Run:
    """A request to execute a method once."""

    method: str
    inputs: Path
    """A tensor file with flattened leaves."""
    outputs: Path
    """Path of the tensor file to write: flattened outputs, named by their positions."""
    repeated: Path | None = None
    """Path of the tensor file of a second execution's outputs, which is left out if the first one takes over MAX_REPEATED_S."""
    after: tuple[Run, ...] = ()
    """Runs before it in the same process, whose state it continues."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    ran: bool
    method: str = ""
    why: str = ""
    """Reason of a failure for messages; empty if the run succeeded."""
    log: str = ""
    timed_out: bool = False
    crashed: bool = False
    """Whether a signal ended the process."""
    out_of_memory: bool = False
    """Whether the process ran out of memory, which is not the program's fault."""


Execute = Callable[[dict[str, Any]], dict[str, object]]
"""Function that executes an order, and returns `ran` and the `error` of a run that failed."""


class SmokeRunner:
    """A process that is forked now for later runs. Create it before any use of torch; always `close` it.

    Args:
        log: file for the process's stdout and stderr; run N writes to a separate file with the suffix `.N`.
        execute: executes an order in its process and returns the answer.
    """

    def __init__(self, log: Path, execute: Execute | None = None) -> None:
        self._log = log
        self._count = 0
        self._started: tuple[Run, Path, float]
        # Pipes, because a child must not create sockets, not even a socket pair.
        their_orders, self._orders = os.pipe()
        answers, their_answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            os.close(answers)
            _serve(their_orders, their_answers, log, execute or execute_method)
        os.close(their_orders)
        os.close(their_answers)
        self._answers = os.fdopen(answers, "rb")

    def run(self, pte: Path, data: Mapping[str, Path] | None, runs: Sequence[Run], timeout_s: float) -> list[Outcome]:
        """Execute each of `runs` in a separate process, one after the other; return the outcomes in order.

        Args:
            data: the program's named data files; at most MAX_DATA_FILES.
            timeout_s: maximum seconds of each run.
        """
        outcomes = []
        for run in runs:
            self.start(pte, data, run, timeout_s)
            outcomes.append(self.finish())
        return outcomes

    def start(self, pte: Path, data: Mapping[str, Path] | None, run: Run, timeout_s: float) -> None:
        """Start one run, which continues in the background until `finish`; the arguments are those of `run`."""
        log = self._log.with_name(f"{self._log.name}.{self._count}")
        self._count += 1
        order = {
            "pte": str(pte), "data": [str(path) for path in (data or {}).values()],
            "calls": [[each.method, str(each.inputs), str(each.outputs), str(each.repeated or "")] for each in (*run.after, run)],
            "log": str(log), "timeout_s": timeout_s,
        }  # fmt: skip
        self._started = (run, log, timeout_s)
        try:
            _write_all(self._orders, json.dumps(order).encode() + b"\n")
        except OSError:
            traceback.print_exc()

    def finish(self) -> Outcome:
        """Wait for the started run and return its outcome."""
        run, log, timeout_s = self._started
        line = b""
        try:
            line = self._answers.readline()
        except OSError:
            traceback.print_exc()
        text = _read_log(log)
        if not line:
            text = text or _read_log(self._log)
            return Outcome(False, run.method, "the process that tries programs has ended", text, out_of_memory=True)
        answer = json.loads(line)
        out_of_memory = is_out_of_memory(RuntimeError(f"{answer.get('error', '')}\n{text}"))
        if answer["ran"]:
            return Outcome(True, run.method, log=text)
        if answer.get("timed_out"):
            return Outcome(False, run.method, f"it did not end within {timeout_s:g} s", text, timed_out=True)
        if "signal" in answer:
            # Programs do not kill themselves with SIGKILL: it comes from the kernel of a host that has no memory left.
            out_of_memory |= answer["signal"] == signal.SIGKILL
            return Outcome(
                False, run.method, f"it crashed with {signal_name(answer['signal'])}", text, crashed=True,
                out_of_memory=out_of_memory,
            )  # fmt: skip
        if "exit" in answer:
            return Outcome(False, run.method, f"it ended with exit code {answer['exit']}", text, out_of_memory=out_of_memory)
        return Outcome(False, run.method, explain(answer["error"], text), text, out_of_memory=out_of_memory)

    def close(self) -> None:
        """End the process and a run in progress."""
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
    """Return the runtime's reason in one line: the description of its error code and the first reason in its log.

    Of kernels that it lacks, which are all in the log, these are all of them.
    """
    match = _CODE.search(error)
    code = int(match[1], 16) if match else 0
    words = f"{_CODES[code]} (0x{code:x})" if code in _CODES else (error.strip().splitlines() or ["no reason"])[0][:200]
    if kernels := list(dict.fromkeys(_NO_KERNEL.findall(log))):
        named = ", ".join(f"'{kernel}'" for kernel in kernels)
        return f"{words}: kernel{'s' if len(kernels) > 1 else ''} {named} not found"
    for line in log.splitlines():
        logged = _LOG_LINE.match(line.strip())
        if logged and "cpuinfo" not in line and not logged[1].startswith(("Failed to execute", "KernelCall failed")):
            return f"{words}: {logged[1][:200].rstrip('. ')}"
    return words


def _read_log(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _serve(orders: int, answers: int, log: Path, execute: Execute) -> NoReturn:
    """Serve as the forking process: read one order per line and write one answer per line until the orders end."""
    code = 1
    try:
        _redirect(log)
        for line in os.fdopen(orders, "rb"):
            _write_all(answers, json.dumps(_run_in_fork(json.loads(line), orders, answers, execute)).encode() + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _run_in_fork(order: dict[str, Any], orders: int, outcomes: int, execute: Execute) -> dict[str, object]:
    """Run one order in a fork. Kill the fork at its timeout, or when the other end stops waiting for the answer."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        os.close(orders)
        os.close(outcomes)
        _run_in_child(order, writable, execute)
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
    outcome: dict[str, object] = json.loads(answer)
    return outcome


def _run_in_child(order: dict[str, Any], answers: int, execute: Execute) -> NoReturn:
    code = 1
    try:
        _redirect(Path(order["log"]))
        os.write(answers, json.dumps(execute(order)).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _redirect(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def execute_method(order: dict[str, Any]) -> dict[str, object]:
    """Execute an order's methods, each once for each call, with ExecuTorch's Python binding, and write their outputs."""
    from executorch.runtime import Runtime, Verification

    from etfarm.server.compile.program.values import to_leaf, to_value
    from etfarm.wire import tensors

    try:
        runtime = Runtime.get()
        custom_operators.register()  # as in runners
        program = runtime.load_program(
            Path(order["pte"]), verification=Verification.InternalConsistency, data_path=next(iter(order["data"]), None)
        )
        # All before the first call, as loading gives a method's buffers their initial values.
        methods = {name: program.load_method(name) for name, *_ in order["calls"]}
        for name, inputs_file, *output_files in order["calls"]:
            method = methods[name]
            assert method is not None
            duration_s = 0.0
            for outputs_file in filter(None, output_files):
                if duration_s > MAX_REPEATED_S:
                    break
                leaves = [to_leaf(value) for value in tensors.decode(Path(inputs_file).read_bytes())]
                started = time.monotonic()
                outputs = method.execute(leaves)
                duration_s = time.monotonic() - started
                values = [to_value(str(index), leaf) for index, leaf in enumerate(outputs)]
                Path(outputs_file).write_bytes(tensors.encode(values))
    except Exception as error:  # noqa: BLE001 - the runtime's message is the answer
        traceback.print_exc()
        return {"ran": False, "error": str(error) or type(error).__name__}
    return {"ran": True}
