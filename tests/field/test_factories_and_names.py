"""What is built is the model that was given: each factory with its own helpers, and recipe files' names as they are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client.errors import EtfarmError
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="a farm compiles and measures")

MODEL = """
import torch
from helper import WIDTH
from etfarm.client.export import ModelSource
def factory():
    return ModelSource.of(torch.nn.Linear(16, WIDTH).eval(), (torch.rand(1, 16),))
"""
STACK = """
import torch
from torch import nn
def factory():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), (torch.rand(1, 3, 8, 8),)
"""
RECIPE = 'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\nonly_modules = ["%s"]\n'


def test_each_candidate_is_built_with_its_own_helper(farm: FarmProcess, tmp_path: Path) -> None:
    for side, width in (("base", 4), ("candidate", 512)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "model.py").write_text(MODEL)
        (tmp_path / side / "helper.py").write_text(f"WIDTH = {width}\n")
    models = [f"{tmp_path / side}/model.py:factory" for side in ("base", "candidate")]
    with farm.client() as client:
        both = client.bench(models, recipes=["portable"], iterations=10, min_time_s=0.05)
        base, candidate = both.result().reports
        assert base.compile.program.size_bytes * 4 < candidate.compile.program.size_bytes
        assert [file.path for file in base.model.sources] == ["helper.py", "model.py"]
        assert base.model.sources[1] == candidate.model.sources[1] and base.model.sources[0] != candidate.model.sources[0]
        (tmp_path / "base" / "helper.py").write_text("WIDTH = 4  # as before\n")
        edited = client.bench(models[0], recipes=["portable"], iterations=10, min_time_s=0.05)
        (report,) = edited.result().reports
        assert report.compile.program.digest == base.compile.program.digest
        (pair,) = client.compare(f"{both.id}#0", edited.id).pairs
    (change,) = [change for change in pair.changes if change.what == "source files"]
    assert change.base.startswith("helper.py (") and change.candidate.startswith("helper.py (")


def test_names_in_a_recipe_file_select_what_they_mean_or_are_refused(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text(STACK)
    for name in ("0", "3"):
        (tmp_path / f"only{name}.toml").write_text(RECIPE % name)
    model = f"{tmp_path}/stack.py:factory"
    with farm.client() as client:
        job = client.bench(model, recipes=[str(tmp_path / "only0.toml")], iterations=10, min_time_s=0.05)
        (report,) = job.result().reports
        (row,) = report.compile.selected["forward"].names
        assert (row.argument, row.name, row.count, row.quantized) == ("only_modules", "0", 1, 1)
        assert [each.count for each in report.compile.stayed_fp32["forward"].operators] == [1]
        with pytest.raises(EtfarmError) as refused:
            _ = client.bench(model, recipes=[str(tmp_path / "only3.toml")]).result().report
    assert refused.value.reason == "RECIPE_NAME_NOT_FOUND" and "'0'" in refused.value.remedy
