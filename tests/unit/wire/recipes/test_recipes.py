"""Recipes: every spelling of one recipe has one digest, and each refusal says what is allowed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import recipes
from etfarm.wire.errors import Fault, UserError
from etfarm.wire.recipes import RECIPES, Argument, Plain, Quantization, Recipe, Specification
from tests.support.golden import Golden
from tests.support.refusals import refuses


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
    arguments = {a.name: draw(values(a)) for a in specification.arguments if a.required or draw(st.booleans())}
    return recipes.resolve(specification.name, arguments)


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
        assert recipes.parse(recipe.text) == recipe


def test_a_default_that_is_written_out_changes_nothing() -> None:
    name = "xnnpack_torchao_int8da_int4w_per_tensor"
    assert recipes.parse(f"{name}:group_size=32").digest == recipes.parse(name).digest


def test_a_misspelt_name_is_answered_with_the_nearest(golden: Golden) -> None:
    with golden.refuses("UNKNOWN_RECIPE"):
        recipes.parse("xnnpak_fp32")
    with refuses("UNKNOWN_RECIPE", match="recipes list"):
        recipes.parse("qqq")


def test_each_pattern_is_described_for_users() -> None:
    arguments = [argument for recipe in recipes.RECIPES.values() for argument in recipe.arguments]
    assert [argument.name for argument in arguments if bool(argument.pattern) != bool(argument.like)] == []


FOUR_BIT = "xnnpack_torchao_int8da_int4w_per_channel"
INT4 = "xnnpack_torchao_int8da_int4w_per_tensor"
INT8 = "xnnpack_pt2e_int8_static_per_channel"
DYNAMIC = "xnnpack_pt2e_int8_dynamic_per_channel"


@pytest.mark.parametrize(
    ("text", "reason", "sentence"),
    [
        ("xnnpack_fp32:threads=2", "UNKNOWN_RECIPE_ARGUMENT", "has no argument 'threads'. It takes none."),
        (f"{INT4}:gs=2", "UNKNOWN_RECIPE_ARGUMENT", "It takes group_size."),
        (f"{INT4}:group_size=16", "BAD_RECIPE_ARGUMENT", "Allowed: 32, 64, 128, 256."),
        (f"{INT4}:group_size=true", "BAD_RECIPE_ARGUMENT", "Allowed: 32, 64"),
        ("coreml_torchao_int4_weight_only_per_group:group_size=7", "BAD_RECIPE_ARGUMENT", "Allowed: 16, 32, 64, 128, 256."),
        ("coreml_fp16:lower_full_graph=1", "BAD_RECIPE_ARGUMENT", "Allowed: true, false."),
        ("coreml_fp16:lower_full_graph=", "BAD_RECIPE_ARGUMENT", "Allowed: true, false."),
        ("arm_ethos_u55_int8:macs=512", "BAD_RECIPE_ARGUMENT", "Allowed: 32, 64, 128, 256."),
        ("coreml_codebook_weight_only:bits=9,block_size=1x16", "BAD_RECIPE_ARGUMENT", "an integer from 1 to 8"),
        ("coreml_codebook_weight_only:bits=4", "BAD_RECIPE_ARGUMENT", "needs the argument 'block_size'"),
        ("qnn_fp16", "BAD_RECIPE_ARGUMENT", "needs the argument 'soc_model'"),
        ("arm_ethos_u55_int8:system_config=../../etc", "BAD_RECIPE_ARGUMENT", "a name of letters, digits and _"),
        (f"{FOUR_BIT}+{INT8}", "BAD_RECIPE_COMBINATION", f"{FOUR_BIT} and {INT8} cannot be combined"),
        ("xnnpack_fp32+portable", "BAD_RECIPE_COMBINATION", "portable cannot be combined"),
        (f"{INT8}+{DYNAMIC}", "BAD_RECIPE_COMBINATION", f"{DYNAMIC} would only get what {INT8} leaves. Keep one"),
        (
            "coreml_pt2e_int8_static+coreml_pt2e_int8_weight_only",
            "BAD_RECIPE_COMBINATION",
            "both quantize the whole model for coreml",
        ),
    ],
)
def test_what_a_recipe_does_not_take_is_answered_with_what_is_allowed(text: str, reason: str, sentence: str) -> None:
    with refuses(reason, match=re.escape(sentence)):
        recipes.parse(text)


@pytest.mark.parametrize(
    "text", ["x:", "xnnpack_fp32+", "+", "xnnpack_fp32:", "xnnpack_fp32:a", "xnnpack_fp32:=1", "coreml_fp16:a=1,a=2"]
)
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with refuses("BAD_RECIPE_TEXT"):
        recipes.parse(text)


@pytest.mark.parametrize("text", ["", "name = 'x'", "arguments = {a = 1}", "= =", "[["])
def test_a_toml_of_another_form_is_refused(text: str) -> None:
    with refuses("BAD_RECIPE_TEXT"):
        recipes.from_toml(text)


def test_the_table_describes_each_recipe() -> None:
    for name, specification in RECIPES.items():
        assert specification.name == name
        assert specification.summary
        quantizes = "int8" in name or "int4" in name or "codebook" in name or "a16w8" in name
        assert (specification.quantization is not Quantization.NONE) == quantizes


def test_the_table_has_every_recipe_of_executorch() -> None:
    types = pytest.importorskip("executorch.backends.xnnpack.recipes.xnnpack_recipe_types")
    known = {recipe.value for recipe in types.XNNPackRecipeType}
    assert known == {name for name, s in RECIPES.items() if s.backend == "xnnpack"}


def test_named_recipes_keep_their_json_and_so_their_digests() -> None:
    assert recipes.parse("xnnpack_fp32").json == '{"arguments":{},"recipe":"xnnpack_fp32"}'
    grouped = recipes.parse("xnnpack_torchao_int8da_int4w_per_tensor:group_size=64")
    assert grouped.json == '{"arguments":{"group_size":64},"recipe":"xnnpack_torchao_int8da_int4w_per_tensor"}'


def test_recipes_combine_in_their_order_each_with_its_arguments() -> None:
    text = "coreml_fp16:minimum_deployment_target=iOS17+xnnpack_fp32"
    recipe = recipes.parse(f" {text.replace('+', ' + ')} ")
    assert recipe.text == text
    assert recipe.name == "coreml_fp16+xnnpack_fp32"
    assert [dict(part.arguments) for part in recipe.parts] == [{"minimum_deployment_target": "iOS17"}, {}]
    assert recipes.parse("xnnpack_fp32+coreml_fp16") != recipes.parse("coreml_fp16+xnnpack_fp32")
    assert recipes.parse("xnnpack_fp32+xnnpack_fp32") == recipes.parse("xnnpack_fp32")


def test_quantizers_of_different_backends_go_together() -> None:
    recipe = recipes.parse("coreml_pt2e_int8_static+xnnpack_pt2e_int8_static_per_channel")
    assert recipe.quantization is Quantization.PT2E_STATIC


def test_a_source_transform_goes_with_recipes_that_only_lower() -> None:
    recipe = recipes.parse("coreml_fp16+xnnpack_torchao_int8da_int4w_per_channel")
    assert recipe.quantization is Quantization.TORCHAO_SOURCE
    assert recipe.stages[0] == "SOURCE_TRANSFORM"


def test_a_plugins_recipe_takes_any_arguments_and_keeps_their_types() -> None:
    recipe = recipes.parse("acme.fast:level=3,exact=true,ratio=0.5,mode=quick")
    assert dict(recipe.parts[0].arguments) == {"level": 3, "exact": True, "ratio": 0.5, "mode": "quick"}
    assert recipe.plugins == ("acme.fast",)
    assert not recipe.resolved
    assert recipes.parse(recipe.text) == recipe


def test_a_plugins_arguments_without_a_text_are_identified_by_a_digest() -> None:
    recipe = recipes.resolve("acme.fast", {"level": "3"})
    assert recipe != recipes.parse("acme.fast:level=3")
    assert recipe.text == f"acme.fast [{recipe.digest[:8]}]"


def test_a_plugins_description_is_validated_and_changes_no_digest(golden: Golden) -> None:
    level = Argument("level", "how much", int, bounds=(0, 3), required=True)
    known = {"acme.fast": Specification("acme.fast", "acme", Quantization.PT2E_STATIC, "fast", arguments=(level,))}
    asked = recipes.parse("acme.fast:level=2+xnnpack_fp32")
    resolved = recipes.with_plugins(asked, known)
    assert resolved.digest == asked.digest
    assert resolved.resolved
    assert resolved.stages[0] == "QUANTIZE"
    assert recipes.with_plugins(asked, {}) == asked
    with pytest.raises(recipes.BadRecipeArgument, match="from 0 to 3"):
        recipes.with_plugins(recipes.parse("acme.fast:level=4"), known)
    with golden.refuses("BAD_RECIPE_ARGUMENT"):
        recipes.with_plugins(recipes.parse("acme.fast"), known)
    with golden.refuses("UNKNOWN_RECIPE_ARGUMENT"):
        recipes.with_plugins(recipes.parse("acme.fast:levl=1"), known)
    stages = 'stages = ["TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]'
    silent = recipes.from_toml(f'recipe = "acme.fast"\narguments = {{level = 1}}\n{stages}')
    with golden.refuses("BAD_STAGES"):
        recipes.with_plugins(silent, known)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"recipe": "portable", "options": {"name": "x" * (256 << 10)}}),
        json.dumps({"combine": ["portable"] * 33}),
        json.dumps({"recipe": "a.b", "arguments": {f"k{number}": 1 for number in range(65)}}),
        json.dumps({"recipe": "a.b", "arguments": {"k": [1] * 4097}}),
        json.dumps({"options": {"partitioners": ["xnnpack"] * 65}}),
        json.dumps({"options": {"partitioners": ["xnnpack"], "methods": {f"m{number}": {} for number in range(257)}}}),
        json.dumps({"options": {"partitioners": ["xnnpack"], "stages": ["TO_EDGE"] * 65}}),
        "[" * 200_000,
        '{"recipe":' * 20_000,
        "x" * 250_000,
    ],
    ids=["length", "parts", "arguments", "list", "components", "methods", "stages", "depth", "nesting", "name"],
)
def test_a_recipe_without_measure_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        recipes.from_json(text)
