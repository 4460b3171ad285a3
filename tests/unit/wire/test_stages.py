"""Stages: the order is ExecuTorch's own, and a refusal names what may come before."""

from __future__ import annotations

import itertools

import pytest
from executorch.export import stages as executorch_stages
from executorch.export.types import StageType

from etfarm.wire import recipes, stages
from etfarm.wire.stages import PREDECESSORS, STAGES, STARTS
from tests.support.golden import Golden
from tests.support.refusals import refuses

CLASSES = {
    "SOURCE_TRANSFORM": executorch_stages.SourceTransformStage(None),
    "QUANTIZE": executorch_stages.QuantizeStage(None),
    "TORCH_EXPORT": executorch_stages.TorchExportStage(),
    "TO_EDGE_TRANSFORM_AND_LOWER": executorch_stages.EdgeTransformAndLowerStage(),
    "TO_EDGE": executorch_stages.ToEdgeStage(),
    "EDGE_PROGRAM_MANAGER_TRANSFORM": executorch_stages.EdgeProgramManagerTransformStage(),
    "TO_BACKEND": executorch_stages.ToBackendStage(),
    "TO_EXECUTORCH": executorch_stages.ExecutorchStage(None),
}
DEFAULT = ("TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH")


def test_the_stages_are_executorchs() -> None:
    assert set(STAGES) == {stage.name for stage in StageType}


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_follows_is_what_executorchs_class_says(name: str) -> None:
    stage = CLASSES[name]
    assert stage.stage_type is StageType[name]
    assert set(PREDECESSORS[name]) == {before.name for before in stage.valid_predecessor_stages}
    assert (name in STARTS) == stage.can_start_pipeline


def test_an_order_is_valid_where_each_stage_follows_one_of_its_predecessors() -> None:
    valid = []
    for length in range(1, 6):
        for order in itertools.permutations(STAGES, length):
            follows = all(before in PREDECESSORS[stage] for before, stage in itertools.pairwise(order))
            if follows and order[0] in STARTS:
                stages.check_order(order)
                valid.append(order)
            else:
                with refuses("BAD_STAGES"):
                    stages.check_order(order)
    assert DEFAULT in valid
    assert ("QUANTIZE", "TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH") in valid


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (
            "TO_EDGE TO_EXECUTORCH",
            "TO_EXECUTORCH cannot follow TO_EDGE: it follows TO_EDGE_TRANSFORM_AND_LOWER, TO_BACKEND or "
            "EDGE_PROGRAM_MANAGER_TRANSFORM. Put TO_BACKEND between them; without partitioners it delegates nothing.",
        ),
        ("TORCH_EXPORT QUANTIZE", "QUANTIZE cannot follow TORCH_EXPORT: it follows SOURCE_TRANSFORM."),
        ("TORCH_EXPORT SOURCE_TRANSFORM", "SOURCE_TRANSFORM cannot follow TORCH_EXPORT: nothing comes before it."),
        ("TORCH_EXPORT TO_BACKEND", "Put TO_EDGE between them."),
        ("TO_EDGE_TRANSFORM_AND_LOWER TO_BACKEND", "leave TO_BACKEND out, or write TO_EDGE before it."),
        (
            "TO_BACKEND TO_EXECUTORCH",
            "TO_BACKEND cannot be the first stage. It follows TO_EDGE or EDGE_PROGRAM_MANAGER_TRANSFORM.",
        ),
        ("TORCH_EXPORT TORCH_EXPORT", "TORCH_EXPORT occurs twice."),
        ("TORCH_EXPRT", "Did you mean TORCH_EXPORT?"),
        ("to-edge", "Did you mean TO_EDGE?"),
        ("", "There are no stages."),
    ],
)
def test_a_refused_order_names_the_valid_predecessors_and_the_remedy(order: str, sentence: str) -> None:
    with refuses("BAD_STAGES") as caught:
        stages.check_order(order.split())
    assert caught.value.reason == "BAD_STAGES"
    assert sentence in str(caught.value)


def test_stopping_after_a_stage_that_the_recipe_lacks_is_refused_with_those_it_has(golden: Golden) -> None:
    recipe = recipes.parse("xnnpack_fp32")
    for stage in DEFAULT:
        stages.check_stop_after(recipe, stage)
    with golden.refuses("BAD_STAGES"):
        stages.check_stop_after(recipe, "QUANTIZE")
    with golden.refuses("BAD_STAGES"):
        stages.check_stop_after(recipe, "TO_EXECUTORH")


def test_a_stage_that_a_recipe_lacks_is_had_with_a_recipe_file_that_the_refusal_writes_out(golden: Golden) -> None:
    with refuses("BAD_STAGES") as caught:
        stages.check_stop_after(recipes.parse("xnnpack_pt2e_int8_static_per_channel"), "TO_EDGE")
    order = 'stages = ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]'
    assert f"write a recipe file with `{order}`." in str(caught.value)
    file = f'recipe = "xnnpack_pt2e_int8_static_per_channel"\n{order}'
    stages.check_stop_after(recipes.from_toml(file), "TO_EDGE")
    with golden.refuses("BAD_STAGES"):
        stages.check_stop_after(recipes.parse("xnnpack_fp32"), "QUANTIZE")


def test_an_order_with_a_stage_is_one_that_can_be_run_and_keeps_what_is_done_before_the_export() -> None:
    for length in range(1, len(STAGES)):
        for order in itertools.permutations(STAGES, length):
            if order[0] not in STARTS or not all(before in PREDECESSORS[stage] for before, stage in itertools.pairwise(order)):
                continue
            for stage in STAGES:
                result = stages.order_with(order, stage)
                stages.check_order(result)
                assert stage in result and result[-1] == "TO_EXECUTORCH"
                assert {one for one in order if one in STAGES[:2]} <= set(result)
