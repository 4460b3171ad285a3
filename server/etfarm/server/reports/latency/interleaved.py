"""The round-by-round comparison of two programs that took turns on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.latency.samples import Block
from etfarm.wire import timings
from etfarm.wire.errors import error_for

MIN_PAIRS: Final = 4
"""Minimum number of starts of the processes for an interval: fewer do not show how much starts differ."""
MIN_ROUNDS: Final = 8
RESAMPLES: Final = 10_000
_TAIL: Final = 0.025
"""Probability beyond each end of a 95 % interval."""


@dataclass(frozen=True)
class Rounds:
    """The rounds that both programs were measured in."""

    ratios: NDArray[np.float64]
    """Ratio of each round in order, [n]: the candidate's median over the base's."""
    pairs: NDArray[np.int64]
    """Process pair of each round, [n]: the start of the processes to which the round belongs."""


@dataclass(frozen=True)
class Paired:
    """The comparison of two programs."""

    ratio: float
    """Median of the rounds' ratios."""
    ci95: tuple[float, float] | None
    """95 % interval of the ratio; see `interval`."""


def count_by_process(blocks: Sequence[Block]) -> list[int]:
    """Return the number of samples of each start of the processes, in order."""
    return [sum(block.samples for block in part) for _, part in groupby(blocks, lambda block: block.process_pair)]


def medians(samples: NDArray[np.int64], blocks: Sequence[Block]) -> dict[int, tuple[int, float]]:
    """Return, by round, the process pair and the median of its block; `samples`, [n], holds all blocks in order.

    Raises:
        BAD_BLOCKS: the blocks do not add up to the samples, or two of them belong to one round.
    """
    by_round: dict[int, tuple[int, float]] = {}
    begin = 0
    for block in blocks:
        if block.samples < 1 or begin + block.samples > samples.size or block.round in by_round:
            raise error_for(
                "BAD_BLOCKS", f"The block of round {block.round} does not fit the {samples.size} samples.", round=block.round
            )
        by_round[block.round] = block.process_pair, float(np.median(samples[begin : begin + block.samples]))
        begin += block.samples
    if begin != samples.size:
        raise error_for("BAD_BLOCKS", f"The blocks have {begin} of {samples.size} samples.", blocks=begin, samples=samples.size)
    return by_round


def rounds_of(of: dict[int, tuple[int, float]], base: dict[int, tuple[int, float]]) -> Rounds:
    """Return the rounds that two programs share, in order. Rounds with a median of 0 ns have no ratio and are left out.

    Args:
        of: result of `medians` for the candidate.
        base: result of `medians` for the base.
    """
    both = [number for number in sorted(of) if number in base and of[number][0] == base[number][0]]
    shared = [number for number in both if of[number][1] > 0 and base[number][1] > 0]
    return Rounds(
        np.array([of[number][1] / base[number][1] for number in shared], dtype=np.float64),
        np.array([of[number][0] for number in shared], dtype=np.int64),
    )


def compare(rounds: Rounds) -> Paired | None:
    """Return the ratio and its interval; None without rounds. The result is deterministic."""
    if rounds.ratios.size == 0:
        return None
    return Paired(float(np.median(rounds.ratios)), interval(rounds))


def interval(rounds: Rounds) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio, which contains it; None below MIN_PAIRS starts or MIN_ROUNDS rounds.

    Samples of a block are correlated, and so are the rounds of one start of the processes: the placement of code and data in
    memory makes a process faster or slower for its whole lifetime. Therefore starts are resampled, then the rounds of each. A
    small number of starts underestimates the variance, so both ends are moved away from the ratio by the factor between
    Student's quantile and the normal one. Simulated with processes that differ by 0 to 1 % on calm and on disturbed devices, it
    calls equal programs different in at most 5 % of cases (without moving the ends: 13 %; with samples resampled as if
    independent: most).

    Source of the correction, applied to starts here: Hesterberg, "What Teachers Should Know About the Bootstrap" (2015). His
    interval takes more extreme quantiles instead, which here would be those of a few disturbed rounds.
    """
    starts, counts = np.unique(rounds.pairs, return_counts=True)
    if starts.size < MIN_PAIRS or rounds.ratios.size < MIN_ROUNDS:
        return None
    random = np.random.default_rng(0)
    logs = np.log(rounds.ratios)
    # Shape [starts, maximum rounds per start], padded. Positions are drawn below each start's own count; every start contributes
    # the average number of rounds, since starts differ more than rounds and are weighted equally.
    table = np.zeros((starts.size, counts.max()))
    for place, start in enumerate(starts):
        table[place, : counts[place]] = logs[rounds.pairs == start]
    drawn = random.integers(0, starts.size, (RESAMPLES, starts.size))
    size = round(logs.size / starts.size)
    places = (random.random((RESAMPLES, starts.size, size)) * counts[drawn][..., None]).astype(np.int64)
    estimates = np.median(table[drawn[..., None], places].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(estimates, (_TAIL, 1 - _TAIL))
    middle = math.log(float(np.median(rounds.ratios)))
    reach = math.sqrt(starts.size / (starts.size - 1)) * timings.student_quantile(starts.size - 1) / timings.NORMAL_QUANTILE
    return math.exp(middle - reach * max(0.0, middle - low)), math.exp(middle + reach * max(0.0, high - middle))
