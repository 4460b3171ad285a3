"""The child process that runs programs with ExecuTorch's Python binding, over the protocol of native/PROTOCOL.md.

`python -P -m etfarm.device_agents.runners.python_child [--limit-data-bytes N]`. Only this process imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.runners.python_child import counters
from etfarm.device_agents.runners.python_child.channel import Channel, Command, parse_integer
from etfarm.device_agents.runners.python_child.generation import (
    MAX_CONTEXT_TOKENS,
    MAX_GENERATED_TOKENS,
    MAX_REPETITIONS,
    Generation,
    read_context,
    read_tokens,
)
from etfarm.device_agents.runners.python_child.refusals import Refusal
from etfarm.device_agents.runners.python_child.score import Score
from etfarm.device_agents.runners.python_child.session import Session, import_runtime
from etfarm.device_agents.runners.python_child.token_methods import LanguageModel, Methods, ModelMethods

_PROTOCOL: Final = 1
_MAX_PAYLOAD_BYTES: Final = 1 << 33
_MAX_TIME_NS: Final = 1 << 60
_PR_SET_PDEATHSIG: Final = 1
_SEND_NS: Final = 50_000_000
"""Minimum time between two `tokens` events."""
_MAX_TOKENS_OF_EVENT: Final = 256

Send = Callable[[dict[str, Any]], None]
"""Callback that sends an event."""


class Child:
    """The protocol's command loop, which answers one command after the other."""

    def __init__(self, channel: Channel, session: Session) -> None:
        self._channel = channel
        self._session = session
        self._replied = 0
        self._commands: dict[str, Callable[[Command], tuple[dict[str, Any], bytes] | dict[str, Any]]] = {
            "hello": self._hello, "self_test": self._self_test, "threads": self._threads, "affinity": self._affinity,
            "load": self._load, "method": self._method, "load_method": self._load_method,
            "select": self._select, "input": self._input,
            "default_inputs": self._default_inputs, "run": self._run, "measure": self._measure, "trace": self._trace,
            "debug": self._debug, "outputs": self._outputs, "memory": self._memory, "generate": self._generate,
            "score": self._score,
            "stream": self._stream, "stop": self._stop, "quit": self._quit,
        }  # fmt: skip

    def serve(self, line: bytes) -> bool:
        """Answer one line; return False once the session is over."""
        command = Command(line)
        try:
            if command.bad is not None:
                raise command.bad
            if (size := command.take("bytes")) is not None:
                # Read the payload whatever the command is, so that it is not parsed as commands.
                count = parse_integer(size, "bytes", 0, _MAX_PAYLOAD_BYTES)
                if command.name in ("input", "generate", "score", "stream"):
                    command.payload = self._channel.read(count)
                else:
                    self._channel.skip(count)
            if command.name not in self._commands:
                raise Refusal("BAD_COMMAND", f"there is no command '{command.name[:40]}'")
            answer = self._commands[command.name](command)
            body, payload = answer if isinstance(answer, tuple) else (answer, b"")
            self._channel.send({"event": "result", "command": command.name} | body, payload)
        except EOFError:
            return False
        except Refusal as refusal:
            self.refuse(command.name, refusal)
        except MemoryError:
            self.refuse(command.name, Refusal("OUT_OF_MEMORY", "an allocation failed", "MemoryAllocationFailed"))
        except Exception as error:  # noqa: BLE001 - every command gets one reply
            self.refuse(command.name, Refusal("RUNTIME", f"uncaught exception: {type(error).__name__}: {error}", "Internal"))
        return command.name != "quit"

    def refuse(self, command: str, refusal: Refusal) -> None:
        """Send an error event."""
        self._replied += 1
        mark = f"etfarm-error-{os.getpid()}-{self._replied}"
        # ExecuTorch's reasons go to stderr only; this line marks the end of the command's output there.
        with contextlib.suppress(OSError):
            os.write(2, f"{mark}\n".encode())
        event: dict[str, Any] = {"event": "error", "command": command, "code": refusal.code, "message": str(refusal)}
        event |= {"runtime_code": refusal.runtime_code or None, "names": refusal.names, "log": [], "stderr_mark": mark}
        self._channel.send(event)

    def _report(self, stage: str, done: int, elapsed_ns: int) -> None:
        self._channel.send({"event": "progress", "stage": stage, "done": done, "elapsed_ns": elapsed_ns})

    def _hello(self, command: Command) -> dict[str, Any]:
        command.finish()
        return {
            "protocol": _PROTOCOL,
            "executorch": version("executorch").partition("+")[0],
            "arch": platform.machine(),
            "backends": self._session.backends(),
            "operators": self._session.operators(),
            "commands": sorted(set(self._commands) - {"quit"}),
        }

    def _self_test(self, command: Command) -> dict[str, Any]:
        command.finish()
        # The binding cannot call a kernel without a program, so the test only checks that the kernels exist.
        if "aten::add.out" not in self._session.operators():
            raise Refusal("SELF_TEST", "aten::add.out is not registered", names=["aten::add.out"])
        return {"passed": self._session.backends()}

    def _threads(self, command: Command) -> dict[str, Any]:
        count = command.integer("n", 1, 1024)
        command.finish()
        return {"threads": self._session.set_threads(count)}

    def _affinity(self, command: Command) -> dict[str, Any]:
        cores = command.integers("cores", 0, 1023)
        command.finish()
        if not cores:
            raise Refusal("BAD_COMMAND", "affinity needs at least one core")
        # New threads inherit the affinity; existing threads need it set one by one.
        for task in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:
                continue  # the thread has ended meanwhile
            except (OSError, ValueError) as error:
                raise Refusal("SYSTEM", f"cannot bind to the cores {cores}: {getattr(error, 'strerror', error)}") from None
        return {"cores": cores}

    def _load(self, command: Command) -> dict[str, Any]:
        path, data = command.require("path"), command.take_all("data")
        command.finish()
        return self._session.load(Path(path), [Path(file) for file in data])

    def _method(self, command: Command) -> dict[str, Any]:
        name = command.require("name")
        command.finish()
        return self._session.describe(name)

    def _load_method(self, command: Command) -> dict[str, Any]:
        name, trace, debug = command.require("name"), command.integer("trace", 0, 1, 0), command.integer("debug", 0, 1, 0)
        keep = command.integer("keep", 0, 1, 0)
        command.finish()
        return self._session.load_method(name, bool(trace), bool(debug), bool(keep))

    def _select(self, command: Command) -> dict[str, Any]:
        name = command.require("name")
        command.finish()
        self._session.select(name)
        return {}

    def _input(self, command: Command) -> dict[str, Any]:
        index, kind = command.integer("index", 0, 1 << 20), command.take("kind") or "tensor"
        self._session.expected_input(index, kind)
        if kind == "tensor":
            dtype, shape = command.require("dtype"), command.integers("shape", 0, (1 << 31) - 1)
            dim_order = command.integers("dim_order", 0, 255)
            command.finish()
            self._session.set_tensor(index, dtype, shape, dim_order, command.payload)
            return {}
        value: int | float | bool | None = None
        if kind == "int":
            value = command.integer("value", -(1 << 63), (1 << 63) - 1)
        elif kind == "bool":
            value = bool(command.integer("value", 0, 1))
        elif kind == "double":
            value = _real(command.require("value"))
        command.finish()
        self._session.set_scalar(index, kind, value)
        return {}

    def _default_inputs(self, command: Command) -> tuple[dict[str, Any], bytes]:
        seed = command.integer("seed", 0, (1 << 63) - 1)
        command.finish()
        values, payload = self._session.default_inputs(seed)
        return {"values": values}, payload

    def _run(self, command: Command) -> dict[str, Any]:
        command.finish()
        return self._session.run()

    def _measure(self, command: Command) -> tuple[dict[str, Any], bytes]:
        plan = {
            "warmup": command.integer("warmup", 0, 10**9, 10),
            "iterations": command.integer("iterations", 1, 10**9, 100),
            "min_time_ns": command.integer("min_time_ns", 0, _MAX_TIME_NS, 10**9),
            "max_time_ns": command.integer("max_time_ns", 1, _MAX_TIME_NS, 60 * 10**9),
            "max_samples": command.integer("max_samples", 1, 10**8, 10**6),
            "steady": command.integer("steady", 0, 1, 0),
        }
        plan["max_warmup_ns"] = command.integer("max_warmup_ns", 1, _MAX_TIME_NS, plan["max_time_ns"])
        command.finish()
        return self._session.measure(plan, self._report)

    def _trace(self, command: Command) -> tuple[dict[str, Any], bytes]:
        iterations, warmup = command.integer("iterations", 1, 10**6), command.integer("warmup", 0, 10**6, 1)
        path = command.require("path")
        command.finish()
        return self._session.trace(iterations, warmup, Path(path), self._report)

    def _generate(self, command: Command) -> tuple[dict[str, Any], bytes]:
        plan = Generation(
            _model_methods(command),
            command.integer("depth", 0, MAX_CONTEXT_TOKENS, 0),
            command.integer("tokens", 1, MAX_GENERATED_TOKENS),
            command.integer("warmup", 0, MAX_REPETITIONS, 1),
            command.integer("repetitions", 1, MAX_REPETITIONS, 5),
            command.integer("max_time_ns", 1, _MAX_TIME_NS, 60 * 10**9),
            bool(command.integer("reload", 0, 1, 0)),
        )
        command.finish()
        return self._session.generate(plan.with_context(command.payload), self._report)

    def _score(self, command: Command) -> tuple[dict[str, Any], bytes]:
        model = _model_methods(command)
        window = command.integer("window", 1, MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)
        rows = tuple(command.integers("rows", 0, MAX_CONTEXT_TOKENS))
        max_time_ns = command.integer("max_time_ns", 1, _MAX_TIME_NS, 60 * 10**9)
        is_reloaded = bool(command.integer("reload", 0, 1, 0))
        command.finish()
        plan = Score(model, window, rows, max_time_ns, is_reloaded, read_tokens(command.payload))
        return self._session.score(plan, self._report)

    def _stream(self, command: Command) -> dict[str, Any]:
        names, depth = _model_methods(command), command.integer("depth", 0, MAX_CONTEXT_TOKENS, 0)
        tokens = command.integer("tokens", 1, MAX_GENERATED_TOKENS)
        max_time_ns = command.integer("max_time_ns", 1, _MAX_TIME_NS, 600 * 10**9)
        stop_tokens = tuple(command.integers("stop_tokens", 0, (1 << 31) - 1))
        command.finish()
        plan = Stream(names, depth, tokens, max_time_ns, stop_tokens, read_context(command.payload, depth))
        return stream(self._session, plan, self._channel.send, self._channel.has_input)

    def _stop(self, command: Command) -> dict[str, Any]:
        # Nothing is left to stop: what was in progress has ended because this command was waiting.
        command.finish()
        return {}

    def _debug(self, command: Command) -> dict[str, Any]:
        path, dump = command.require("path"), command.require("dump")
        max_bytes = command.integer("max_bytes", 0, (1 << 63) - 1, (1 << 63) - 1)
        command.finish()
        return self._session.debug(Path(path), Path(dump), max_bytes, self._report)

    def _outputs(self, command: Command) -> tuple[dict[str, Any], bytes]:
        command.finish()
        values, payload = self._session.outputs()
        return {"values": values}, payload

    def _memory(self, command: Command) -> dict[str, Any]:
        command.finish()
        # Memory of the whole process: unlike the peak, no report attributes these figures to the program.
        names = {"rss_bytes": "VmRSS", "peak_rss_bytes": "VmHWM", "data_bytes": "VmData"}
        return {name: counters.status_bytes(key) for name, key in names.items()}

    def _quit(self, command: Command) -> dict[str, Any]:
        command.finish()
        return {}


def _model_methods(command: Command) -> ModelMethods:
    prefill = command.require("prefill")
    methods = ModelMethods(
        prefill,
        command.take("decode") or prefill,
        command.integer("token_input", 0, 1 << 20, 0),
        command.integer("position_input", 0, 1 << 20, 1),
        command.integer("max_chunk", 1, MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS),
        command.take("embedding") or "",
        tuple(command.take_all("encoder")),
    )
    if methods.encoders and not methods.embedding:
        raise Refusal("BAD_COMMAND", "encoder needs embedding")
    others = [*methods.encoders, methods.embedding] if methods.embedding else []
    if len({*others, methods.prefill, methods.decode}) != len(others) + len({methods.prefill, methods.decode}):
        raise Refusal("BAD_COMMAND", "a method can be only one of encoder, embedding and prefill or decode")
    return methods


def _real(text: str) -> float:
    try:
        return float.fromhex(text) if "x" in text.lower() else float(text)
    except (ValueError, OverflowError):
        raise Refusal("BAD_COMMAND", "value must be a number") from None


def restrain() -> None:
    """Disable core dumps, and end this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_data(data_bytes: int) -> None:
    """Limit writable memory beyond what Python and torch have taken, so that programs have the same budget in every runner."""
    limit = (counters.status_bytes("VmData") or 0) + data_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(argv: list[str]) -> int:
    """Run the child process until its commands end."""
    limit: int | None = None
    if argv:
        if len(argv) != 2 or argv[0] != "--limit-data-bytes" or not re.fullmatch(r"[1-9][0-9]{0,17}", argv[1]):
            print("usage: python_child [--limit-data-bytes N]", file=sys.stderr)
            return 2
        limit = int(argv[1])
    restrain()
    channel = Channel()
    runtime = import_runtime()
    if limit is not None:
        limit_data(limit)
    child = Child(channel, Session(runtime))
    while True:
        try:
            line = channel.read_line()
        except Refusal as refusal:
            child.refuse("", refusal)
            continue
        if line is None or not child.serve(line):
            break
    sys.stderr.flush()
    # Skip the destructors of backends: they have nothing left to do, and some of them wait for threads.
    os._exit(0)


@dataclass(frozen=True)
class Stream:
    """The arguments of `stream`; PROTOCOL.md describes them."""

    model: ModelMethods
    depth: int
    tokens: int
    max_time_ns: int
    stop_tokens: tuple[int, ...]
    context: tuple[int, ...]


def stream(methods: Methods, plan: Stream, send: Send, has_input: Callable[[], bool]) -> dict[str, Any]:
    """Process the prompt and generate tokens until there are enough, or a stop token, the time or another command ends it."""
    for name in (plan.model.prefill, plan.model.decode):
        if methods.loaded(name).trace:
            raise Refusal("BAD_STATE", f"method '{name}' is loaded with a tracer, which costs time")
    model = LanguageModel(methods, plan.model)
    start_ns = time.monotonic_ns()

    def interruption(now_ns: int) -> str:
        if has_input():
            return "CANCELLED"
        return "MAX_TIME" if now_ns - start_ns >= plan.max_time_ns else ""

    begin, end, largest = plan.depth, len(plan.context), min(plan.model.max_chunk, model.prefill.most)
    reason, done = "", 0
    # `start_ns` at first: what takes one execution gets at least one token.
    now_ns = start_ns
    while begin < end and not (reason := interruption(now_ns)):
        count = min(largest, end - begin)
        # Tokens that are too few for prefill are executed one by one; the text may end between them.
        following = begin + (count if count >= model.prefill.least else 1)
        model.process(plan.context, begin, following)
        begin, now_ns = following, time.monotonic_ns()
    if not reason:
        outbox = _Outbox(send, now_ns - start_ns)
        from_ns = start_ns
        try:
            while not reason:
                token = model.latest.next_token()
                now_ns = time.monotonic_ns()
                outbox.add(token, now_ns - from_ns, now_ns)
                done += 1
                if token in plan.stop_tokens:
                    reason = "STOP_TOKEN"
                elif done == plan.tokens:
                    reason = "LENGTH"
                elif not (reason := interruption(now_ns)):
                    from_ns = time.monotonic_ns()
                    model.step(token, end + done - 1)
        finally:
            # After an error, too: the reader must know which tokens are in the context.
            outbox.send()
    return {"tokens": done, "finish_reason": reason, "duration_ns": time.monotonic_ns() - start_ns}


class _Outbox:
    """The tokens that were not sent yet."""

    def __init__(self, send: Send, prefill_ns: int) -> None:
        self._send = send
        self._prefill_ns: int | None = prefill_ns
        self._tokens: list[int] = []
        self._times: list[int] = []
        self._sent_ns = 0

    def add(self, token: int, token_ns: int, now_ns: int) -> None:
        """Add a token that was selected now; the first one is sent at once."""
        self._tokens.append(token)
        self._times.append(token_ns)
        if now_ns - self._sent_ns >= _SEND_NS or len(self._tokens) == _MAX_TOKENS_OF_EVENT:
            self.send()
            self._sent_ns = now_ns

    def send(self) -> None:
        """Send the tokens, if there are any."""
        if self._tokens:
            self._send({"event": "tokens", "tokens": self._tokens, "token_ns": self._times, "prefill_ns": self._prefill_ns})
            self._tokens, self._times, self._prefill_ns = [], [], None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
