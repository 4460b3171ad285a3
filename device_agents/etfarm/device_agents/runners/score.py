"""The `score` command: what a runner is asked to do, and its answer."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etfarm.device_agents.runners import answers
from etfarm.wire.generation import SCORE_BYTES, logits_bytes
from etfarm.wire.language_models import MAX_VOCAB
from etfarm.wire.series import little_endian


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens to execute one after the other by a loaded method, whatever its logits say."""

    prefill_method: str
    decode_method: str
    """The method that executes the tokens."""
    tokens: Sequence[int]
    window: int
    """Number of tokens in one context: token i is at position i modulo it."""
    rows: Sequence[int]
    """Indices in `tokens`, ascending: after these, all logits are returned."""
    max_time_ns: int
    """No further token is executed after this time."""
    token_input: int = 0
    """Index of the input with the tokens."""
    position_input: int = 1
    """Index of the input with the position of the first token, or of each."""
    reload: bool = False
    """Whether to load the methods again before each window."""

    def arguments(self) -> list[tuple[str, str | int]]:
        """Return the command's arguments."""
        return [
            ("prefill", self.prefill_method), ("decode", self.decode_method), ("token_input", self.token_input),
            ("position_input", self.position_input), ("window", self.window), ("rows", ",".join(map(str, self.rows))),
            ("max_time_ns", self.max_time_ns), ("reload", int(self.reload)),
        ]  # fmt: skip

    def payload(self) -> bytes:
        """Return the command's payload."""
        return little_endian(array("i", self.tokens)).tobytes()

    def max_answer_bytes(self, vocabulary: int) -> int:
        """Return the maximum size of the answer's payload in bytes for a number of logits."""
        return len(self.tokens) * SCORE_BYTES + logits_bytes(len(self.rows), vocabulary)


@dataclass(frozen=True)
class Scored:
    """What a runner computed of the tokens."""

    tokens: int
    """Number of executed tokens."""
    rows: int
    """Number of rows of logits."""
    vocabulary: int
    duration_ns: int
    values: bytes
    """As ScoreResult.values."""


def read_scored(event: Mapping[str, Any], payload: bytes, request: ScoreRequest) -> Scored:
    """Return the content of an answer.

    Raises:
        BadAnswer: fields are missing or invalid, the payload does not have their size, or a value is NaN.
    """
    tokens = answers.whole(event, "tokens", len(request.tokens))
    rows = answers.whole(event, "rows", len(request.rows))
    vocabulary = answers.whole(event, "vocabulary", MAX_VOCAB)
    if not tokens or not vocabulary or rows != sum(index < tokens for index in request.rows):
        raise answers.BadAnswer(f"{rows} rows of {vocabulary} logits after {tokens} tokens")
    if len(payload) != (size := tokens * SCORE_BYTES + logits_bytes(rows, vocabulary)):
        raise answers.BadAnswer(f"{len(payload)} bytes of scores instead of {size}")
    probabilities = array("f", payload[: 4 * tokens])
    if any(math.isnan(value) or value > 0 for value in probabilities):
        raise answers.BadAnswer("a probability is above 1 or NaN")
    return Scored(tokens, rows, vocabulary, answers.whole(event, "duration_ns"), payload)
