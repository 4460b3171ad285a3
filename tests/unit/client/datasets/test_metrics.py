"""A user's metric: found by its name, given one sample, asked for numbers; and top1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.client.datasets.metrics import Mean, find
from etfarm.client.errors import EtfarmError
from tests.support.golden import Golden

LOGITS = {"y": np.array([[0.1, 0.9], [0.8, 0.2]])}


@pytest.mark.parametrize(("label", "share"), [([1, 0], 1.0), ([[1], [1]], 0.5), ([0, 1], 0.0)], ids=range(3))
def test_top1_is_the_share_of_right_classes(label: Any, share: float) -> None:
    assert find("top1")({}, LOGITS, 0, {"label": np.array(label)}) == {"top1": share}


def test_top1_says_what_it_lacks(golden: Golden) -> None:
    with golden.refuses("METRIC_FAILED"):
        find("top1")({}, LOGITS, 0, {"class": 1})
    with golden.refuses("METRIC_FAILED"):
        find("top1")({}, LOGITS, 0, {"label": np.zeros(3)})


@pytest.mark.remedy("METRIC_FAILED")
@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        ("top5", "METRIC_NOT_FOUND", "There is no metric 'top5'. Metrics: top1"),
        ("none.py:f", "METRIC_NOT_FOUND", "There is no file none.py."),
        ("no.such.module:f", "METRIC_NOT_FOUND", "there is no module 'no'"),
        ("mine.py:g", "METRIC_NOT_FOUND", "mine.py has no g"),
        ("mine.py:x", "METRIC_NOT_FOUND", "mine.py:x is int, not a function"),
        ("bad.py:f", "METRIC_FAILED", "Importing bad.py failed with ValueError: no"),
    ],
)
def test_an_invalid_metric_is_refused(text: str, reason: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\ndef f(**_): return 1\n")
    (tmp_path / "bad.py").write_text("raise ValueError('no')\n")
    with pytest.raises(EtfarmError) as refused:
        find(text)
    assert refused.value.reason == reason
    assert says in str(refused.value)
    (tmp_path / "bad.py").write_text("def f(**_): return 1\n")
    assert find("bad.py:f").name == find("mine.py:f").name == "f"


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("return 2", {"f": 2.0}),
        ("return True", {"f": 1.0}),
        ("import numpy; return numpy.float32(0.5)", {"f": 0.5}),
        ("import torch; return {'a': torch.tensor(3.0), 'b': 1}", {"a": 3.0, "b": 1.0}),
        ("return [1, 2]", "The metric f returned list for f."),
        ("return None", "The metric f returned NoneType for f."),
        ("return inputs['x']", "The metric f failed with KeyError: 'x'"),
    ],
    ids=range(7),
)
def test_a_metric_gives_numbers(body: str, values: object, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def f(inputs, outputs, index, labels):\n    {body}\n")
    metric = find(f"{tmp_path}/own.py:f")
    if isinstance(values, dict):
        assert metric({}, {}, 0, {}) == values
    else:
        with pytest.raises(EtfarmError, match=str(values)):
            metric({}, {}, 0, {})


def test_metrics_import_their_own_modules_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "f1.py").write_text("def f1(**_):\n    from .text import VALUE\n    return VALUE\n")
    (tmp_path / "scores" / "text.py").write_text("VALUE = 1\n")
    (tmp_path / "own.py").write_text("def f(**_):\n    from text import VALUE\n    return VALUE\n")
    (tmp_path / "text.py").write_text("VALUE = 2\n")
    monkeypatch.chdir(tmp_path)
    metrics = [find("scores.f1:f1"), find("own.py:f")]
    assert [metric({}, {}, 0, {}) for metric in metrics * 2] == [{"f1": 1.0}, {"f": 2.0}] * 2


def test_a_mean_of_nothing_is_not_a_number() -> None:
    mean = Mean()
    assert math.isnan(mean.value)
    for value in (1.0, 2.0):
        mean.add(value)
    assert (mean.value, mean.count) == (1.5, 2)
