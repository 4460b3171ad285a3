"""The runner's process: a line protocol over pipes; always killed with all its forked processes, and always reaped.

One request is in progress at a time. Whatever interrupts it - a deadline, a cancelled task, a reply that violates the protocol -
ends the process, since later replies could no longer be matched with commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

from etfarm.device_agents.runners import answers, errors
from etfarm.device_agents.runners.child import Child, Spawn, spawn_here
from etfarm.wire.errors import EtfarmError, error_for

_MEMORY_INFO: Final = Path("/proc/meminfo")
_MEMORY_SHARE: Final = 4
"""Divisor of the free memory that gives the largest payload: a hostile program may control the runner."""
_LEAST_PAYLOAD_BYTES: Final = 64 << 20
_MOST_PAYLOAD_BYTES: Final = 1 << 33
_KEPT_LINES: Final = 60
_REAP_SECONDS: Final = 5.0
"""Seconds within which a killed process ends, unless it is stuck in the kernel."""
_MEMORY_WORDS: Final = ("bad_alloc", "out of memory", "out_of_memory", "cannot allocate memory", "failed to allocate")
_MEMORY_CODES: Final = ("MemoryAllocationFailed", "DelegateMemoryAllocationFailed")
_FIRST_STAGE: Final = "START"
_RUNTIME_LINE: Final = re.compile(r"\[(\w+\.(?:cpp|h):\d+)\] (.*)", re.DOTALL)
"""A line of ExecuTorch's log that is not captured, as in its Python binding: without a level."""
_MARK_PREFIX: Final = "etfarm-error-"
_MARK_SECONDS: Final = 1.0
"""Seconds for reading a mark that was already written to stderr, unless other output fills the pipe."""

Argument = str | int | Path
Event = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits on a runner's resources."""

    data_bytes: int | None = None
    """Writable memory in bytes (RLIMIT_DATA: heap, thread stacks, anonymous mappings); None is no limit."""
    command_s: float = 120.0
    """Seconds for each command, in addition to the time of a measurement."""


@dataclass(frozen=True)
class LogLine:
    """One line that the runner wrote."""

    source: str
    """`runtime` (ExecuTorch's log) or `stderr`."""
    level: str
    """`D`, `I`, `E` or `F` from the runtime's log; empty for stderr, and if the runtime states none."""
    where: str
    """`file.cpp:line` from the runtime's log."""
    message: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.level, self.where, self.message) if part)


OnLog = Callable[[LogLine], None]
OnEvent = Callable[[Event], None]


class RunnerProcess:
    """A running runner, created by `start` and ended by `kill` and `reap`."""

    def __init__(self, child: Child, limits: Limits, on_log: OnLog | None) -> None:
        self._child = child
        self.limits = limits
        self._on_log = on_log
        self._lock = asyncio.Lock()
        self._log: deque[LogLine] = deque(maxlen=_KEPT_LINES)
        """Lines of the runtime's log and of stderr since the latest command."""
        self._stderr = asyncio.create_task(self._read_stderr(), name=f"runner {child.pid} stderr")
        self._since: deque[LogLine] = deque(maxlen=_KEPT_LINES)
        """Lines of stderr since the latest command."""
        self._mark = ""
        self._marked = asyncio.Event()
        self._ended: EtfarmError | None = None
        self.stage = _FIRST_STAGE
        """The current stage, for errors that name where the program failed."""
        self.without_data = True
        """Whether no .ptd was loaded, which is worth a hint if XNNPACK crashes."""

    @classmethod
    async def start(
        cls, command: Sequence[str], folder: Path, limits: Limits, on_log: OnLog | None = None, spawn: Spawn = spawn_here
    ) -> RunnerProcess:
        """Start `command` in `folder`.

        Args:
            command: the runner's command line.
            folder: its working folder.
            limits: limits for the process and its commands.
            on_log: takes each line of its log.
            spawn: starts the process, here or on another machine, where `folder` is too.

        Raises:
            RUNNER_BROKEN: the command cannot be started.
            As `spawn`.
        """
        options = [] if limits.data_bytes is None else ["--limit-data-bytes", str(limits.data_bytes)]
        return cls(await spawn([*command, *options], folder), limits, on_log)

    @property
    def pid(self) -> int:
        """The process id on the machine where it runs."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
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
        on_tokens: OnEvent | None = None,
        stop: asyncio.Event | None = None,
        max_payload_bytes: int = 0,
    ) -> tuple[Event, bytes]:
        """Send one command and return its result and payload.

        Args:
            command: the command's name.
            arguments: in order; a key may occur several times.
            payload: bytes that follow the line.
            stage: the stage that errors name, until a progress event names another.
            deadline_s: limit for the whole request; `Limits.command_s` by default.
            on_progress: takes progress events.
            on_tokens: takes events with tokens, which violate the protocol without it.
            stop: ends a `stream` early when it is set.
            max_payload_bytes: maximum size of the answer's payload; a larger one violates the protocol. For tensors, pass
                `room_for_payload()`.

        Raises:
            ProgramCrashed, ProgramHung, ProgramOutOfMemory: the process has ended.
            RUNNER_BROKEN, DEVICE_RUNNER_KILLED: the process has ended, and the program is not to blame.
            RUNNER_CLOSED: the process had ended before.
            InputMismatch, OPERATOR_MISSING, BACKEND_MISSING, ProgramFailed and others: the command was refused; the process is
                usable.
        """
        async with self._lock:
            if self._ended is not None:
                raise self._ended
            self.stage = stage
            # Failures of earlier commands must not explain one of this.
            self._since.clear()
            self._log.clear()
            seconds = self.limits.command_s if deadline_s is None else deadline_s
            try:
                async with asyncio.timeout(seconds):
                    async with self._stopped_by(stop):
                        await self._send(command, arguments, payload)
                        event, data = await self._receive(command, on_progress, on_tokens, max_payload_bytes)
            except TimeoutError:
                await self._over(errors.ProgramHung(self.stage, seconds, self._lines()))
            except asyncio.IncompleteReadError:
                await self._over(None)
            except EtfarmError as error:
                await self._over(error)
            except BaseException:
                self._ended = error_for("RUNNER_CLOSED", "The runner was stopped in the middle of a command.")
                self.kill()
                raise
            if event["event"] == "error":
                await self._explain(event)
        if event["event"] == "error":
            raise self._refusal(event)
        return event, data

    @contextlib.asynccontextmanager
    async def _stopped_by(self, stop: asyncio.Event | None) -> AsyncIterator[None]:
        """Send `stop` when the event is set meanwhile, and receive its answer at the end."""
        if stop is None:
            yield
            return
        is_sent = False

        async def send_stop() -> None:
            nonlocal is_sent
            await stop.wait()
            is_sent = True
            await self._send("stop", (), None)

        sending = asyncio.create_task(send_stop(), name=f"runner {self.pid} stop")
        try:
            yield
            if is_sent:
                await sending
                await self._receive("stop", None, None, 0)
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    async def _explain(self, event: Event) -> None:
        """Add the runtime's messages on stderr to the event, if the runner could not capture them."""
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
        """Send SIGKILL to the whole group at once; harmless if it has ended."""
        if self._ended is None:
            self._ended = error_for("RUNNER_CLOSED", "The runner is closed.")
        self._child.kill()

    async def reap(self) -> int | None:
        """Wait until the process and its pipes are gone; return the exit code, negative for a signal, None if unknown."""
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
        # If the process has ended, the end of its stream and its exit code report that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(" ".join(words).encode() + b"\n")
            if payload:
                stdin.write(payload)
            await stdin.drain()

    async def _receive(
        self, command: str, on_progress: OnEvent | None, on_tokens: OnEvent | None, max_payload_bytes: int
    ) -> tuple[Event, bytes]:
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
                elif kind == "tokens" and on_tokens is not None:
                    on_tokens(event)
                elif kind in ("result", "error") and event["command"] == command:
                    if kind == "error":
                        _check_error(event)
                    size = answers.whole(event, "payload_bytes", max_payload_bytes) if "payload_bytes" in event else 0
                    return event, await stdout.readexactly(size) if size else b""
                else:
                    raise ValueError(f"a {kind} of {event.get('command')!r}")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, asyncio.LimitOverrunError) as error:
                raise error_for("RUNNER_BROKEN", f"The runner's answer to {command} violates the protocol: {error}.") from error

    async def _over(self, error: EtfarmError | None) -> NoReturn:
        """End the process and raise `error`, or the error that its exit code implies."""
        if error is not None:
            self._ended = error
        # At the end of its stream the process already has its exit code, which the kill cannot change; its forked processes are
        # killed.
        self._child.kill()
        code = await self.reap()
        if self._ended is None:
            self._ended = self._child.lost or self._crash(code)
        raise self._ended

    def _crash(self, code: int | None) -> EtfarmError:
        lines = self._lines()
        if self.stage == _FIRST_STAGE and code == -signal.SIGKILL:
            return errors.runner_killed(self.stage, lines)
        if self.stage == _FIRST_STAGE:
            how = f"by {_signal_name(-code)}" if code is not None and code < 0 else f"with exit code {code}"
            detail = "".join(f": {text}" for text in ["; ".join(lines[-3:])] if text)
            message = f"The runner ended {how} before it had a program{detail}."
            return error_for("RUNNER_BROKEN", message, stage=self.stage, exit_code=code)
        fatal = next((line.message for line in reversed(self._log) if line.level == "F"), "")
        if not fatal and code == -signal.SIGABRT:
            # A log that is not captured has no levels, and the abort's own message comes last. Earlier lines belong to other
            # commands.
            fatal = next((line.message for line in reversed(self._since) if line.source == "runtime"), "")
        if self._is_about_memory(fatal):
            return errors.ProgramOutOfMemory(self.stage, self.limits.data_bytes, fatal, lines)
        if code == -signal.SIGKILL and (ran_out := self._child.memory_ran_out) is not False:
            # If the kernel does not report it, lack of memory is the likeliest cause: nothing else sends SIGKILL unasked.
            cause = "the kernel killed it (SIGKILL)" if ran_out else "it was killed (SIGKILL), as systems do then"
            killed = errors.ProgramOutOfMemory(self.stage, None, cause, lines)
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
        """Return the error that an `error` event describes; the process is still usable."""
        stage, message, runtime_code = self.stage, str(event["message"]), event.get("runtime_code") or ""
        log, names = list(answers.texts(event, "log", ())), list(answers.texts(event, "names", ()))
        limited = self.limits.data_bytes is not None
        match event["code"]:
            case "INPUT_MISMATCH":
                return errors.InputMismatch(stage, message)
            case "OPERATOR_MISSING":
                return errors.operator_missing(stage, names)
            case "BACKEND_MISSING":
                return errors.backend_missing(stage, names)
            case "DATA_MISSING":
                return errors.data_missing(stage, names)
            case "UNSUPPORTED":
                return errors.runner_lacks(stage, message)
            case "OUT_OF_MEMORY":
                return errors.ProgramOutOfMemory(stage, self.limits.data_bytes, message, log)
            case "RUNTIME" if limited and (runtime_code in _MEMORY_CODES or self._is_about_memory("\n".join(log))):
                return errors.ProgramOutOfMemory(stage, self.limits.data_bytes, message, log)
            case "RUNTIME":
                return errors.ProgramFailed(stage, message, runtime_code, log)
            case "SYSTEM":
                return errors.cores_unavailable(stage, message)
            case "FILE":
                return errors.device_storage_failed(stage, message)
            case code:
                return error_for("RUNNER_BROKEN", f"The runner refused a command: {message}.", stage=stage, code=code)

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
            if len(rest) > 1 << 16:  # no newline yet: the program writes binary data to stderr
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
        match = _RUNTIME_LINE.fullmatch(text)
        line = LogLine("runtime", "", match[1], match[2]) if match else LogLine("stderr", "", "", text)
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
    """Validate the fields of an `error` event, and make its texts valid for any protobuf message."""
    event |= {key: answers.text(event, key) for key in ("code", "message")}
    event |= {key: list(answers.texts(event, key)) for key in ("log", "names") if key in event}
    if event.get("runtime_code") is not None:
        event["runtime_code"] = answers.text(event, "runtime_code")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
