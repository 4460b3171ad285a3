"""Accuracy over a folder of inputs, through a real farm: of which samples it is, and why of no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from tests.support.quick_jobs import QUICK, warned

pytestmark = [pytest.mark.slow(reason="a farm measures a program with two thread counts"), pytest.mark.numeric]


class Counted(nn.Module):
    """A table of words with a count of the executions, which fails on a word that it lacks."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        self.count += 1
        return self.table(words) * scale * self.count


def test_accuracy_is_of_the_samples_before_one_that_fails_on_the_device(client: Farm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "samples"
    folder.mkdir()
    for place, words in enumerate(([1, 2], [3, 4], [5, 99], [6, 7])):
        np.savez(folder / f"{place}.npz", scale=np.full(1, 10.0**place, np.float32), words=np.array(words, np.int64))
    source = ModelSource.of(Counted().eval(), (torch.tensor([1, 2]), torch.ones(1)))
    reports = client.bench(source, recipes="portable", inputs=folder, threads=[1, 2], **QUICK).result().reports
    rows = [report.accuracy[0] for report in reports if report.accuracy]
    for row in rows:
        assert row.samples == 2 and row.samples_digest
        assert row.sqnr_db is not None and row.sqnr_db > 120  # each sample starts from the initial count
    assert rows[0].to_dict() == rows[1].to_dict()
    for report in reports:
        (left_out,) = warned(report, "SAMPLES_LEFT_OUT")
        assert left_out.startswith("Accuracy is over 2 samples: ")
        assert "test_accuracy_samples.py" in left_out and "self.table(words)" in left_out
        assert "An index is outside of its table" in left_out
