"""Teacher forcing: the logits of a language model after given tokens."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any, Final

from etfarm.device_agents.runners.python_child.passes import PROGRESS_NS, Report
from etfarm.device_agents.runners.python_child.refusals import Refusal
from etfarm.device_agents.runners.python_child.token_methods import LanguageModel, Methods, ModelMethods

MAX_ROWS: Final = 1024


@dataclass(frozen=True)
class Score:
    """The arguments of `score`; PROTOCOL.md describes them."""

    model: ModelMethods
    window: int
    rows: tuple[int, ...]
    max_time_ns: int
    reload: bool
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments against each other.

        Raises:
            Refusal: there is no token, or the rows are not those of tokens.
        """
        if not self.tokens:
            raise Refusal("BAD_COMMAND", "the payload must have at least one token")
        if len(self.rows) > MAX_ROWS:
            raise Refusal("BAD_COMMAND", f"rows must be at most {MAX_ROWS}")
        if list(self.rows) != sorted(set(self.rows)) or (self.rows and self.rows[-1] >= len(self.tokens)):
            raise Refusal("BAD_COMMAND", "rows must be ascending indices of tokens")


def score(methods: Methods, plan: Score, report: Report) -> tuple[dict[str, Any], bytes]:
    """Execute the tokens one by one."""
    for name in (plan.model.prefill, plan.model.decode):
        if methods.loaded(name).trace:
            raise Refusal("BAD_STATE", f"method '{name}' is loaded with a tracer, which costs time")
    model = LanguageModel(methods, plan.model)
    probabilities, best, rows = array("f"), array("i"), bytearray()
    wanted = set(plan.rows)
    vocabulary = 0
    start_ns = reported_ns = time.monotonic_ns()
    report("SCORE", 0, 0)
    for index, token in enumerate(plan.tokens):
        if index and time.monotonic_ns() - start_ns >= plan.max_time_ns:
            break
        position = index % plan.window
        if position == 0 and plan.reload and (model.prefill.has_run or model.decode.has_run):
            methods.load_method(plan.model.prefill, trace=False, debug=False, keep=False)
            if plan.model.decode != plan.model.prefill:
                methods.load_method(plan.model.decode, trace=False, debug=False, keep=True)
            model = LanguageModel(methods, plan.model)
        model.step(token, position)
        logits = model.latest.last_logits().float()
        vocabulary = int(logits.shape[0])
        largest = _check(logits, plan.model.decode, index)
        best.append(largest)
        probabilities.append(_log_probability(logits, largest, index, plan))
        if index in wanted:
            rows += logits.contiguous().numpy().tobytes()
        if (now_ns := time.monotonic_ns()) - reported_ns >= PROGRESS_NS:
            report("SCORE", index + 1, now_ns - start_ns)
            reported_ns = now_ns
    result = {
        "tokens": len(best),
        "rows": sum(index < len(best) for index in plan.rows),
        "vocabulary": vocabulary,
        "duration_ns": time.monotonic_ns() - start_ns,
    }
    return result, probabilities.tobytes() + best.tobytes() + bytes(rows)


def _check(logits: Any, method: str, index: int) -> int:
    """Return the index of the largest logit, the lowest of equal ones."""
    if bool((logits.isnan() | (logits == float("inf"))).any()):
        raise Refusal("RUNTIME", f"method '{method}' returned logits with NaN or infinity after token {index}")
    best = int(logits.argmax())
    if float(logits[best]) == float("-inf"):
        raise Refusal("RUNTIME", f"method '{method}' returned only logits of -inf")
    return best


def _log_probability(logits: Any, largest: int, index: int, plan: Score) -> float:
    """Return the natural logarithm of the probability of the token after `index`; 0 if none follows in its window."""
    if index + 1 == len(plan.tokens) or (index + 1) % plan.window == 0:
        return 0.0
    following = plan.tokens[index + 1]
    if following >= len(logits):
        raise Refusal(
            "INPUT_MISMATCH",
            f"token {index + 1} is {following}, but method '{plan.model.decode}' returns {len(logits)} logits",
        )
    above = logits.double() - float(logits[largest])
    return float(above[following] - above.exp().sum().log())
