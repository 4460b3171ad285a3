"""The accuracy of a language model: its logits after given tokens, and the text that it generated. For children."""

from __future__ import annotations

import math
import sys
import time
from array import array
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.request import Scores
from etfarm.v1 import report_pb2
from etfarm.wire import generation
from etfarm.wire.errors import error_for
from etfarm.wire.series import little_endian
from etfarm.wire.sqnr import ratio_db

_PART_OF_TIME: Final = 0.7
"""Fraction of the time for the given tokens; the rest is for the text that the device generated."""

_MAX_CHUNK: Final = 128
"""Maximum number of tokens of one execution: a long one may exceed the time limit, and its logits the memory."""

Floats = NDArray[np.float64]


class ReferenceModel(Protocol):
    """A language model on this host."""

    longest: int
    """Maximum number of tokens of one execution."""

    def reset(self) -> None:
        """Begin a new context."""

    def execute(self, tokens: list[int], position: int) -> Floats:
        """Execute tokens, of which the first has the position, and return the logits after the last one: [vocabulary]."""


@dataclass(frozen=True)
class _Device:
    """What the device computed."""

    probabilities: Floats
    """[tokens]: the logarithm of the probability of each next token."""
    best: NDArray[np.int32]
    """[tokens]: the most likely next token."""
    logits: dict[int, Floats]
    """Logits by index of a token."""


def fill_perplexity(target: report_pb2.GenerationAccuracy, scores: Scores) -> None:
    """Fill the perplexity of a text on the device; drawn tokens have none."""
    if not scores.is_text:
        return
    known = _read(scores).probabilities[_followed(scores, scores.executed)]
    target.perplexity_tokens = len(known)
    value = _perplexity(known)
    if value is not None:
        target.perplexity = value


def compare(target: report_pb2.GenerationReference, scores: Scores, model: ReferenceModel, limit_s: float) -> bool:
    """Fill the deviation of the device from a model, and return whether all was compared in time.

    Args:
        limit_s: no execution begins after this time; what was not compared by then is not counted.

    Raises:
        SCORES_DO_NOT_MATCH: the model returns another number of logits, or NaN.
    """
    start_s = time.monotonic()
    device = _read(scores)
    probabilities: list[float] = []
    is_equal: list[bool] = []
    rows: list[tuple[Floats, Floats]] = []
    for index, token in enumerate(scores.tokens[: scores.executed]):
        if index and time.monotonic() - start_s > _PART_OF_TIME * limit_s:
            break
        position = index % scores.window
        if position == 0:
            model.reset()
        logits = _checked(model.execute([token], position), scores.vocabulary)
        is_equal.append(int(logits.argmax()) == int(device.best[index]))
        probabilities.append(_log_softmax(logits)[scores.tokens[index + 1]] if index + 1 < len(scores.tokens) else 0.0)
        if index in device.logits:
            rows.append((logits, device.logits[index]))
    target.tokens = len(is_equal)
    if is_equal:
        target.top1_agreement = sum(is_equal) / len(is_equal)
    _fill_logits(target, rows)
    if scores.is_text:
        followed = _followed(scores, len(is_equal))
        own = np.asarray(probabilities)[followed]
        if (value := _perplexity(own)) is not None:
            target.perplexity = value
            change = float((own - device.probabilities[followed]).mean())
            if math.isfinite(change) and abs(change) < _MOST_LOG:
                target.perplexity_ratio = math.exp(change)
    is_whole = _fill_generated(target, scores, model, start_s + limit_s)
    return is_whole and target.tokens == scores.executed


_MOST_LOG: Final = 100.0
"""Maximum of the logarithm of a perplexity, which no vocabulary comes near to."""
_NEVER: Final = -1000.0
"""Logarithm of a probability that is 0 even in double precision."""


def _fill_logits(target: report_pb2.GenerationReference, rows: list[tuple[Floats, Floats]]) -> None:
    """Fill what all logits of some tokens tell.

    Tokens that neither side ever chooses are equal, whether minus infinity or a large negative number masks them: their logits
    would outweigh all others.
    """
    target.logits_tokens = len(rows)
    if not rows:
        return
    signal = noise = largest = divergence = 0.0
    for reference, actual in rows:
        logs = _log_softmax(reference), _log_softmax(actual)
        both = (logs[0] < _NEVER) & (logs[1] < _NEVER)
        p = np.exp(logs[0])
        with np.errstate(invalid="ignore"):
            error = np.where(both, 0.0, reference - actual)
            # 0 * log(0 / 0) is 0, not NaN.
            terms = np.where(p == 0, 0.0, p * (logs[0] - logs[1]))
        signal += float(np.square(np.where(both, 0.0, reference)).sum())
        noise += float(np.square(error).sum())
        largest = max(largest, float(np.abs(error).max()))
        # Rounding makes the sum of equal distributions slightly negative.
        divergence += max(0.0, float(terms.sum()))
    if math.isfinite(signal) and math.isfinite(noise):
        target.max_abs_error = largest
        if signal:
            target.sqnr_db = ratio_db(signal, noise)
    if math.isfinite(divergence):
        target.kl_divergence = divergence / len(rows)


def _fill_generated(target: report_pb2.GenerationReference, scores: Scores, model: ReferenceModel, deadline_s: float) -> bool:
    """Find the first token of the device's own text that the model would not have generated; return whether there was time.

    The model is given the device's tokens: up to the first difference, they are its own.
    """
    if scores.generated is None:
        return True
    tokens = array("i", scores.generated.read_bytes()[: 4 * scores.generated_skipped + 4 * scores.generated_tokens])
    tokens = little_endian(tokens)
    text = tokens[scores.generated_skipped :].tolist()
    context = generation.draw_tokens(scores.seed, scores.vocab_size, scores.context).tolist()
    model.reset()
    logits = None
    chunk = min(model.longest, _MAX_CHUNK)
    for begin in range(0, len(context), chunk):
        if time.monotonic() > deadline_s:
            return False
        logits = model.execute(context[begin : begin + chunk], begin)
    for index, token in enumerate(text):
        assert logits is not None  # a prompt has at least one token
        row = _checked(logits, scores.vocabulary)
        target.generated_tokens = index + 1
        if (own := int(row.argmax())) != token:
            second, first = np.partition(row, -2)[-2:] if len(row) > 1 else (row[0], row[0])
            gap = float(first - second)
            target.first_difference.MergeFrom(
                report_pb2.FirstDifference(
                    index=index, position=len(context) + index, token=token, reference_token=own,
                    gap=gap if math.isfinite(gap) else sys.float_info.max,
                )
            )  # fmt: skip
            return True
        if index + 1 == len(text):
            return True
        if time.monotonic() > deadline_s:
            return False
        logits = model.execute([token], len(context) + index)
    return True


def _read(scores: Scores) -> _Device:
    data, count = scores.values.read_bytes(), scores.executed
    rows = [index for index in scores.logits_after if index < count]
    logits = np.frombuffer(data, "<f4", offset=generation.SCORE_BYTES * count).reshape(len(rows), scores.vocabulary)
    return _Device(
        np.frombuffer(data, "<f4", count).astype(np.float64),
        np.frombuffer(data, "<i4", count, offset=4 * count).astype(np.int32),
        {index: row.astype(np.float64) for index, row in zip(rows, logits, strict=True)},
    )


def _followed(scores: Scores, count: int) -> list[int]:
    """Return the indices of the first `count` tokens after which another one of the same window is given."""
    last = len(scores.tokens) - 1
    return [index for index in range(count) if index < last and (index + 1) % scores.window]


def _perplexity(probabilities: Floats) -> float | None:
    """Return the exponential of the mean of the negated logarithms; None for none, or if one has the probability 0."""
    if not len(probabilities):
        return None
    mean = -float(probabilities.mean())
    return math.exp(mean) if math.isfinite(mean) and mean < _MOST_LOG else None


def _log_softmax(logits: Floats) -> Floats:
    above = logits - logits.max()
    return np.asarray(above - math.log(float(np.exp(above).sum())))


def _checked(logits: Floats, vocabulary: int) -> Floats:
    if logits.shape != (vocabulary,):
        raise error_for("SCORES_DO_NOT_MATCH", f"The device returned {vocabulary} logits, the reference {logits.size}.")
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise error_for("SCORES_DO_NOT_MATCH", "The reference's logits have NaN or infinity.")
    return logits
