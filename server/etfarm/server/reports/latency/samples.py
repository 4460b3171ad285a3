"""What samples consist of: blocks of interleaved programs, and the repetitions of generated text. Loads no numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_REPETITIONS: Final = 3
"""Minimum number of repetitions of generated text for an interval: with two, Student's distribution has one degree of freedom,
and is of no use."""


@dataclass(frozen=True)
class Block:
    """Consecutive samples of one program without a pause."""

    round: int
    process_pair: int
    samples: int


@dataclass(frozen=True)
class GeneratingProcess:
    """The files of one process that generated text, and what they consist of."""

    token_ns: Path
    """Times of tokens: int64, little-endian, nanoseconds; a row for each repetition of each point."""
    tokens: Path
    """The tokens: int32, little-endian, in the same order."""
    prefill_ns: tuple[tuple[int, ...], ...]
    """For each point, the time of the prompt in each repetition."""


@dataclass(frozen=True)
class Generation:
    """The measurement of a language model by one or several processes."""

    prompt_tokens: tuple[int, ...]
    """The prompt length of each point."""
    generated_tokens: int
    """Number of columns: of tokens that each repetition generated."""
    processes: tuple[GeneratingProcess, ...]
