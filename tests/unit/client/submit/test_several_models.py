"""Errors of a submission whose models cannot all be exported."""

from __future__ import annotations

from pathlib import Path

import torch

from etfarm.client.export.source import ModelSource
from etfarm.client.submit.recipes import read_recipe
from etfarm.client.submit.submission import SubmissionRequest
from etfarm.v1 import job_pb2
from etfarm.wire.errors import EtfarmError
from tests.support.refusals import refuses


class Trained(torch.nn.ReLU):
    """A module that is left in train mode."""


def refusal(folder: Path, *modules: torch.nn.Module) -> EtfarmError:
    """Return the error of a submission of these modules."""
    models = [ModelSource.of(module, (torch.ones(2),)) for module in modules]
    recipes = [read_recipe("portable")]
    with refuses("TRAINING_MODE") as refused:
        SubmissionRequest(models, recipes).gather(job_pb2.JobSpec(), recipes, folder)
    return refused.value


def test_an_export_error_names_its_model_among_several(tmp_path: Path) -> None:
    error = refusal(tmp_path, torch.nn.ReLU().eval(), Trained())
    assert error.message == "Trained: forward: the module is in train mode."
    assert str(error) == f"{error.message} {error.remedy}"
    assert error.metadata["model"] == "Trained"


def test_an_export_error_of_the_only_model_does_not(tmp_path: Path) -> None:
    assert refusal(tmp_path, Trained()).message == "forward: the module is in train mode."
