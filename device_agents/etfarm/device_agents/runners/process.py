"""The runner's process: spoken to in lines, killed with all that it forked, always reaped.

One request is under way at a time. Whatever interrupts it - a deadline, a cancelled task, a reply that is no protocol -
ends the process, since nobody could tell any more which reply belongs to which command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

from etfarm.device_agents.runners import answers, errors
from etfarm.device_agents.runners.child import Child, Spawn, spawn_here
from etfarm.wire.errors import EtfarmError

_MEMORY_INFO: Final = Path("/proc/meminfo")
_MEMORY_SHARE: Final = 4
"""Divisor of the free memory that gives the largest payload: a hostile program may control the runner."""
_LEAST_PAYLOAD_BYTES: Final = 64 << 20
_MOST_PAYLOAD_BYTES: Final = 1 << 33
_KEPT_LINES: Final = 60
_REAP_SECONDS: Final = 5.0
"""Within which a killed process is gone, but for one stuck in the kernel, which nobody can help."""
_MEMORY_WORDS: Final = ("bad_alloc", "out of memory", "out_of_memory", "cannot allocate memory", "failed to allocate")
_MEMORY_CODES: Final = ("MemoryAllocationFailed", "DelegateMemoryAllocationFailed")
_FIRST_STAGE: Final = "START"
_RUNTIME_LINE: Final = re.compile(r"\[(\w+\.(?:cpp|h):\d+)\] (.*)", re.DOTALL)
"""A line of ExecuTorch's log where nothing captures it, as in its Python binding: without a level."""
_MARK_PREFIX: Final = "etfarm-error-"
_MARK_SECONDS: Final = 1.0
"""Within which a mark on stderr is read that was written already, unless something else fills the pipe."""

Argument = str | int | Path
Event = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a runner may use."""

    data_bytes: int | None = None
    """Of memory that is written to (RLIMIT_DATA: heap, stacks of threads, anonymous mappings); None is no limit."""
    command_s: float = 120.0
    """For each command, beside the time that a measurement was given."""


@dataclass(frozen=True)
class LogLine:
    """One line that the runner wrote."""

    source: str
    """`runtime` (ExecuTorch's log) or `stderr`."""
    level: str
    """`D`, `I`, `E` or `F` of the runtime's log; empty for stderr, and where the runtime tells none."""
    where: str
    """`file.cpp:line` of the runtime's log."""
    message: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.level, self.where, self.message) if part)


OnLog = Callable[[LogLine], None]
OnEvent = Callable[[Event], None]


class RunnerProcess:
    """A running runner. Made by `start`; `kill` and `reap` end it."""

    def __init__(self, child: Child, limits: Limits, on_log: OnLog | None) -> None:
        self._child = child
        self.limits = limits
        self._on_log = on_log
        self._lock = asyncio.Lock()
        self._log: deque[LogLine] = deque(maxlen=_KEPT_LINES)
        self._stderr = asyncio.create_task(self._read_stderr(), name=f"runner {child.pid} stderr")
        self._since: deque[LogLine] = deque(maxlen=_KEPT_LINES)
        """Lines of stderr since the latest command."""
        self._mark = ""
        self._marked = asyncio.Event()
        self._ended: EtfarmError | None = None
        self.stage = _FIRST_STAGE
        """What is under way, for whoever must tell where the program failed."""
        self.without_data = True
        """No .ptd was loaded, which is worth a hint when XNNPACK crashes."""

    @classmethod
    async def start(
        cls, command: Sequence[str], folder: Path, limits: Limits, on_log: OnLog | None = None, spawn: Spawn = spawn_here
    ) -> RunnerProcess:
        """A process of `command` in `folder`.

        Args:
            spawn: starts it, here or on another machine, where `folder` is too.

        Raises:
            RunnerBroken: it cannot be started.
            As `spawn`.
        """
        options = [] if limits.data_bytes is None else ["--limit-data-bytes", str(limits.data_bytes)]
        return cls(await spawn([*command, *options], folder), limits, on_log)

    @property
    def pid(self) -> int:
        """The process, by its number where it runs."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process was not seen to end."""
        return not self._child.ended

    async def request(
        self,
        command: str,
        arguments: Sequence[tuple[str, Argument]] = (),
        payload: bytes | None = None,
        *,
        stage: str,
        deadline_s: float | None = None,
        on_progress: OnEvent | None = None,
        max_payload_bytes: int = 0,
    ) -> tuple[Event, bytes]:
        """One command's result and its payload.

        Args:
            command: its name.
            arguments: in order; a key may come several times.
            payload: bytes behind the line.
            stage: what errors are said to have happened in, until a progress event names another.
            deadline_s: for the whole of it; `Limits.command_s` by default.
            on_progress: takes progress events.
            max_payload_bytes: maximum size of the answer's payload; a larger one violates the protocol. For tensors, give
                `room_for_payload()`.

        Raises:
            ProgramCrashed, ProgramHung, ProgramOutOfMemory: the process is over.
            RunnerBroken, RunnerKilled: the process is over, and it was not the program's fault.
            RunnerClosed: it was over before.
            InputMismatch, OperatorMissing, BackendMissing, ProgramFailed and others: refused; the process is usable.
        """
        async with self._lock:
            if self._ended is not None:
                raise self._ended
            self.stage = stage
            self._since.clear()
            seconds = self.limits.command_s if deadline_s is None else deadline_s
            try:
                async with asyncio.timeout(seconds):
                    await self._send(command, arguments, payload)
                    event, data = await self._receive(command, on_progress, max_payload_bytes)
            except TimeoutError:
                await self._over(errors.ProgramHung(self.stage, seconds, self._lines()))
            except asyncio.IncompleteReadError:
                await self._over(None)
            except EtfarmError as error:
                await self._over(error)
            except BaseException:
                self._ended = errors.RunnerClosed("The runner was stopped in the middle of a command.")
                self.kill()
                raise
            if event["event"] == "error":
                await self._explain(event)
        if event["event"] == "error":
            raise self._refusal(event)
        return event, data

    async def _explain(self, event: Event) -> None:
        """Adds what the runtime told on stderr, where the runner could not capture it."""
        mark = event.get("stderr_mark")
        if not mark:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MARK_SECONDS):
                while self._mark != mark:
                    self._marked.clear()
                    await self._marked.wait()
        event["log"] = [str(line) for line in self._since]
        reason = next((line.message for line in self._since if line.source == "runtime"), "")
        if reason:
            event["message"] += f": {reason}"

    def distrust(self, error: EtfarmError) -> None:
        """End the process after an invalid answer; every later command raises `error`."""
        self._ended = self._ended or error
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, now; harmless where it has ended."""
        if self._ended is None:
            self._ended = errors.RunnerClosed("The runner is closed.")
        self._child.kill()

    async def reap(self) -> int | None:
        """Waits until the process and its pipes are gone; its exit code, negative for a signal, None where nobody can know it."""
        self._child.stdin.close()
        try:
            code = await asyncio.wait_for(self._child.wait(), _REAP_SECONDS)
        except TimeoutError:
            code = None
        done, _ = await asyncio.wait({self._stderr}, timeout=0.5)
        if not done:
            self._stderr.cancel()
        return code

    async def _send(self, command: str, arguments: Sequence[tuple[str, Argument]], payload: bytes | None) -> None:
        words = [command, *(f"{key}={quote(str(value), safe='/,.-_:+')}" for key, value in arguments)]
        if payload is not None:
            words.append(f"bytes={len(payload)}")
        stdin = self._child.stdin
        # A process that is gone already is told from its end of the stream, with its exit code.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(" ".join(words).encode() + b"\n")
            if payload:
                stdin.write(payload)
            await stdin.drain()

    async def _receive(self, command: str, on_progress: OnEvent | None, max_payload_bytes: int) -> tuple[Event, bytes]:
        stdout = self._child.stdout
        while True:
            try:
                line = await stdout.readuntil(b"\n")
                event = json.loads(line)
                kind = answers.text(event, "event")
                if kind == "log":
                    self._take(LogLine("runtime", *(answers.text(event, key) for key in ("level", "where", "message"))))
                elif kind == "progress":
                    self.stage = answers.text(event, "stage")
                    answers.whole(event, "done")
                    answers.whole(event, "elapsed_ns")
                    if on_progress is not None:
                        on_progress(event)
                elif kind in ("result", "error") and event["command"] == command:
                    if kind == "error":
                        _check_error(event)
                    size = answers.whole(event, "payload_bytes", max_payload_bytes) if "payload_bytes" in event else 0
                    return event, await stdout.readexactly(size) if size else b""
                else:
                    raise ValueError(f"a {kind} of {event.get('command')!r}")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, asyncio.LimitOverrunError) as error:
                raise errors.RunnerBroken(f"The runner's answer to {command} is no protocol: {error}.") from error

    async def _over(self, error: EtfarmError | None) -> NoReturn:
        """Ends the process and raises `error`, or what its exit code tells."""
        if error is not None:
            self._ended = error
        # At the end of its stream the process has its exit code already, which this cannot change; what it forked goes.
        self._child.kill()
        code = await self.reap()
        if self._ended is None:
            self._ended = self._child.lost or self._crash(code)
        raise self._ended

    def _crash(self, code: int | None) -> EtfarmError:
        lines = self._lines()
        if self.stage == _FIRST_STAGE and code == -signal.SIGKILL:
            return errors.RunnerKilled(self.stage, lines)
        if self.stage == _FIRST_STAGE:
            how = f"by {_signal_name(-code)}" if code is not None and code < 0 else f"with exit code {code}"
            said = "".join(f": {text}" for text in ["; ".join(lines[-3:])] if text)
            message = f"The runner ended {how} before it had a program{said}."
            return errors.RunnerBroken(message, stage=self.stage, exit_code=code)
        fatal = next((line.message for line in reversed(self._log) if line.level == "F"), "")
        if not fatal and code == -signal.SIGABRT:
            # Where nothing captures the log, it has no levels, and the abort's own words come last. What was said before this
            # command is about something else.
            fatal = next((line.message for line in reversed(self._since) if line.source == "runtime"), "")
        if self._is_about_memory(fatal):
            return errors.ProgramOutOfMemory(self.stage, self.limits.data_bytes, fatal, lines)
        if code == -signal.SIGKILL and (ran_out := self._child.memory_ran_out) is not False:
            # Where nobody tells, it is the likeliest: nobody else sends SIGKILL unasked.
            who = "the kernel killed it (SIGKILL)" if ran_out else "it was killed (SIGKILL), as systems do then"
            killed = errors.ProgramOutOfMemory(self.stage, None, who, lines)
            killed.metadata["signal"] = _signal_name(signal.SIGKILL)
            return killed
        return errors.ProgramCrashed(
            self.stage,
            signal=_signal_name(-code) if code is not None and code < 0 else "",
            exit_code=code if code is None or code >= 0 else None,
            abort_message=fatal,
            log=lines,
            without_data=self.without_data,
        )

    def _refusal(self, event: Mapping[str, Any]) -> EtfarmError:
        """The error that an `error` event describes; the process is still usable."""
        stage, message, runtime_code = self.stage, str(event["message"]), event.get("runtime_code") or ""
        log, names = list(answers.texts(event, "log", ())), list(answers.texts(event, "names", ()))
        limited = self.limits.data_bytes is not None
        match event["code"]:
            case "INPUT_MISMATCH":
                return errors.InputMismatch(stage, message)
            case "OPERATOR_MISSING":
                return errors.OperatorMissing(stage, names)
            case "BACKEND_MISSING":
                return errors.BackendMissing(stage, names)
            case "DATA_MISSING":
                return errors.DataMissing(stage, names)
            case "UNSUPPORTED":
                return errors.RunnerLacks(stage, message)
            case "OUT_OF_MEMORY":
                return errors.ProgramOutOfMemory(stage, self.limits.data_bytes, message, log)
            case "RUNTIME" if limited and (runtime_code in _MEMORY_CODES or self._is_about_memory("\n".join(log))):
                return errors.ProgramOutOfMemory(stage, self.limits.data_bytes, message, log)
            case "RUNTIME":
                return errors.ProgramFailed(stage, message, runtime_code, log)
            case "SYSTEM":
                return errors.CoresUnavailable(stage, message)
            case "FILE":
                return errors.DeviceStorageFailed(stage, message)
            case code:
                return errors.RunnerBroken(f"The runner refused a command: {message}.", stage=stage, code=code)

    def _is_about_memory(self, text: str) -> bool:
        return any(word in text.lower() for word in _MEMORY_WORDS)

    def _take(self, line: LogLine) -> None:
        self._log.append(line)
        if self._on_log is not None:
            self._on_log(line)

    def _lines(self) -> list[str]:
        return [str(line) for line in self._log]

    async def _read_stderr(self) -> None:
        stderr = self._child.stderr
        rest = b""
        while chunk := await stderr.read(1 << 16):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > 1 << 16:  # no newline in sight: a program that writes binary to stderr
                whole, rest = [*whole, rest], b""
            for line in whole:
                self._take_stderr(line)
        if rest:
            self._take_stderr(rest)

    def _take_stderr(self, raw: bytes) -> None:
        text = raw.decode(errors="replace")
        if text.startswith(_MARK_PREFIX):
            self._mark = text
            self._marked.set()
            return
        told = _RUNTIME_LINE.fullmatch(text)
        line = LogLine("runtime", "", told[1], told[2]) if told else LogLine("stderr", "", "", text)
        self._since.append(line)
        self._take(line)


def room_for_payload() -> int:
    """Return how many bytes of tensors an answer may have: a part of this machine's free memory."""
    try:
        available = re.search(r"^MemAvailable:\s+(\d{1,15}) kB", _MEMORY_INFO.read_text(), re.MULTILINE)
    except OSError:
        available = None
    free = int(available[1]) * 1024 // _MEMORY_SHARE if available else _LEAST_PAYLOAD_BYTES
    return min(max(free, _LEAST_PAYLOAD_BYTES), _MOST_PAYLOAD_BYTES)


def _check_error(event: Event) -> None:
    """Validate the fields of an `error` event, and make its texts such as any message can carry."""
    event |= {key: answers.text(event, key) for key in ("code", "message")}
    event |= {key: list(answers.texts(event, key)) for key in ("log", "names") if key in event}
    if event.get("runtime_code") is not None:
        event["runtime_code"] = answers.text(event, "runtime_code")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
