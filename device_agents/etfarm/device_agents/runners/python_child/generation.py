"""Text generation: the loop over a language model's executions, greedy and timed token by token."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NoReturn, Protocol

from etfarm.device_agents.runners.python_child import counters
from etfarm.device_agents.runners.python_child.passes import PROGRESS_NS, UNSET, LoadedMethod, Report, execute
from etfarm.device_agents.runners.python_child.pte import FileValue
from etfarm.device_agents.runners.python_child.refusals import Refusal, called
from etfarm.device_agents.runners.python_child.values import INTEGERS, Mismatch, integer_tensor, most_likely

MAX_CONTEXT_TOKENS: Final = 1 << 22
MAX_GENERATED_TOKENS: Final = 1 << 16
MAX_REPETITIONS: Final = 1000
_TOKEN_BYTES: Final = 4


class Methods(Protocol):
    """The loaded methods, and their inputs."""

    def loaded(self, name: str) -> LoadedMethod:
        """Return a loaded method."""

    def inputs(self, name: str) -> list[Any]:
        """Return the inputs of a loaded method; those that are not set are UNSET."""

    def load_method(self, name: str, trace: bool, debug: bool, keep: bool) -> dict[str, Any]:
        """Load a method; others stay loaded with `keep`."""


@dataclass(frozen=True)
class Generation:
    """The arguments of `generate`; PROTOCOL.md describes them."""

    prefill: str
    decode: str
    token_input: int
    position_input: int
    max_chunk: int
    depth: int
    tokens: int
    warmup: int
    repetitions: int
    max_time_ns: int
    reload: bool
    context: tuple[int, ...] = ()

    def with_context(self, payload: bytes) -> Generation:
        """Return the arguments with the tokens of the payload."""
        if len(payload) % _TOKEN_BYTES or len(payload) > MAX_CONTEXT_TOKENS * _TOKEN_BYTES:
            raise Refusal("BAD_COMMAND", f"the payload must be at most {MAX_CONTEXT_TOKENS} int32 tokens")
        context = tuple(array("i", payload))
        if len(context) <= self.depth:
            raise Refusal("BAD_COMMAND", "the payload must have more tokens than depth")
        for index, token in enumerate(context):
            if token < 0:
                raise Refusal("BAD_COMMAND", f"token {index} is negative")
        return replace(self, context=context)


def generate(methods: Methods, plan: Generation, report: Report) -> tuple[dict[str, Any], bytes]:
    """Fill the context, then process the prompt and generate tokens, again and again."""
    for name in (plan.prefill, plan.decode):
        if methods.loaded(name).trace:
            raise Refusal("BAD_STATE", f"method '{name}' is loaded with a tracer, which costs time")
    loop = _Loop(methods, plan, report)
    rows = array("q")
    gc.collect()
    gc.disable()
    try:
        loop.enter("WARMUP" if plan.warmup else "TIMED")
        start_ns = time.monotonic_ns()
        for _ in range(plan.warmup):
            loop.prepare()
            loop.repeat(start_ns)
        warmup_ns = time.monotonic_ns() - start_ns
        loop.prepare()
        if plan.warmup:
            loop.enter("TIMED")
        done = elapsed = 0
        before = counters.Usage.now()
        start_ns = time.monotonic_ns()
        while done < plan.repetitions and (not done or elapsed < plan.max_time_ns):
            if done:
                loop.prepare()
            rows += loop.repeat(start_ns)
            done, elapsed = done + 1, time.monotonic_ns() - start_ns
        after = counters.Usage.now()
    finally:
        gc.enable()
    result = {
        "warmup": plan.warmup,
        "warmup_ns": warmup_ns,
        "repetitions": done,
        "tokens": plan.tokens,
        "duration_ns": elapsed,
        "stop_reason": "MAX_TIME" if done < plan.repetitions else "ENOUGH",
        "first_run_ns": loop.first_run_ns,
        "vocabulary": loop.vocabulary,
        **after.since(before),
        # Nearly all of it belongs to Python and torch, whatever the program.
        "peak_rss_bytes": None,
    }
    return result, rows.tobytes()


class _Loop:
    """Repetitions of a plan."""

    def __init__(self, methods: Methods, plan: Generation, report: Report) -> None:
        self._methods = methods
        self._plan = plan
        self._report = report
        self._stage = ""
        self._generated = self._reported_ns = 0
        self._is_prepared = False
        self.first_run_ns: int | None = None
        """Duration of the first execution of the prefill method."""
        self.vocabulary = 0
        self._bind()
        self._latest = self._prefill

    def enter(self, stage: str) -> None:
        """Begin a stage."""
        self._stage, self._generated, self._reported_ns = stage, 0, time.monotonic_ns()
        self._report(stage, 0, 0)

    def prepare(self) -> None:
        """Prepare the methods' state for a repetition, which writes behind the context that is filled here."""
        plan, methods = self._plan, self._methods
        if self._is_prepared and not plan.reload:
            return
        if plan.reload and self._prefill.has_run:
            methods.load_method(plan.prefill, trace=False, debug=False, keep=False)
            if plan.decode != plan.prefill:
                methods.load_method(plan.decode, trace=False, debug=False, keep=True)
            self._bind()
        self._is_prepared = True
        self._process(0, plan.depth)

    def repeat(self, begun_ns: int) -> array[int]:
        """Run one repetition and return its row: the prompt's time, the tokens' times, and the tokens."""
        plan, end = self._plan, len(self._plan.context)
        times, tokens = array("q"), array("q")
        start_ns = time.monotonic_ns()
        self._process(plan.depth, end)
        prefill_ns = time.monotonic_ns() - start_ns
        tokens.append(self._latest.next_token())
        times.append(time.monotonic_ns() - start_ns)
        for index in range(1, plan.tokens):
            from_ns = time.monotonic_ns()
            self._latest = self._decode
            self._decode.execute(tokens[-1:], end + index - 1)
            tokens.append(self._decode.next_token())
            to_ns = time.monotonic_ns()
            times.append(to_ns - from_ns)
            if to_ns - self._reported_ns >= PROGRESS_NS:
                self._report(self._stage, self._generated + index + 1, to_ns - begun_ns)
                self._reported_ns = to_ns
        self._generated += plan.tokens
        if self.first_run_ns is None:
            self.first_run_ns = self._prefill.first_run_ns
        self.vocabulary = self._latest.vocabulary
        return array("q", [prefill_ns]) + times + tokens

    def _bind(self) -> None:
        plan = self._plan
        self._prefill = _TokenMethod(self._methods, plan.prefill, plan)
        self._decode = self._prefill if plan.decode == plan.prefill else _TokenMethod(self._methods, plan.decode, plan)

    def _process(self, begin: int, end: int) -> None:
        """Execute the tokens from `begin` to `end` in chunks; where a chunk is too short for prefill, one by one."""
        context, largest = self._plan.context, min(self._plan.max_chunk, self._prefill.most)
        while begin < end:
            chunk = min(largest, end - begin)
            together = chunk >= self._prefill.least
            self._latest = self._prefill if together else self._decode
            count = chunk if together else 1
            self._latest.execute(context[begin : begin + count], begin)
            begin += count


class _TokenMethod:
    """A loaded method of a language model, which takes tokens and their position and returns logits."""

    def __init__(self, methods: Methods, name: str, plan: Generation) -> None:
        self._loaded = methods.loaded(name)
        self._inputs = list(methods.inputs(name))
        self._token_input, self._position_input = plan.token_input, plan.position_input
        if self._token_input == self._position_input:
            self._refuse("the tokens and their positions must be different inputs")
        self._tokens = self._integers(self._token_input, "tokens")
        self._positions = self._integers(self._position_input, "positions")
        for index, value in enumerate(self._inputs):
            if value is UNSET and index not in (self._token_input, self._position_input):
                self._refuse(f"input {index} is not set")
        self.most = self._tokens.shape[-1]
        """Maximum number of tokens of one execution."""
        self.least = 1 if self._tokens.dynamic else self.most
        self.vocabulary = 0
        """Number of logits for each token."""

    @property
    def has_run(self) -> bool:
        """Whether the method was executed since it was loaded."""
        return self._loaded.first_run_ns is not None

    @property
    def first_run_ns(self) -> int | None:
        """Duration of the first execution after loading."""
        return self._loaded.first_run_ns

    def execute(self, tokens: Sequence[int], position: int) -> None:
        """Execute once."""
        count = 1 if self._positions.shape[-1] == 1 else len(tokens)
        self._inputs[self._token_input] = self._tensor(self._token_input, self._tokens, tokens)
        self._inputs[self._position_input] = self._tensor(
            self._position_input, self._positions, range(position, position + count)
        )
        execute(self._loaded, self._inputs)

    def next_token(self) -> int:
        """Return the most likely token after the last one of the latest execution."""
        outputs = called("outputs", lambda: self._loaded.method.get_outputs(clone_outputs=False))
        try:
            best, self.vocabulary = most_likely(outputs)
        except Mismatch as error:
            self._refuse(str(error))
        if best is None:
            name = self._loaded.facts.name
            raise Refusal("RUNTIME", f"method '{name}' returned logits without a largest one: all are NaN or -inf")
        return best

    def _integers(self, index: int, what: str) -> FileValue:
        inputs = self._loaded.facts.inputs
        if index >= len(inputs):
            self._refuse(f"input {index} ({what}) does not exist: it takes {len(inputs)}")
        value = inputs[index]
        if value.kind != "tensor":
            self._refuse(f"input {index} ({what}) is not a tensor")
        if value.dtype not in INTEGERS:
            self._refuse(f"input {index} ({what}) must be int64 or int32, not {value.dtype}")
        if not value.shape or prod(value.shape) != value.shape[-1] or not value.shape[-1]:
            self._refuse(f"input {index} ({what}) must have the shape [1, tokens] or [tokens], not {list(value.shape)}")
        return value

    def _tensor(self, index: int, expected: FileValue, values: Sequence[int]) -> Any:
        most, count = expected.shape[-1], len(values)
        if count > most or (count < most and not expected.dynamic):
            takes = f"{most} tokens" + (" at most" if expected.dynamic else "")
            self._refuse(f"input {index} takes {takes}, not {count}")
        return integer_tensor(values, expected.dtype, (*expected.shape[:-1], count))

    def _refuse(self, why: str) -> NoReturn:
        raise Refusal("INPUT_MISMATCH", f"method '{self._loaded.facts.name}' cannot generate text: {why}")
