"""An archive is read once and a recipe is parsed once for a submission, whoever needs them later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etfarm.client.cli import options
from etfarm.client.cli.arguments import prepare_archives
from etfarm.client.export.spec import Demo, Pt2File
from etfarm.client.submit.preparation import prepare
from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe
from etfarm.client.submit.submission import SubmissionRequest
from etfarm.v1 import job_pb2
from tests.support.refusals import refuses


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU().eval(), (torch.ones(2),)), path)
    return path


def test_a_command_reads_an_archive_before_anything_starts_and_never_again(archive: Path) -> None:
    recipes = options.recipes_of(["xnnpack_fp32"])
    (model, demo) = prepare_archives([Pt2File(archive), Demo("resnet8")], recipes)
    assert isinstance(model, PreparedModel) and demo == Demo("resnet8"), "an eager model is exported while the farm starts"
    archive.write_bytes(b"replaced")
    again = prepare(model, recipes=recipes)
    assert again is model and again.methods["forward"].input_names == ("input",)
    request = SubmissionRequest(again, recipes)
    assert request.gather(job_pb2.JobSpec(), recipes, archive.parent).spec.candidates[0].name == "net"


@pytest.mark.remedy("RECIPE_NEEDS_EAGER_MODULE")
def test_a_recipe_that_rewrites_modules_is_refused_with_the_archive(archive: Path) -> None:
    with refuses("RECIPE_NEEDS_EAGER_MODULE"):
        prepare_archives([Pt2File(archive)], options.recipes_of(["xnnpack_torchao_int8da_int4w_per_channel"]))
    assert prepare_archives([Pt2File(archive)], options.recipes_of(["xnnpack_pt2e_int8_static_per_channel"]))


def test_a_recipe_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[partitioners]]\nname = "xnnpack"\n')
    (recipe,) = options.recipes_of([str(path)])
    path.unlink()
    assert read_recipe(recipe) is recipe
    request = SubmissionRequest("unused", [recipe])
    assert request.listed_recipes == [recipe] and SubmissionRequest("unused", recipe).listed_recipes == [recipe]


def test_recipes_without_an_option_are_the_default() -> None:
    assert options.recipes_of([]) == [read_recipe(DEFAULT_RECIPE)]


def test_equal_recipes_are_taken_once_and_named_as_they_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = options.recipes_of(["xnnpack_fp32", "xnnpack_fp32"])
    assert recipes == [read_recipe("xnnpack_fp32")]
    assert "--recipe xnnpack_fp32" in capsys.readouterr().err
