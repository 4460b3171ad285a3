"""Recipe files: what they say is one canonical recipe, and each wrong field is refused by its name with what is allowed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

import pytest
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import recipes
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import (
    EDGE,
    EXECUTORCH,
    PARTITIONERS,
    QUANTIZERS,
    RECIPES,
    Argument,
    Component,
    ComponentSpecification,
    MethodOptions,
    Quantization,
)
from etfarm.wire.stages import STAGES
from tests.support.golden import Golden
from tests.support.refusals import refuses

XNNPACK = 'recipe = "xnnpack_fp32"\n'
INT8 = 'recipe = "xnnpack_pt2e_int8_static_per_channel"\n'
INT4 = 'recipe = "xnnpack_torchao_int8da_int4w_per_channel"\n'

FILE = """
name = "vlm"
combine = ["coreml_fp16:minimum_deployment_target=iOS17", {recipe = "xnnpack_fp32"}]
strict = true
stages = ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]

[[partitioners]]
name = "xnnpack"
precision = "static_quant"
per_op = true

[[quantizers]]
name = "xnnpack"
per_channel = true
skip_modules = ["head", "conv1", "head"]

[methods.decoder]
partitioners = ["vulkan", "xnnpack"]
quantizers = []

[edge]
check_ir_validity = false
preserve_ops = ["aten.linear.default"]

[executorch]
external_constants = "weights"
memory_planning = "naive"
segment_alignment = 256

[replace]
TO_BACKEND = "acme.stage"
"""


def value(argument: Argument) -> st.SearchStrategy[Any]:
    """Return a value of a field as TOML and JSON have it."""
    if argument.or_bool:
        return st.booleans() | st.text("abz019_", min_size=1, max_size=8)
    if argument.kind is list:
        texts = [
            text for text in ("aten.add.Tensor", "0.b", "a.b:add#1", ":relu", "net.py:31") if re.fullmatch(argument.pattern, text)
        ]
        one = st.sampled_from(argument.choices or texts)
        return st.lists(one, min_size=1, max_size=3) | one
    if argument.choices:
        return st.sampled_from(argument.choices)
    assert argument.kind is bool
    return st.booleans()


def table(arguments: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={argument.name: value(argument) for argument in arguments})


def components(known: Any) -> st.SearchStrategy[list[Any]]:
    def one(specification: ComponentSpecification) -> st.SearchStrategy[Any]:
        named = table(specification.arguments).map(lambda text: {"name": specification.name, **text})
        return st.just(specification.name) | named

    return st.lists(st.sampled_from(list(known.values())).flatmap(one), max_size=3)


METHODS = st.dictionaries(
    st.sampled_from(["encoder", "decoder"]),
    st.fixed_dictionaries({}, optional={"partitioners": components(PARTITIONERS), "quantizers": components(QUANTIZERS)}),
)
PLUGIN_VALUES = (
    st.text(max_size=5)
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.lists(st.integers(-9, 9), max_size=3)
    | st.lists(st.text(max_size=3), max_size=3)
)
PARTS: st.SearchStrategy[dict[str, Any]] = (
    st.just({})
    | st.sampled_from([name for name, s in RECIPES.items() if not any(a.required for a in s.arguments)]).map(
        lambda name: {"recipe": name}
    )
    | st.dictionaries(st.sampled_from("abc"), PLUGIN_VALUES).map(
        lambda arguments: {"recipe": "acme.fast", "arguments": arguments}
    )
    | st.lists(st.sampled_from(["xnnpack_fp32", "coreml_fp16", "coreml_pt2e_int8_static", "acme.fast"]), min_size=1).map(
        lambda names: {"combine": [{"recipe": name} for name in names]}
    )
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["mine", "a-1"]),
        "strict": st.booleans(),
        "per_op": st.booleans(),
        "copy_shared_layers": st.booleans(),
        "fuse_activations": st.booleans(),
        "partitioners": components(PARTITIONERS),
        "quantizers": components(QUANTIZERS),
        "methods": METHODS,
        "edge": table(EDGE.values()),
        "executorch": table(EXECUTORCH.values()),
        "replace": st.just({"TO_EXECUTORCH": "acme.stage"}) | st.just({"EDGE_PROGRAM_MANAGER_TRANSFORM": "acme.stage"}),
    },
)


@given(PARTS, OPTIONS)
def test_a_recipes_json_gives_the_same_recipe_and_json(parts: dict[str, Any], options: dict[str, Any]) -> None:
    try:
        recipe = recipes.from_json(json.dumps({**parts, "options": options}))
    except EtfarmError as error:  # torchao with quantizers; nothing named at all
        assert error.reason in ("BAD_RECIPE_COMBINATION", "BAD_RECIPE_TEXT")
        return
    again = recipes.from_json(recipe.json)
    assert again.json == recipe.json
    assert again == recipe
    assert again.digest == recipe.digest
    assert (again.stages, again.quantization, again.quantization_json) == (
        recipe.stages,
        recipe.quantization,
        recipe.quantization_json,
    )
    assert recipe.stages[-1] == "TO_EXECUTORCH"
    assert recipe.text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "recipe",
    "arguments",
    "combine",
    "options",
    "stages",
    "methods",
    "partitioners",
    "edge",
    "replace",
    "name",
    "strict",
    "per_op",
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES), st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES))
def test_any_json_is_a_recipe_with_a_canonical_form_or_a_users_error(top: dict[str, Any], options: dict[str, Any]) -> None:
    for text in (top, {**top, "recipe": "xnnpack_fp32", "options": options}, {"recipe": "acme.fast", "arguments": options}):
        try:
            recipe = recipes.from_json(json.dumps(text))
        except EtfarmError as error:
            assert error.fault == "USER"
        else:
            assert recipes.from_json(recipe.json).json == recipe.json


@pytest.mark.parametrize(
    "text",
    [
        '{"recipe":"acme.fast","arguments":{"a":NaN}}',
        '{"recipe":"acme.fast","arguments":{"a":1e999}}',
        '{"recipe":"acme.fast","arguments":{"a":9223372036854775808}}',
        '{"recipe":"acme.fast","arguments":{"a":"\\ud800"}}',
        '{"recipe":"acme.fast","arguments":{"a":null}}',
        '{"recipe":"acme.fast","arguments":{"a":{"b":1}}}',
        '{"recipe":"acme.fast","arguments":{"a":[1,"b"]}}',
        '{"recipe":"portable","recipe":"xnnpack_fp32"}',
        '{"recipe":"portable","options":3}',
        '{"recipe":"portable","stages":[]}',
        "[" * 100000,
        "3",
        "{}",
    ],
)
def test_what_has_no_canonical_form_is_refused(text: str) -> None:
    with pytest.raises(EtfarmError) as caught:
        recipes.from_json(text)
    assert caught.value.fault == "USER"


def test_a_file_says_all_that_a_recipe_is() -> None:
    recipe = recipes.from_toml(FILE, "file")
    assert [part.name for part in recipe.parts] == ["coreml_fp16", "xnnpack_fp32"]
    assert recipe.text == recipe.name == "vlm"
    assert recipe.strict
    assert recipe.stages == ("QUANTIZE", "TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH")
    assert recipe.options.partitioners == (Component("xnnpack", {"precision": ("static_quant",), "per_op": True}),)
    assert recipe.options.quantizers == (
        Component("xnnpack", {"per_channel": True, "skip_modules": ("conv1", "head"), "dynamic": False}),
    )
    decoder = (Component("vulkan"), Component("xnnpack", {"per_op": False}))
    assert recipe.options.methods == {"decoder": MethodOptions(decoder, ())}
    assert recipe.options.edge == {"check_ir_validity": False, "preserve_ops": ("aten.linear.default",)}
    assert recipe.options.executorch == {"external_constants": "weights", "memory_planning": "naive", "segment_alignment": 256}
    assert recipe.plugins == ("acme.stage",)
    assert recipe.quantization is Quantization.PT2E_STATIC
    assert recipe.quantization_of("decoder") is Quantization.NONE


def test_a_files_stem_is_what_people_see_and_no_part_of_the_identity() -> None:
    text = f"{XNNPACK}strict = true"
    named, other = recipes.from_toml(text, "mine"), recipes.from_toml(text, "theirs")
    assert (named.text, other.text) == (f"mine [{named.digest[:8]}]", f"theirs [{named.digest[:8]}]")
    assert named == other
    assert named.digest == other.digest
    assert "mine" not in named.json
    assert recipes.from_toml(text).text == f"xnnpack_fp32 [{named.digest[:8]}]"
    assert recipes.from_toml(XNNPACK, "mine") == recipes.parse("xnnpack_fp32")
    assert recipes.from_toml(XNNPACK, "mine").text == "xnnpack_fp32"
    assert recipes.from_toml(text, "xnnpack_fp32").text == f"xnnpack_fp32 [{named.digest[:8]}]"


FIELD_ERRORS = [
    (
        '[executorch]\nmemory_planning = "gredy"',
        '[executorch] memory_planning cannot be "gredy". Allowed: greedy, naive. Did you mean greedy?',
    ),
    ('[executorch]\nmemory_planing = "greedy"', "[executorch] memory_planing is not known. Allowed: external_constants, "),
    ('[executorch]\nmemory_planing = "greedy"', "Did you mean memory_planning?"),
    ("[executorch]\nsegment_alignment = 100", "[executorch] segment_alignment cannot be 100. Allowed: 16, 32, 64, 128, "),
    (
        "[executorch]\nexternal_constants = 3",
        "[executorch] external_constants cannot be 3. Allowed: true, false, or a .ptd file's name",
    ),
    ('[executorch]\nexternal_constants = "../x"', "[executorch] external_constants cannot be"),
    ("[edge]\nskip_dim_order = 1", "[edge] skip_dim_order cannot be 1. Allowed: true, false."),
    (
        '[edge]\npreserve_ops = ["linear"]',
        '[edge] preserve_ops cannot be ["linear"]. Allowed: a list of operators like aten.linear.default.',
    ),
    ("edge = 3", "[edge] cannot be 3. Allowed: a table of key = value."),
    ("strickt = true", "strickt is not known. Allowed: recipe, combine, arguments, name, strict,"),
    ("strickt = true", "Did you mean strict?"),
    ("strict = 1", "strict cannot be 1. Allowed: true, false."),
    ('name = "portable"', 'name cannot be "portable". Allowed: up to 64 letters'),
    ('stages = ["TORCH_EXPRT"]', 'stages cannot be "TORCH_EXPRT". Allowed: SOURCE_TRANSFORM, '),
    ('stages = ["TORCH_EXPRT"]', "Did you mean TORCH_EXPORT?"),
    ('stages = "QUANTIZE"', 'stages cannot be "QUANTIZE". Allowed: a list of SOURCE_TRANSFORM, '),
    (
        'partitioners = ["xnpack"]',
        'partitioners name cannot be "xnpack". Allowed: xnnpack, coreml, vulkan. Did you mean xnnpack?',
    ),
    ('partitioners = "xnnpack"', "partitioners cannot be"),
    ("[[partitioners]]\nper_op = true", "each a name or a [[partitioners]] table with a name."),
    (
        '[[partitioners]]\nname = "xnnpack"\nprecision = "fp33"',
        '[[partitioners]] xnnpack: precision cannot be "fp33". Allowed: one of, or a list of some of fp32, static_quant, '
        "dynamic_quant. Did you mean fp32?",
    ),
    (
        '[[partitioners]]\nname = "coreml"\ncompute_unit = "NPU"',
        'compute_unit cannot be "NPU". Allowed: ALL, CPU_ONLY, CPU_AND_GPU',
    ),
    (
        '[[quantizers]]\nname = "xnnpack"\nperchannel = true',
        "[[quantizers]] xnnpack: perchannel is not known. Allowed: per_channel, dynamic",
    ),
    ('[[quantizers]]\nname = "xnnpack"\nskip_modules = []', "a list of modules' names like layer1.conv"),
    ("[methods]\ndecoder = 3", "[methods.decoder] cannot be 3."),
    (
        "[methods.decoder]\npartitioner = []",
        "[methods.decoder] partitioner is not known. Allowed: partitioners, quantizers. Did you mean",
    ),
    (
        '[methods.decoder]\nquantizers = ["xnpack"]',
        'methods.decoder.quantizers name cannot be "xnpack". Allowed: xnnpack, coreml.',
    ),
    ('[methods."a b"]', '[methods] cannot be "a b".'),
    ('[replace]\nTO_BACKED = "acme.x"', "Did you mean TO_BACKEND?"),
    ('[replace]\nQUANTIZE = "acme.x"', '[replace] cannot be "QUANTIZE". Allowed: TO_EDGE_TRANSFORM_AND_LOWER, '),
    ('[replace]\nTO_BACKEND = "acme"', '[replace] TO_BACKEND cannot be "acme". Allowed: the name of a plug-in\'s stage'),
]


NAME_ERRORS = [
    ("combine = []", "combine cannot be []. Allowed: a list of recipes"),
    ('combine = ["xnnpack_fp32", 3]', "combine cannot be 3."),
    ('combine = [{recipe = "xnnpack_fp32", argument = {}}]', "[[combine]] argument is not known."),
    ("recipe = 1", "recipe cannot be 1. Allowed: a recipe's name"),
    ('recipe = "portable"\narguments = 3', "[arguments] cannot be 3."),
]


@pytest.mark.parametrize(("text", "sentence"), [*((XNNPACK + text, sentence) for text, sentence in FIELD_ERRORS), *NAME_ERRORS])
def test_a_wrong_field_is_refused_by_its_full_name_with_what_is_allowed(text: str, sentence: str) -> None:
    with refuses("BAD_RECIPE_FIELD", match=re.escape(sentence)) as caught:
        recipes.from_toml(text)
    assert caught.value.metadata["allowed"]


@pytest.mark.parametrize("where", ["quantizers", "methods.decoder.quantizers"])
@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("", "dynamic = true", True),
        ("per_channel = true", 'only_modules = ["head"]', True),
        ("dynamic = true", "", False),
        ('only_modules = ["head"]', "", False),
        ('skip_modules = ["head"]', "dynamic = true", False),
    ],
)
def test_a_quantizer_that_another_leaves_nothing_is_refused(
    golden: Golden, where: str, first: str, second: str, refused: bool
) -> None:
    text = 'recipe = "xnnpack_fp32"\n' + "".join(f'[[{where}]]\nname = "xnnpack"\n{output}\n' for output in (first, second))
    if not refused:
        assert recipes.from_toml(text).stages[0] == "QUANTIZE"
        return
    with golden.refuses("BAD_RECIPE_COMBINATION"):
        recipes.from_toml(text)


@pytest.mark.remedy("BAD_RECIPE_COMBINATION")
def test_a_files_quantizers_stand_in_place_of_recipes_that_could_not_be_combined() -> None:
    names = '["xnnpack_pt2e_int8_static_per_channel", "xnnpack_pt2e_int8_dynamic_per_channel"]'
    with refuses("BAD_RECIPE_COMBINATION", match="a recipe file"):
        recipes.from_toml(f"combine = {names}")
    assert recipes.from_toml(f'combine = {names}\nquantizers = ["xnnpack"]').quantization is recipes.Quantization.PT2E_STATIC


@pytest.mark.parametrize("field", ['stages = ["TORCH_EXPORT"]', "strict = true", "[methods.decoder]\nquantizers = []", ""])
def test_a_file_that_names_neither_recipes_nor_partitioners_is_refused(golden: Golden, field: str) -> None:
    with golden.refuses("BAD_RECIPE_TEXT"):
        recipes.from_toml(field)


def test_a_file_may_name_partitioners_alone() -> None:
    recipe = recipes.from_toml('partitioners = ["xnnpack"]')
    assert recipe.parts == ()
    assert recipe.text == f"xnnpack [{recipe.digest[:8]}]"
    assert recipe.quantization is Quantization.NONE


EDGE_STAGES = "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"


@pytest.mark.parametrize(
    ("expected", "stages", "sentence"),
    [
        (INT8, ("TORCH_EXPORT", *EDGE_STAGES), "its stages leave out QUANTIZE: the program would silently be fp32"),
        (INT8, EDGE_STAGES, "its stages leave out QUANTIZE"),
        (INT4, ("TORCH_EXPORT", *EDGE_STAGES), "its stages leave out SOURCE_TRANSFORM: the program would silently be fp32"),
        (INT4, ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT", *EDGE_STAGES), "has the stage QUANTIZE and no quantizer"),
        (XNNPACK, ("QUANTIZE", "TORCH_EXPORT", *EDGE_STAGES), "has the stage QUANTIZE and no quantizer for it"),
        (
            f"{INT8}quantizers = []\n",
            ("QUANTIZE", "TORCH_EXPORT", *EDGE_STAGES),
            "has the stage QUANTIZE and no quantizer for it",
        ),
        (f'{XNNPACK}quantizers = ["xnnpack"]\n', ("TORCH_EXPORT", *EDGE_STAGES), "its stages leave out QUANTIZE"),
        (XNNPACK, ("TORCH_EXPORT", "TO_EDGE"), "`etfarm compile --stop-after TO_EDGE`"),
        (XNNPACK, ("TO_EDGE", "TO_EXECUTORCH"), "Put TO_BACKEND between them"),
        (XNNPACK, ("TORCH_EXPORT", "TORCH_EXPORT"), "occurs twice"),
        (XNNPACK, (), "There are no stages."),
    ],
)
def test_stages_that_do_not_do_what_the_recipe_is_are_refused(expected: str, stages: tuple[str, ...], sentence: str) -> None:
    with refuses("BAD_STAGES") as caught:
        recipes.from_toml(f"{expected}stages = {json.dumps(stages)}")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("expected", "stages"),
    [
        (INT8, ("QUANTIZE", "TORCH_EXPORT", *EDGE_STAGES)),
        (INT8, ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT", *EDGE_STAGES)),
        (INT4, ("SOURCE_TRANSFORM", "TORCH_EXPORT", *EDGE_STAGES)),
        (XNNPACK, EDGE_STAGES),
        (XNNPACK, ("TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_EXECUTORCH")),
        (XNNPACK, ("TORCH_EXPORT", "TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_BACKEND", "TO_EXECUTORCH")),
    ],
)
def test_stages_in_any_valid_order_are_the_pipeline(expected: str, stages: tuple[str, ...]) -> None:
    assert recipes.from_toml(f"{expected}stages = {json.dumps(stages)}").stages == stages


@pytest.mark.remedy("BAD_STAGES")
def test_only_a_stage_of_the_recipe_can_be_replaced(golden: Golden) -> None:
    with golden.refuses("BAD_STAGES"):
        recipes.from_toml(f'{XNNPACK}[replace]\nTO_BACKEND = "acme.x"')
    replaced = recipes.from_toml(f'{XNNPACK}[replace]\nEDGE_PROGRAM_MANAGER_TRANSFORM = "acme.x"')
    assert "EDGE_PROGRAM_MANAGER_TRANSFORM" in replaced.stages


@pytest.mark.parametrize(
    ("expected", "quantization", "first"),
    [
        (XNNPACK, "NONE", "TORCH_EXPORT"),
        (INT8, "PT2E_STATIC", "QUANTIZE"),
        (INT4, "TORCHAO_SOURCE", "SOURCE_TRANSFORM"),
        (f"{INT8}quantizers = []", "NONE", "TORCH_EXPORT"),
        (f"{INT4}quantizers = []", "TORCHAO_SOURCE", "SOURCE_TRANSFORM"),
        (f'{XNNPACK}quantizers = ["xnnpack"]', "PT2E_STATIC", "QUANTIZE"),
        (f'{XNNPACK}[[quantizers]]\nname = "xnnpack"\ndynamic = true', "PT2E_DYNAMIC", "QUANTIZE"),
        (f'{XNNPACK}[methods.decoder]\nquantizers = ["xnnpack"]', "PT2E_STATIC", "QUANTIZE"),
    ],
)
def test_quantizers_stand_in_place_of_the_recipes(expected: str, quantization: str, first: str) -> None:
    recipe = recipes.from_toml(expected)
    assert recipe.quantization.value == quantization
    assert recipe.stages[0] == first


def test_what_quantize_depends_on_is_shared_by_recipes_that_differ_later() -> None:
    one = recipes.from_toml(INT8)
    for later in ('partitioners = ["xnnpack"]', "[edge]\nskip_dim_order = true", "[executorch]\nexternal_constants = true"):
        other = recipes.from_toml(f"{INT8}{later}")
        assert other.digest != one.digest
        assert other.quantization_json == one.quantization_json
    combined = recipes.parse("coreml_fp16+xnnpack_pt2e_int8_static_per_channel")
    assert combined.quantization_json == one.quantization_json
    for earlier in ("strict = true", 'quantizers = ["xnnpack"]', "[methods.forward]\nquantizers = []"):
        assert recipes.from_toml(f"{INT8}{earlier}").quantization_json != one.quantization_json


def test_a_method_that_the_model_lacks_is_refused_with_those_it_has(golden: Golden) -> None:
    recipe = recipes.from_toml(f"{XNNPACK}[methods.decodr]\npartitioners = []")
    recipes.check_methods(recipe, ["decodr"])
    with golden.refuses("BAD_RECIPE_FIELD"):
        recipes.check_methods(recipe, ["encoder", "decoder"])


def test_the_fields_are_those_of_executorchs_configurations() -> None:
    edge = {field.name for field in dataclasses.fields(EdgeCompileConfig)}
    renamed = {"core_aten_exceptions": "_core_aten_ops_exception_list"}
    assert {renamed.get(name, name if name in edge else f"_{name}") for name in EDGE} == edge
    planning = set(inspect.signature(MemoryPlanningPass).parameters) | {"memory_planning"}
    assert set(EXECUTORCH) <= {field.name for field in dataclasses.fields(ExecutorchBackendConfig)} | planning


def test_a_partitioners_precisions_are_executorchs() -> None:
    (precision,) = [one for one in PARTITIONERS["xnnpack"].arguments if one.name == "precision"]
    assert set(precision.choices) == {one.name.lower() for one in ConfigPrecisionType}


def test_every_stage_word_of_the_default_pipelines_is_one_of_executorchs() -> None:
    for name, specification in RECIPES.items():
        if not any(argument.required for argument in specification.arguments):
            assert set(recipes.parse(name).stages) <= set(STAGES)
