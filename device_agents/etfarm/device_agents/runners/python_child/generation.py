"""Text generation: the loop over a language model's executions, greedy and timed token by token."""

from __future__ import annotations

import gc
import time
from array import array
from dataclasses import dataclass, replace
from typing import Any, Final

from etfarm.device_agents.runners.python_child import counters
from etfarm.device_agents.runners.python_child.passes import PROGRESS_NS, Report
from etfarm.device_agents.runners.python_child.refusals import Refusal
from etfarm.device_agents.runners.python_child.token_methods import LanguageModel, Methods, ModelMethods

MAX_CONTEXT_TOKENS: Final = 1 << 22
MAX_GENERATED_TOKENS: Final = 1 << 16
MAX_REPETITIONS: Final = 1000
_TOKEN_BYTES: Final = 4


def read_tokens(payload: bytes) -> tuple[int, ...]:
    """Return the tokens of a command's payload.

    Raises:
        Refusal: it is not int32, is too long, or has a negative token.
    """
    if len(payload) % _TOKEN_BYTES or len(payload) > MAX_CONTEXT_TOKENS * _TOKEN_BYTES:
        raise Refusal("BAD_COMMAND", f"the payload must be at most {MAX_CONTEXT_TOKENS} int32 tokens")
    tokens = tuple(array("i", payload))
    for index, token in enumerate(tokens):
        if token < 0:
            raise Refusal("BAD_COMMAND", f"token {index} is negative")
    return tokens


@dataclass(frozen=True)
class Generation:
    """The arguments of `generate`; PROTOCOL.md describes them."""

    model: ModelMethods
    depth: int
    tokens: int
    warmup: int
    repetitions: int
    max_time_ns: int
    reload: bool
    context: tuple[int, ...] = ()

    def with_context(self, payload: bytes) -> Generation:
        """Return the arguments with the tokens of the payload."""
        return replace(self, context=read_context(payload, self.depth))


def read_context(payload: bytes, depth: int) -> tuple[int, ...]:
    """Return the tokens of a payload, of which there must be more than `depth`."""
    context = read_tokens(payload)
    if len(context) <= depth:
        raise Refusal("BAD_COMMAND", "the payload must have more tokens than depth")
    return context


def generate(methods: Methods, plan: Generation, report: Report) -> tuple[dict[str, Any], bytes]:
    """Fill the context, then process the prompt and generate tokens, again and again."""
    for name in plan.model.names:
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
        self._model = LanguageModel(methods, plan.model)

    def enter(self, stage: str) -> None:
        """Begin a stage."""
        self._stage, self._generated, self._reported_ns = stage, 0, time.monotonic_ns()
        self._report(stage, 0, 0)

    def prepare(self) -> None:
        """Prepare the methods' state for a repetition, which writes behind the context that is filled here."""
        plan, methods = self._plan, self._methods
        if self._is_prepared and not plan.reload:
            return
        if plan.reload and self._model.prefill.has_run:
            for index, name in enumerate(plan.model.names):
                methods.load_method(name, trace=False, debug=False, keep=index > 0)
            self._model = LanguageModel(methods, plan.model)
        self._is_prepared = True
        self._model.process(plan.context, 0, plan.depth)

    def repeat(self, begun_ns: int) -> array[int]:
        """Run one repetition and return its row: the prompt's time, the tokens' times, the tokens, and the parts of a flow."""
        plan, model, end = self._plan, self._model, len(self._plan.context)
        times, tokens = array("q"), array("q")
        model.take_parts()
        start_ns = time.monotonic_ns()
        encoded = model.encode(plan.depth)
        model.process(plan.context, plan.depth, end, encoded)
        prefill_ns = time.monotonic_ns() - start_ns
        tokens.append(model.latest.next_token())
        times.append(time.monotonic_ns() - start_ns)
        end += encoded
        of_prefill = model.take_parts()
        for index in range(1, plan.tokens):
            from_ns = time.monotonic_ns()
            model.step(tokens[-1], end + index - 1)
            tokens.append(model.latest.next_token())
            to_ns = time.monotonic_ns()
            times.append(to_ns - from_ns)
            if to_ns - self._reported_ns >= PROGRESS_NS:
                self._report(self._stage, self._generated + index + 1, to_ns - begun_ns)
                self._reported_ns = to_ns
        of_decode = model.take_parts()
        self._generated += plan.tokens
        if self.first_run_ns is None:
            self.first_run_ns = model.prefill.first_run_ns
        self.vocabulary = model.latest.vocabulary
        parts = [value for pair in zip(of_prefill, of_decode, strict=True) for part in pair for value in part]
        return array("q", [prefill_ns]) + times + tokens + array("q", parts)
