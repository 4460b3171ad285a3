"""Recipes: every spelling of one recipe has one digest, and each refusal says what is allowed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import recipes
from etfarm.wire.errors import Fault, UserError
from etfarm.wire.recipes import RECIPES, Argument, Plain, Quantization, Recipe


def values(argument: Argument) -> st.SearchStrategy[Plain]:
    """Allowed values of one argument."""
    if argument.choices:
        return st.sampled_from(argument.choices)
    if argument.kind is bool:
        return st.booleans()
    if argument.bounds is not None:
        numbers = st.integers(*argument.bounds)
        return st.lists(numbers, min_size=1, max_size=4).map(tuple) if argument.kind is tuple else numbers
    return st.text("AZaz09_", min_size=1, max_size=32)  # all patterns take these


@st.composite
def any_recipe(draw: st.DrawFn) -> Recipe:
    specification = draw(st.sampled_from(list(RECIPES.values())))
    given_ = {a.name: draw(values(a)) for a in specification.arguments if a.required or draw(st.booleans())}
    return recipes.resolve(specification.name, given_)


@given(any_recipe())
def test_text_json_and_toml_give_the_same_recipe_and_digest(recipe: Recipe) -> None:
    lines = [f'recipe = "{recipe.name}"', "[arguments]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in recipe.canonical()["arguments"].items()]  # type: ignore[attr-defined]
    for again in (recipes.parse(recipe.text), recipes.from_json(recipe.json), recipes.from_toml("\n".join(lines))):
        assert again == recipe
        assert again.digest == recipe.digest


@given(any_recipe(), any_recipe())
def test_different_recipes_have_different_digests(one: Recipe, other: Recipe) -> None:
    assert (one.digest == other.digest) == (one == other)


@given(st.text(max_size=60))
def test_any_text_is_a_recipe_or_a_users_error_with_a_remedy(text: str) -> None:
    try:
        recipe = recipes.parse(text)
    except UserError as error:
        assert error.fault is Fault.USER
        assert error.reason.isupper()
    else:
        assert recipe.name == text.strip().partition(":")[0]


def test_a_default_that_is_written_out_changes_nothing() -> None:
    name = "xnnpack_torchao_int8da_int4w_per_tensor"
    assert recipes.parse(f"{name}:group_size=32").digest == recipes.parse(name).digest


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(recipes.UnknownRecipe, match="Did you mean xnnpack_fp32"):
        recipes.parse("xnnpak_fp32")
    with pytest.raises(recipes.UnknownRecipe, match="recipes list"):
        recipes.parse("qqq")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("xnnpack_fp32:threads=2", "has no argument 'threads'. It takes none."),
        ("xnnpack_torchao_int8da_int4w_per_tensor:gs=2", "It takes group_size."),
    ],
)
def test_an_unknown_argument_is_answered_with_the_known_ones(text: str, sentence: str) -> None:
    with pytest.raises(recipes.UnknownRecipeArgument) as caught:
        recipes.parse(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("xnnpack_torchao_int8da_int4w_per_tensor:group_size=7", "Allowed: 16, 32, 64, 128, 256."),
        ("xnnpack_torchao_int8da_int4w_per_tensor:group_size=true", "Allowed: 16, 32"),
        ("coreml_fp16:lower_full_graph=1", "Allowed: true, false."),
        ("coreml_fp16:lower_full_graph=", "Allowed: true, false."),
        ("arm_ethos_u55_int8:macs=512", "Allowed: 32, 64, 128, 256."),
        ("coreml_codebook_weight_only:bits=9,block_size=1x16", "an integer from 1 to 8"),
        ("coreml_codebook_weight_only:bits=4", "needs the argument 'block_size'"),
        ("qnn_fp16", "needs the argument 'soc_model'"),
        ("arm_ethos_u55_int8:system_config=../../etc", "a text like"),
    ],
)
def test_a_bad_value_is_answered_with_the_allowed_ones(text: str, sentence: str) -> None:
    with pytest.raises(recipes.BadRecipeArgument) as caught:
        recipes.parse(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["x:", "xnnpack_fp32:", "xnnpack_fp32:a", "xnnpack_fp32:=1", "coreml_fp16:a=1,a=2"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(recipes.BadRecipeText):
        recipes.parse(text)


@pytest.mark.parametrize("text", ["", "recipe = 1", "name = 'x'", "recipe = 'portable'\narguments = 3", "= =", "[["])
def test_a_toml_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(recipes.BadRecipeText):
        recipes.from_toml(text)


def test_the_table_tells_what_each_recipe_does() -> None:
    for name, specification in RECIPES.items():
        assert specification.name == name
        assert specification.summary
        quantizes = "int8" in name or "int4" in name or "codebook" in name or "a16w8" in name
        assert (specification.quantization is not Quantization.NONE) == quantizes


def test_the_table_has_every_recipe_of_executorch() -> None:
    types = pytest.importorskip("executorch.backends.xnnpack.recipes.xnnpack_recipe_types")
    known = {recipe.value for recipe in types.XNNPackRecipeType}
    assert known == {name for name, s in RECIPES.items() if s.backend == "xnnpack"}
