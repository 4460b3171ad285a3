"""A recipe with a delegate for each operator: another recipe with the same numbers."""

from __future__ import annotations

import pytest

from etfarm.wire import recipes
from etfarm.wire.recipes import RECIPES
from tests.support.refusals import refuses

NAMED = [name for name, one in RECIPES.items() if not any(argument.required for argument in one.arguments)]
DIGESTS = {
    "portable": "b1bb99af",
    "xnnpack_fp32": "bc133692",
    "xnnpack_pt2e_int8_static_per_channel": "d8194d67",
    "xnnpack_torchao_int8da_int4w_per_tensor": "91b48102",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_of_xnnpack_has_another_digest_and_quantizes_the_same(name: str) -> None:
    recipe = recipes.parse(name)
    separate = recipe.per_operator()
    assert (separate.digest != recipe.digest) is name.startswith("xnnpack")
    assert separate.quantization_json == recipe.quantization_json
    assert (separate.quantization, separate.stages, separate.parts) == (recipe.quantization, recipe.stages, recipe.parts)
    assert recipes.from_json(separate.json) == separate
    assert separate.per_operator() == separate


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_named_recipes_keep_the_digests_that_they_had(name: str, digest: str) -> None:
    assert recipes.parse(name).digest.startswith(digest)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ('recipe = "xnnpack_fp32"\n[executorch]\nmemory_planning = "naive"', True),
        ('recipe = "xnnpack_fp32"\npartitioners = []', False),
        ('partitioners = ["vulkan", "xnnpack"]', True),
        ('partitioners = ["vulkan"]', False),
        ('recipe = "portable"\n[methods.decoder]\npartitioners = ["xnnpack"]', True),
        ('combine = ["coreml_fp16", "xnnpack_fp32"]', True),
        ('recipe = "coreml_fp16"', False),
        ('recipe = "acme.fast"', True),
    ],
)
def test_of_a_file_too_where_a_partitioner_of_xnnpack_takes_part_or_may(text: str, takes: bool) -> None:
    recipe = recipes.from_toml(text)
    assert recipe.takes_xnnpack is takes
    assert (recipe.per_operator() != recipe) is takes


def test_a_file_can_say_it() -> None:
    text = recipes.from_toml('recipe = "xnnpack_fp32"\nper_op = true')
    assert text == recipes.parse("xnnpack_fp32").per_operator()
    assert recipes.from_toml('recipe = "xnnpack_fp32"\nper_op = false') == recipes.parse("xnnpack_fp32")
    with refuses("BAD_RECIPE_COMBINATION", match="which portable does not use"):
        recipes.from_toml('recipe = "portable"\nper_op = true')
    with refuses("BAD_RECIPE_FIELD", match="per_op cannot be 1"):
        recipes.from_toml('recipe = "xnnpack_fp32"\nper_op = 1')
