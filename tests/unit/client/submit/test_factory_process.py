"""Factories that register operators: each is built with its own, in a process of its own if need be."""

from __future__ import annotations

import io
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from etfarm.client.export import usercode
from etfarm.client.export.errors import FactoryFailed
from etfarm.client.export.spec import FileFactory
from etfarm.client.submit.early_checks import check_source
from etfarm.client.submit.factory_process import prepare_apart
from etfarm.client.submit.preparation import ExportSteps, prepare
from etfarm.client.submit.recipes import read_recipe
from etfarm.client.submit.submission import SubmissionRequest
from etfarm.v1 import job_pb2
from etfarm.wire.errors import UserError

pytestmark = pytest.mark.slow(reason="starts processes that import torch")

PORTABLE = read_recipe("portable")
INPUTS = {"x": np.ones(2, np.float32)}

MODEL = """
import torch
from etfarm.client.export import ModelSource

@torch.library.custom_op("two_versions::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}

@scale.register_fake
def _(x):
    return torch.empty_like(x)

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + {factor}

def make():
    print("not between the messages")
    x = torch.full((2,), float(scale(torch.ones(1))))
    return ModelSource.of(Net().eval(), (x,))

def fails():
    raise ValueError("as it is")

def leaves():
    import os
    os._exit(3)
"""


def test_factories_that_register_operators_run_in_a_process_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usercode, "registrations", set())
    for side, factor in (("base", 2), ("candidate", 512)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "model.py").write_text(MODEL.format(factor=factor))
    sentences: list[str] = []
    request = SubmissionRequest([f"{tmp_path / side}/model.py:make" for side in ("base", "candidate")], [PORTABLE], inputs=INPUTS)
    created = request.gather(job_pb2.JobSpec(methods=["forward"]), [PORTABLE], tmp_path, sentences.append)
    base, candidate = (each.model for each in created.spec.candidates)
    assert len([line for line in sentences if "process of its own" in line]) == 1
    assert base.methods["forward"].exported_program.digest != candidate.methods["forward"].exported_program.digest
    assert [file.path for file in candidate.sources] == ["model.py"] and base.sources[0].sha256 != candidate.sources[0].sha256
    with pytest.raises(UserError) as failed:
        prepare(f"{tmp_path}/candidate/model.py:fails")
    assert failed.value.reason == "FACTORY_FAILED" and "ValueError: as it is" in failed.value.message
    assert "model.py:" in failed.value.metadata["place"]
    with pytest.raises(UserError, match="exit code 3"):
        prepare(f"{tmp_path}/candidate/model.py:leaves")


REGISTRY = """
MODELS = {}
def register(model):
    assert model.__name__ not in MODELS, f"{model.__name__} is registered twice"
    MODELS[model.__name__] = model
    return model
"""
REGISTERED = """
import torch
from kept_registry import MODELS, register

@register
class Net(torch.nn.Module):
    def forward(self, x):
        return x * %d

def make():
    return MODELS["Net"]().eval(), (torch.ones(1),)
"""


def test_factories_that_register_one_name_in_an_installed_package_are_each_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "kept_registry.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(str(installed))
    models = []
    for side, factor in (("base", 2), ("candidate", 3)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "model.py").write_text(REGISTERED % factor)
        models.append(prepare(f"{tmp_path / side}/model.py:make"))
    base, candidate = (torch.export.load(io.BytesIO(model.methods["forward"].pt2)).module()(torch.ones(1)) for model in models)
    assert (base.item(), candidate.item()) == (2, 3)
    del sys.modules["kept_registry"]


def test_a_process_that_ends_before_it_has_read_its_request_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    large = partial(check_source, methods=["x" * (1 << 20)], inputs=None)  # more than a pipe holds
    with pytest.raises(FactoryFailed, match="exit code 1"):
        prepare_apart(ExportSteps((), None, large), FileFactory(Path("model.py"), "make"), "model")
