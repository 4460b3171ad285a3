"""The numbers of a language model's accuracy against numpy's, for a model on the server that is given as a table."""

from __future__ import annotations

import math
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.server.reports.numerics.forced_text import compare, fill_perplexity
from etfarm.server.reports.request import Scores, TokenInputs
from etfarm.v1 import report_pb2
from etfarm.wire.generation import draw_tokens
from tests.support.refusals import refuses

VOCABULARY = 7
TEXT = (3, 1, 4, 1, 5, 2, 6, 0)
ROWS = (1, 4, 7)
SEED = 5


class Table:
    """A model whose logits depend on the token and its position only."""

    longest = 3

    def __init__(self, logits: Any) -> None:
        self.logits = logits

    def reset(self) -> None:
        """There is no state."""

    def execute(self, tokens: list[int], position: int) -> Any:
        return self.logits[(position + len(tokens) - 1) % len(self.logits), tokens[-1]]


def table(seed: int = 1) -> Any:
    """Logits by position and token: [8, VOCABULARY, VOCABULARY]."""
    return np.random.default_rng(seed).normal(size=(8, VOCABULARY, VOCABULARY)).astype(np.float32).astype(np.float64)


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def scores(folder: Path, logits: Any, *, window: int = 8, generated: list[int] | None = None, **changes: Any) -> Scores:
    """What a device computes whose model is a table."""
    rows = np.stack([logits[index % window, token] for index, token in enumerate(TEXT)])
    logs = log_softmax(rows)
    ends = {index for index in range(len(TEXT)) if (index + 1) % window == 0 or index + 1 == len(TEXT)}
    probabilities = [0.0 if index in ends else float(logs[index, TEXT[index + 1]]) for index in range(len(TEXT))]
    best, chosen = rows.argmax(axis=1).astype("<i4"), rows[list(ROWS)].astype("<f4")
    (folder / "values").write_bytes(array("f", probabilities).tobytes() + best.tobytes() + chosen.tobytes())
    if generated is not None:
        (folder / "generated").write_bytes(array("i", [9, 9, *generated, 9]).tobytes())
    values: dict[str, Any] = {
        "values": folder / "values", "tokens": TEXT, "executed": len(TEXT), "vocabulary": VOCABULARY, "window": window,
        "logits_after": ROWS, "is_text": True, "inputs": TokenInputs(0, 1, ("int64", "int64"), False, 3),
        "generated": folder / "generated" if generated is not None else None, "generated_skipped": 2,
        "generated_tokens": len(generated or ()), "seed": SEED, "vocab_size": VOCABULARY, "context": 4, "on_host": False,
    }  # fmt: skip
    return Scores(**{**values, **changes})


def compared(device: Scores, logits: Any, limit_s: float = 60.0) -> report_pb2.GenerationReference:
    reference = report_pb2.GenerationReference()
    compare(reference, device, Table(logits), limit_s)
    return reference


def test_an_equal_model_is_exact(tmp_path: Path) -> None:
    reference = compared(scores(tmp_path, table()), table())
    assert (reference.tokens, reference.top1_agreement, reference.logits_tokens) == (8, 1.0, 3)
    assert reference.sqnr_db == 300 and reference.max_abs_error == 0 and reference.kl_divergence == pytest.approx(0, abs=1e-12)
    assert reference.perplexity_ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("window", [8, 3])
def test_the_numbers_are_those_of_numpy(tmp_path: Path, window: int) -> None:
    own, noise = table(), 0.3 * table(2)
    actual = (own + noise).astype(np.float32).astype(np.float64)
    device = scores(tmp_path, actual, window=window)
    reference = compared(device, own)
    expected = np.stack([own[index % window, token] for index, token in enumerate(TEXT)])
    got = np.stack([actual[index % window, token] for index, token in enumerate(TEXT)])
    error = expected[list(ROWS)] - got[list(ROWS)]
    assert reference.sqnr_db == pytest.approx(10 * math.log10(np.square(expected[list(ROWS)]).sum() / np.square(error).sum()))
    assert reference.max_abs_error == pytest.approx(np.abs(error).max())
    p, q = log_softmax(expected[list(ROWS)]), log_softmax(got[list(ROWS)])
    assert reference.kl_divergence == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert reference.top1_agreement == pytest.approx((expected.argmax(axis=1) == got.argmax(axis=1)).mean())
    followed = [index for index in range(7) if (index + 1) % window]
    losses = [-log_softmax(expected)[index, TEXT[index + 1]] for index in followed]
    own_losses = [-log_softmax(got)[index, TEXT[index + 1]] for index in followed]
    assert reference.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert reference.perplexity_ratio == pytest.approx(math.exp(np.mean(own_losses) - np.mean(losses)), rel=1e-6)
    whole = report_pb2.GenerationAccuracy()
    fill_perplexity(whole, device)
    assert whole.perplexity == pytest.approx(math.exp(np.mean(own_losses)), rel=1e-6) and whole.perplexity_tokens == len(followed)


def test_drawn_tokens_have_no_perplexity(tmp_path: Path) -> None:
    device = scores(tmp_path, table(), is_text=False)
    whole = report_pb2.GenerationAccuracy()
    fill_perplexity(whole, device)
    assert not whole.HasField("perplexity") and not compared(device, table()).HasField("perplexity_ratio")


def continued(logits: Any, count: int) -> list[int]:
    """The greedy text of a table after the drawn context."""
    tokens = draw_tokens(SEED, VOCABULARY, 4).tolist()
    for _ in range(count):
        tokens.append(int(logits[(len(tokens) - 1) % 8, tokens[-1]].argmax()))
    return tokens[4:]


def test_the_first_token_that_differs_has_the_gap_of_the_references_logits(tmp_path: Path) -> None:
    own = table()
    text = continued(own, 6)
    assert not compared(scores(tmp_path, own, generated=text), own).HasField("first_difference")
    other = (text[3] + 1) % VOCABULARY
    reference = compared(scores(tmp_path, own, generated=[*text[:3], other, 0, 0]), own)
    first, row = reference.first_difference, np.sort(own[6, text[2]])
    assert (first.index, first.position, first.token, first.reference_token) == (3, 7, other, text[3])
    assert first.gap == pytest.approx(row[-1] - row[-2]) and reference.generated_tokens == 4


def test_tokens_that_are_never_chosen_do_not_count(tmp_path: Path) -> None:
    own = table()
    own[:, :, 5] = -np.inf
    device = scores(tmp_path, own, is_text=False)
    reference = compared(device, own)
    assert reference.sqnr_db == 300 and reference.kl_divergence == pytest.approx(0, abs=1e-12)
    other = compared(device, np.where(np.isneginf(own), 1.0, own))
    assert not other.HasField("sqnr_db") and not other.HasField("max_abs_error") and not other.HasField("kl_divergence")


@pytest.mark.parametrize("masks", [(-1e9, -1e9), (-1e9, -np.inf), (-np.inf, -1e9), (-1e9, -3e38)])
def test_masked_logits_do_not_hide_the_error_of_the_others(tmp_path: Path, masks: tuple[float, float]) -> None:
    own, actual = table(), table() + 0.3 * table(2)
    kept = [index for index in range(VOCABULARY) if index != 5]
    pairs = [(own[index, TEXT[index]][kept], actual[index, TEXT[index]][kept]) for index in ROWS]
    own[:, :, 5], actual[:, :, 5] = masks
    reference = compared(scores(tmp_path, actual, is_text=False), own)
    signal, noise = (
        sum(np.square(each).sum() for each in values) for values in ([p for p, _ in pairs], [p - q for p, q in pairs])
    )
    assert reference.sqnr_db == pytest.approx(10 * math.log10(signal / noise), rel=1e-4)
    logs = [(log_softmax(p), log_softmax(q)) for p, q in pairs]
    assert reference.kl_divergence == pytest.approx(np.mean([(np.exp(p) * (p - q)).sum() for p, q in logs]), rel=1e-4)


class Long(Table):
    """A table that takes prompts at once, and notes how long they are."""

    longest = 1 << 20

    def __init__(self, logits: Any) -> None:
        super().__init__(logits)
        self.counts: list[int] = []

    def execute(self, tokens: list[int], position: int) -> Any:
        self.counts.append(len(tokens))
        return super().execute(tokens, position)


def test_a_long_prompt_is_executed_in_parts(tmp_path: Path) -> None:
    model = Long(table())
    compare(report_pb2.GenerationReference(), scores(tmp_path, table(), generated=[0], context=300), model, 60.0)
    assert [count for count in model.counts if count > 1] == [128, 128, 44]


@pytest.mark.parametrize(("generated", "limit_s", "is_whole"), [([1, 2], 0.0, False), ([1, 2], 60.0, True), (None, 60.0, True)])
def test_a_comparison_says_whether_there_was_time_for_all(
    tmp_path: Path, generated: list[int] | None, limit_s: float, is_whole: bool
) -> None:
    device = scores(tmp_path, table(), generated=generated)
    assert compare(report_pb2.GenerationReference(), device, Table(table()), limit_s) is is_whole


def test_a_text_that_ends_in_time_before_its_context_does_not_is_not_whole(tmp_path: Path) -> None:
    class Slow(Table):
        def execute(self, tokens: list[int], position: int) -> Any:
            if len(tokens) > 1:
                time.sleep(0.2)
            return super().execute(tokens, position)

    device = scores(tmp_path, table(), generated=[1, 2])
    assert not compare(report_pb2.GenerationReference(), device, Slow(table()), 0.1)


def test_what_there_is_no_time_for_is_not_counted(tmp_path: Path) -> None:
    reference = compared(scores(tmp_path, table(), generated=[1, 2]), table(), limit_s=0.0)
    assert (reference.tokens, reference.logits_tokens, reference.generated_tokens) == (1, 0, 0)


@pytest.mark.remedy("SCORES_DO_NOT_MATCH")
@pytest.mark.parametrize("logits", [np.zeros((8, VOCABULARY, 5)), np.full((8, VOCABULARY, VOCABULARY), np.nan)])
def test_a_reference_with_other_logits_is_refused(tmp_path: Path, logits: Any) -> None:
    with refuses("SCORES_DO_NOT_MATCH"):
        compared(scores(tmp_path, table()), logits)
    assert compared(scores(tmp_path, table()), table()).tokens, "of the program that was exported again"
