"""The comparison, round by round, of two programs that took turns on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.latency.statistics import student
from etfarm.wire.errors import DeviceError, Kind

MIN_PAIRS: Final = 4
"""Minimum number of starts of the processes for an interval: fewer do not show how much starts differ."""
MIN_ROUNDS: Final = 8
RESAMPLES: Final = 10_000
_TAIL: Final = 0.025
"""Probability beyond each end of a 95 % interval."""


class BadBlocks(DeviceError):
    """The blocks that an agent sent do not fit its samples."""

    reason = "BAD_BLOCKS"
    kind = Kind.INVALID_ARGUMENT


@dataclass(frozen=True)
class Block:
    """Consecutive samples of one program without a pause."""

    round: int
    process_pair: int
    samples: int


@dataclass(frozen=True)
class Rounds:
    """The rounds that both programs were measured in."""

    ratios: NDArray[np.float64]
    """[n], in order: a round's median of the one program over that of the base."""
    pairs: NDArray[np.int64]
    """[n]: the start of the processes to which a round belongs."""


@dataclass(frozen=True)
class Paired:
    """The comparison of two programs."""

    ratio: float
    """The median of the rounds' ratios."""
    ci95: tuple[float, float] | None
    """See `interval`."""


def medians(samples: NDArray[np.int64], blocks: Sequence[Block]) -> dict[int, tuple[int, float]]:
    """Return, by round, the process pair and the median of its block; `samples`, [n], are those of all blocks in their order.

    Raises:
        BadBlocks: the blocks do not make up the samples, or two belong to one round.
    """
    by_round: dict[int, tuple[int, float]] = {}
    begin = 0
    for block in blocks:
        if block.samples < 1 or begin + block.samples > samples.size or block.round in by_round:
            raise BadBlocks(f"The block of round {block.round} does not fit the {samples.size} samples.", round=block.round)
        by_round[block.round] = block.process_pair, float(np.median(samples[begin : begin + block.samples]))
        begin += block.samples
    if begin != samples.size:
        raise BadBlocks(f"The blocks have {begin} of {samples.size} samples.", blocks=begin, samples=samples.size)
    return by_round


def rounds_of(of: dict[int, tuple[int, float]], base: dict[int, tuple[int, float]]) -> Rounds:
    """Return the rounds that two programs share, in order; both as `medians` returns them. 0 ns, on either side, has no ratio."""
    both = [number for number in sorted(of) if number in base and of[number][0] == base[number][0]]
    shared = [number for number in both if of[number][1] > 0 and base[number][1] > 0]
    return Rounds(
        np.array([of[number][1] / base[number][1] for number in shared], dtype=np.float64),
        np.array([of[number][0] for number in shared], dtype=np.int64),
    )


def compare(rounds: Rounds) -> Paired | None:
    """Return the ratio and its interval; None without a round. Equal rounds have equal results."""
    if rounds.ratios.size == 0:
        return None
    return Paired(float(np.median(rounds.ratios)), interval(rounds))


def interval(rounds: Rounds) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio, which is in it; None below MIN_PAIRS starts or MIN_ROUNDS rounds.

    Samples of a block resemble each other, and so do the rounds of one start of the processes: where code and data happen to lie
    in memory makes a process faster or slower for all of its life. So starts are resampled, then the rounds of each; and since a
    handful of starts varies less than what it was drawn from, both ends are as much further from the ratio as Student's quantile
    is than the normal one. Simulated with processes that differ by 0 to 1 % on calm and on disturbed devices, it calls equal
    programs different in at most 5 % of cases (ends that are not moved: 13 %; samples resampled as if independent: most).

    Source: for the corrections, of starts here: Hesterberg, "What Teachers Should Know About the Bootstrap" (2015). His interval
    takes farther quantiles instead, which are those of the few rounds that something disturbed.
    """
    starts, counts = np.unique(rounds.pairs, return_counts=True)
    if starts.size < MIN_PAIRS or rounds.ratios.size < MIN_ROUNDS:
        return None
    random = np.random.default_rng(0)
    logs = np.log(rounds.ratios)
    # [starts, most rounds of one], padded; drawn by position below the start's own count, as many of each start as it has rounds
    # on average: starts differ by more than rounds do, and count alike.
    table = np.zeros((starts.size, counts.max()))
    for place, start in enumerate(starts):
        table[place, : counts[place]] = logs[rounds.pairs == start]
    drawn = random.integers(0, starts.size, (RESAMPLES, starts.size))
    size = round(logs.size / starts.size)
    places = (random.random((RESAMPLES, starts.size, size)) * counts[drawn][..., None]).astype(np.int64)
    estimates = np.median(table[drawn[..., None], places].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(estimates, (_TAIL, 1 - _TAIL))
    middle = math.log(float(np.median(rounds.ratios)))
    reach = math.sqrt(starts.size / (starts.size - 1)) * student(starts.size - 1) / NormalDist().inv_cdf(1 - _TAIL)
    return math.exp(middle - reach * max(0.0, middle - low)), math.exp(middle + reach * max(0.0, high - middle))
