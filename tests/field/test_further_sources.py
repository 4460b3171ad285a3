"""Factories as public repositories write them: registries, packages, edits within a second, and what can be registered once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etfarm.client import Farm, Job
from etfarm.client.export import usercode
from etfarm.wire.tensors import Tensor, to_array
from tests.support.quick_jobs import QUICK

pytestmark = pytest.mark.slow(reason="a farm compiles and measures")

FACTORY = """
import torch


def build():
    from nets import create_model  # on demand, as training scripts do

    return create_model("mixer").eval(), (torch.linspace(-2, 2, 8).reshape(1, 8),)
"""
REGISTRY = """
_MODELS = {}


def register_model(function):
    if function.__name__ in _MODELS:
        raise RuntimeError(f"{function.__name__} is registered twice")
    _MODELS[function.__name__] = function
    return function


def create_model(name):
    return _MODELS[name]()
"""
MIXER = """
from torch import nn

from .layers import ACTIVATION
from .registry import register_model


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.project.weight)
        self.activate = ACTIVATION()

    def forward(self, x):
        return self.activate(self.project(x))


@register_model
def mixer():
    return Mixer()
"""
PACKAGE = {
    "model.py": FACTORY,
    "nets/__init__.py": "from . import mixer\nfrom .registry import create_model\n",
    "nets/layers/__init__.py": "from .activations import ACTIVATION\n",
    "nets/mixer.py": MIXER,
    "nets/registry.py": REGISTRY,
}
ACTIVATIONS = "from torch import nn\n\nACTIVATION = nn.%s\n"

SCALED = """
import torch
from settings import SCALE


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * SCALE


def build():
    return Scaled().eval(), (torch.ones(1, 8),)
"""

OUTPUT = """
from dataclasses import dataclass

import torch


@dataclass
class DetectorOutput:
%s

torch.export.register_dataclass(DetectorOutput, serialized_type_name="detector.DetectorOutput")
"""
DETECTOR = """
import dataclasses

import torch
from outputs import DetectorOutput


class Detector(torch.nn.Module):
    def forward(self, boxes, logits):
        scores = logits.sigmoid()
        parts = {"boxes": boxes * 2, "scores": scores, "labels": scores.argmax(-1)}
        return DetectorOutput(**{field.name: parts[field.name] for field in dataclasses.fields(DetectorOutput)})


def build():
    return Detector().eval(), (torch.rand(3, 4), torch.randn(3, 5))
"""

INSTALLED = """
from pathlib import Path

import torch

with Path(__file__).with_name("imports.txt").open("a") as file:
    file.write("imported\\n")


def scaled():
    return torch.nn.Linear(4, 2).eval(), (torch.rand(1, 4),)
"""


@pytest.fixture(autouse=True)
def registered_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let factories run in this process again: those of other tests have registered operators."""
    monkeypatch.setattr(usercode, "registrations", set())


def write(folder: Path, files: Mapping[str, str]) -> str:
    """Write the files of a repository; return its factory as a MODEL argument."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder / 'model.py'}:build"


def bench(client: Farm, *models: str) -> Job:
    return client.bench(list(models), recipes="portable", **QUICK)


def output(job: Job, cell: int = 0) -> NDArray[Any]:
    """Wait for a job, and return the only output of a cell."""
    job.result()
    (value,) = job.outputs(cell)
    assert isinstance(value, Tensor)
    return to_array(value)


def test_a_registry_of_a_package_builds_each_side_with_its_own_layers(client: Farm, tmp_path: Path) -> None:
    models = [
        write(tmp_path / side, {**PACKAGE, "nets/layers/activations.py": ACTIVATIONS % activation})
        for side, activation in (("base", "ReLU"), ("candidate", "Hardtanh"))
    ]
    job = bench(client, *models)
    base, candidate = job.result().reports
    x = np.linspace(-2, 2, 8)
    assert np.allclose(output(job, 0), np.maximum(x, 0), atol=1e-6)
    assert np.allclose(output(job, 1), np.clip(x, -1, 1), atol=1e-6)
    assert base.model is not None and base.model.sources is not None
    assert candidate.model is not None and candidate.model.sources is not None
    hashes = [{file.path: file.sha256 for file in sources} for sources in (base.model.sources, candidate.model.sources)]
    assert set(hashes[0]) == set(hashes[1]) == {*PACKAGE, "nets/layers/activations.py"}
    assert [path for path in hashes[0] if hashes[0][path] != hashes[1][path]] == ["nets/layers/activations.py"]
    (pair,) = client.compare(f"{job.id}#0", f"{job.id}#1").pairs
    (change,) = [change for change in pair.changes if change.what == "source files"]
    assert "activations.py" in str(change.base) and "registry.py" not in str(change.base)


def test_an_edit_of_equal_length_at_the_same_time_is_measured(client: Farm, tmp_path: Path) -> None:
    model = write(tmp_path, {"model.py": SCALED, "settings.py": "SCALE = 2.0\n"})
    times = (1_700_000_000_000_000_000, 1_700_000_000_000_000_000)
    os.utime(tmp_path / "settings.py", ns=times)
    before = bench(client, model)
    (tmp_path / "settings.py").write_text("SCALE = 3.0\n")
    os.utime(tmp_path / "settings.py", ns=times)
    after = bench(client, model)
    assert (output(before) == 2).all()
    assert (output(after) == 3).all()
    (pair,) = client.compare(before.id, after.id).pairs
    assert "source files" in [change.what for change in pair.changes]


def test_two_versions_of_a_registered_output_class_name_their_own_fields(client: Farm, tmp_path: Path) -> None:
    fields = (("boxes", "scores"), ("labels", "boxes", "scores"))
    models = [
        write(tmp_path / side, {"model.py": DETECTOR, "outputs.py": OUTPUT % "".join(f"    {n}: torch.Tensor\n" for n in names)})
        for side, names in zip(("base", "candidate"), fields, strict=True)
    ]
    reports = bench(client, *models).result().reports
    assert [report.error and report.error.message for report in reports] == [None, None]
    for report, names in zip(reports, fields, strict=True):
        assert [row.output for row in report.accuracy or ()] == list(names)
        for row in report.accuracy or ():
            assert row.equal or (row.sqnr_db is not None and row.sqnr_db > 100), row.output


def test_an_installed_package_below_the_root_is_loaded_once_and_not_listed(
    client: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    files = {
        "model.py": "import farm_installed_layers as layers\n\n\ndef build():\n    return layers.scaled()\n",
        "env/lib/python3.11/site-packages/farm_installed_layers.py": INSTALLED,
    }
    model = write(tmp_path, files)
    monkeypatch.syspath_prepend(installed)
    for job in [bench(client, model) for _ in range(2)]:
        facts = job.result().report.model
        assert facts is not None and [file.path for file in facts.sources or ()] == ["model.py"]
    assert (installed / "imports.txt").read_text() == "imported\n"
