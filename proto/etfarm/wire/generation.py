"""Conventions of text generation that server and device agents share: the tokens of contexts and prompts, and limits."""

from __future__ import annotations

from array import array
from typing import Final

MIN_TOKENS: Final = 2
"""Minimum number of generated tokens: the rate of decode excludes the first."""
MAX_TOKENS: Final = 4096
"""Maximum number of generated tokens of a repetition."""
MAX_REPETITIONS: Final = 100
MAX_POINTS: Final = 32
"""Maximum number of pairs of prompt length and depth."""
MAX_TIMED_TOKENS: Final = 1_000_000
"""Maximum number of generated tokens of all repetitions and points of a process."""
TIME_BYTES: Final = 8
"""Size of a value of GenerationResult.token_ns."""
TOKEN_BYTES: Final = 4
"""Size of a value of GenerationResult.tokens."""
SCORE_BYTES: Final = 8
"""Size of a token in ScoreResult.values without logits: a probability and the most likely token."""
MAX_TEXT: Final = 16_384
"""Maximum number of tokens of a text that is scored."""
MAX_LOGITS_BYTES: Final = 64 << 20
"""Maximum size of the logits that are compared, if that is more than one row."""
MAX_LOGITS_ROWS: Final = 32
"""Maximum number of tokens after which all logits are compared."""
DEFAULT_ACCURACY_TOKENS: Final = 64
"""Number of drawn tokens to measure the accuracy on."""
MAX_SCORE_S: Final = 120.0
"""Time limit for the tokens that a device scores."""
MAX_CONTEXT_TOKENS: Final = 1 << 20
"""Maximum number of tokens in a context."""

METRICS: Final = {
    "ttft_ns": "ttft_ci95_ns",
    "prefill_tokens_per_s": "prefill_tokens_per_s_ci95",
    "decode_tokens_per_s": "decode_tokens_per_s_ci95",
}
"""The numbers of a point of generation and of its processes, each with its 95 % interval."""

DEFAULT_REPETITIONS: Final = 5
DEFAULT_WARMUP: Final = 1
DEFAULT_PROMPT_TOKENS: Final = (128, 512)
DEFAULT_DEPTH_SHARES: Final = (0.0, 0.75)
"""As llama-bench's `-d`, but as shares of the largest depth, since contexts differ by orders of magnitude."""


def logits_bytes(rows: int, vocabulary: int) -> int:
    """Return the size of rows of logits: float32."""
    return 4 * rows * vocabulary


def logits_after(tokens: int, vocabulary: int) -> list[int]:
    """Return the indices of the tokens after which all logits are compared, spread evenly, with the last.

    Args:
        tokens: number of tokens, at least 1.
        vocabulary: number of logits.
    """
    rows = max(1, min(tokens, MAX_LOGITS_ROWS, MAX_LOGITS_BYTES // logits_bytes(1, vocabulary)))
    return [tokens * (row + 1) // rows - 1 for row in range(rows)]


_MASK: Final = (1 << 64) - 1


def draw_tokens(seed: int, vocab_size: int, count: int) -> array[int]:
    """Return token ids, int32, which are equal for equal arguments; the beginning of a longer draw is the shorter one.

    Source: Steele, Lea and Flood 2014, splitmix64. Python's own generators may change with its version.
    """
    tokens = array("i")
    state = seed & _MASK
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        tokens.append((mixed ^ (mixed >> 31)) % vocab_size)
    return tokens
