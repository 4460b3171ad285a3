"""SOURCE_TRANSFORM on the client: what recipes and users rewrite, how often a model is exported, what is refused and why."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup
from torchao.utils import unwrap_tensor_subclass

from etfarm.client.export import ModelSource
from etfarm.client.export.transform import _PROVIDERS, Transform
from etfarm.client.submit.preparation import BadModel, prepare
from etfarm.client.submit.prepared import PreparedExport
from etfarm.v1.common_pb2 import ACTOR_CLIENT
from etfarm.wire import recipes
from etfarm.wire.errors import EtfarmError
from etfarm.wire.pt2 import ArchiveFacts, read_archive
from tests.support.exports import read_program
from tests.support.golden import Golden
from tests.support.refusals import refuses

pytestmark = pytest.mark.numeric

FOUR_BIT = "xnnpack_torchao_int8da_int4w_per_channel"
GROUPS = "xnnpack_torchao_int8da_int4w_per_tensor:group_size=32"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


X = (torch.linspace(-1, 1, 64).reshape(1, 64),)


def export_of(model: Any, recipe: str, **more: Any) -> PreparedExport:
    return prepare(model, recipes=[recipe], **more).export_for(recipes.parse(recipe))


def program_of(export: PreparedExport, method: str = "forward") -> Any:
    pt2 = export.methods[method].pt2
    assert isinstance(pt2, bytes)
    return read_program(pt2)


def targets(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def stages(export: PreparedExport) -> list[str]:
    return [stage.stage for stage in export.stages_done()]


def refusal(model: Any, recipe: str, **more: Any) -> EtfarmError:
    with pytest.raises(EtfarmError) as caught:
        export_of(model, recipe, **more)
    return caught.value


def test_a_4_bit_recipe_is_applied_here_to_a_copy() -> None:
    module = mlp()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    expected = module(*X)
    export = export_of(module, FOUR_BIT, example_inputs=X)
    assert any(target.startswith("torchao.") for target in targets(program_of(export)))
    assert stages(export) == ["SOURCE_TRANSFORM", "TORCH_EXPORT"]
    assert all(stage.duration_ms > 0 and stage.where == ACTOR_CLIENT for stage in export.stages_done())
    values = program_of(export).module()(*X)
    assert not torch.equal(values, expected) and torch.allclose(values, expected, atol=0.1)
    assert module.state_dict().keys() == before.keys() and type(module[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.remedy("NOT_PREPARED_FOR_RECIPE")
def test_recipes_that_want_the_same_share_an_export(golden: Golden) -> None:
    created = prepare(mlp(), recipes=["xnnpack_fp32", "portable", FOUR_BIT, GROUPS, f"{FOUR_BIT}"], example_inputs=X)
    assert len(created.exports) == 3
    plain = created.export_for(recipes.parse("xnnpack_fp32"))
    assert plain is created.export_for(recipes.parse("portable")) and stages(plain) == ["TORCH_EXPORT"]
    assert created.export_for(recipes.parse(GROUPS)) is not created.export_for(recipes.parse(FOUR_BIT))
    with refuses("NOT_PREPARED_FOR_RECIPE") as refused:
        created.export_for(recipes.parse("xnnpack_torchao_int8da_int4w_per_tensor:group_size=128"))
    golden.check(refused.value)
    alone = prepare(mlp(), recipes=[FOUR_BIT], example_inputs=X)
    with refuses("NOT_PREPARED_FOR_RECIPE"):
        alone.export_for(recipes.parse(GROUPS))
    assert prepare(mlp(), recipes=[FOUR_BIT, GROUPS], example_inputs=X).export_for(recipes.parse(GROUPS))


def test_the_seeds_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    prepare(mlp_unseeded := nn.Sequential(nn.Linear(64, 8)).eval(), recipes=[FOUR_BIT], example_inputs=X)
    assert type(mlp_unseeded[0]) is nn.Linear
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.remedy("CLIENT_TOOLS_MISSING")
def test_without_the_library_of_a_recipe_one_that_the_server_quantizes_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _PROVIDERS["xnnpack"], None)
    with refuses("CLIENT_TOOLS_MISSING", match=r"pip install 'etfarm\[export\]'"):
        export_of(mlp(), FOUR_BIT, example_inputs=X)
    assert export_of(mlp(), "xnnpack_pt2e_int8_static_per_channel", example_inputs=X)
    monkeypatch.undo()
    assert export_of(mlp(), FOUR_BIT, example_inputs=X)


@pytest.mark.remedy("NOTHING_TO_TRANSFORM")
def test_a_module_without_a_linear_is_refused_before_it_is_exported() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    error = refusal(convolutions, FOUR_BIT, example_inputs=(torch.zeros(1, 3, 8, 8),))
    assert (error.reason, error.stage) == ("NOTHING_TO_TRANSFORM", "SOURCE_TRANSFORM")
    assert "has no nn.Linear" in str(error) and "it has 2 Conv2d, 1 BatchNorm2d" in str(error)
    assert export_of(convolutions, "xnnpack_pt2e_int8_static_per_channel", example_inputs=(torch.zeros(1, 3, 8, 8),))


@pytest.mark.remedy("SOURCE_TRANSFORM_FAILED")
def test_a_group_size_that_does_not_divide_is_reported_with_the_layer_and_valid_sizes() -> None:
    module = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8)).eval()
    error = refusal(module, GROUPS.replace("32", "64"), example_inputs=X)
    assert "'1' has 96 inputs, which the group_size 64" in str(error)
    assert "Use xnnpack_torchao_int8da_int4w_per_tensor:group_size=32" in str(error)
    assert error.reason == "SOURCE_TRANSFORM_FAILED" and isinstance(error.__cause__, AssertionError)
    assert export_of(module, GROUPS, example_inputs=X)


@pytest.mark.parametrize("recipe", [FOUR_BIT, GROUPS])
def test_a_model_whose_layers_xnnpack_would_refuse_is_refused_before_it_is_exported(recipe: str) -> None:
    module = nn.Sequential(nn.Linear(48, 8), nn.Linear(8, 8)).eval()
    error = refusal(module, recipe, example_inputs=(torch.zeros(1, 48),))
    assert "'0' has 48 inputs, but XNNPACK takes" in str(error) and "use a pt2e recipe" in str(error)
    assert (error.reason, error.metadata["layer"]) == ("SOURCE_TRANSFORM_FAILED", "0")


@pytest.mark.parametrize("recipe", [FOUR_BIT, GROUPS])
def test_layers_that_xnnpack_would_refuse_stay_in_fp32_and_are_named(recipe: str) -> None:
    source = ModelSource.of(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)).eval(), X)
    lines: list[str] = []
    transform = Transform(source, recipes.parse(recipe), Path.cwd(), lines.append)
    module, _ = transform.apply("forward")
    assert [type(layer.weight) is nn.Parameter for layer in module] == [False, True]
    assert lines == [
        "forward: 1 of 2 layers stay in fp32, since 4-bit weights of XNNPACK need a multiple of 32 inputs: 1 (48 inputs)."
    ]


class Reused(nn.Module):
    """Uses layers, and the weight of one of them by itself."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], *, kind: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b, self.c = body, nn.Linear(64, 64), kind(64, 64), nn.Linear(64, 48)
        self.table = nn.Embedding(64, 64)
        self.head = nn.Linear(64, 64)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Scaled(nn.Linear):
    """Computes with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Adapted(nn.Linear):
    """Adds to what a layer returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def layers_of(m: Any, x: Tensor) -> Tensor:
    return m.c(m.head(m.b(m.a(x))))  # type: ignore[no-any-return]


REUSED: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: Reused(lambda m, x: layers_of(m, F.linear(m.b(x), m.b.weight.t()))),
    "by matmul": lambda: Reused(lambda m, x: layers_of(m, x) @ m.c.weight @ m.b.weight.T),
    "in part": lambda: Reused(lambda m, x: layers_of(m, x) + F.linear(x, m.b.weight[:48])),
    "a class of its own": lambda: Reused(layers_of, kind=Scaled),
    "beside a table": lambda: Reused(lambda m, x: layers_of(m, m.table(torch.arange(2)) + m.b.weight.mean() * x)),
}


@pytest.mark.parametrize("name", REUSED)
def test_layers_whose_weights_are_used_by_themselves_stay_in_fp32_and_are_named(name: str) -> None:
    model, lines = REUSED[name]().eval(), list[str]()
    program = program_of(export_of(model, FOUR_BIT, example_inputs=X, say=lines.append))
    kept = "c, b" if name == "by matmul" else "b"
    count = len(kept.split(", "))
    named = [line for line in lines if "stay in fp32" in line]
    assert named == [
        f"forward: {count} of 4 layers stay in fp32, since forward uses their weights itself, as by transposing them, and "
        f"torchao's tensors lack that: {kept}."
    ]
    quantized = [node for node in program.graph.nodes if str(node.target) == "torchao.dequantize_affine.default"]
    assert len(quantized) == 2 * (4 - count)  # of each layer the weight and what goes in
    with torch.no_grad():
        expected = model(*X)
        assert (program.module()(*X) - expected).norm() < 0.3 * expected.norm()


def test_a_subclass_that_only_adds_to_its_layer_is_quantized() -> None:
    lines: list[str] = []
    program = program_of(export_of(Reused(layers_of, kind=Adapted).eval(), FOUR_BIT, example_inputs=X, say=lines.append))
    assert not [line for line in lines if "stay in fp32" in line] and "b.weight" not in program.state_dict


@pytest.mark.remedy("SOURCE_TRANSFORM_FAILED")
def test_a_model_that_uses_all_weights_by_themselves_is_refused_with_what_helps() -> None:
    model = nn.Sequential(Scaled(64, 64)).eval()
    error = refusal(model, FOUR_BIT, example_inputs=X)
    assert (error.reason, error.metadata["layer"]) == ("SOURCE_TRANSFORM_FAILED", "0")
    assert error.remedy == "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel."
    assert export_of(model, "xnnpack_pt2e_int8_static_per_channel", example_inputs=X)


class Kept(nn.Linear):
    """A layer that keeps what it computed from its weight."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.doubled = self.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.doubled.sum()


@pytest.mark.remedy("SOURCE_TRANSFORM_FAILED")
@pytest.mark.parametrize(
    ("normed", "message", "remedy"),
    [
        (parametrizations.weight_norm, "'0' computes its weight by a parametrization", "parametrize.remove_parametrizations("),
        (nn.utils.weight_norm, "0.weight is the result of a computation with gradients", "nn.utils.remove_weight_norm("),
        (lambda layer: Kept(), "0.doubled is the result of a computation with gradients", "without its gradient: model."),
    ],
    ids=["parametrized", "hooked", "kept"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_a_model_computes_are_quantized_once_they_are_stored(normed: Any, message: str, remedy: str) -> None:
    model = nn.Sequential(normed(nn.Linear(64, 64)), nn.Linear(64, 8)).eval()
    error = refusal(model, FOUR_BIT, example_inputs=X)
    assert error.reason == "SOURCE_TRANSFORM_FAILED" and message in error.message and remedy in error.remedy
    exec(
        error.remedy.partition("by ")[2].rstrip(".") or error.remedy.partition(": ")[2].rstrip("."),
        {"torch": torch, "model": model},
    )
    assert "0.weight" not in program_of(export_of(model, FOUR_BIT, example_inputs=X)).state_dict


def test_a_weight_that_is_used_where_data_is_needed_is_refused_with_what_helps() -> None:
    model = Reused(lambda m, x: layers_of(m, x) * x.sum().item() @ m.c.weight).eval()
    error = refusal(model, FOUR_BIT, example_inputs=X)
    assert error.reason == "EXPORT_FAILED" and "test_transform.py:" in error.message
    assert error.remedy == "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel."
    assert export_of(model, "xnnpack_pt2e_int8_static_per_channel", example_inputs=X)


def test_users_own_transforms_work_on_a_copy_and_are_reported() -> None:
    def without_bias(method: str, module: nn.Module) -> nn.Module:
        assert method == "forward"
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.bias = None
        return module

    module = mlp()
    export = export_of(ModelSource.of(module, X, source_transforms=[without_bias]), "portable")
    assert stages(export) == ["SOURCE_TRANSFORM", "TORCH_EXPORT"]
    assert not [name for name in program_of(export).state_dict if "bias" in name]
    assert module[0].bias is not None


def test_a_transform_that_fails_is_reported_with_its_line() -> None:
    def breaks(method: str, module: nn.Module) -> nn.Module:
        raise RuntimeError("no such layer")

    def forgets(method: str, module: nn.Module) -> Any:
        return None

    error = refusal(ModelSource.of(mlp(), X, source_transforms=[breaks]), "portable")
    assert "the source transform breaks raised RuntimeError: no such layer, at " in str(error)
    assert "test_transform.py:" in str(error)
    error = refusal(ModelSource.of(mlp(), X, source_transforms=[forgets]), "portable")
    assert "the source transform forgets returned a NoneType, not a module. Return the module." in str(error)


def test_a_quantized_graph_module_is_reported_as_quantized() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    plain = torch.export.export(mlp(), X).module()
    prepared = prepare_pt2e(plain, quantizer)
    prepared(*X)
    quantized = export_of(convert_pt2e(prepared), "xnnpack_pt2e_int8_static_per_channel", example_inputs=X)
    assert stages(quantized) == ["QUANTIZE", "TORCH_EXPORT"]
    assert not quantized.stages_done()[0].HasField("duration_ms")
    again = export_of(torch.export.export(mlp(), X).module(), "xnnpack_fp32", example_inputs=X)
    assert stages(again) == ["TORCH_EXPORT"]


class Encoder(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image * 2


def test_a_dict_of_modules_is_a_model_of_several_methods(golden: Golden) -> None:
    inputs = {"encode": (torch.ones(2),), "decode": X}
    export = export_of({"encode": Encoder().eval(), "decode": mlp()}, FOUR_BIT, example_inputs=inputs)
    assert {name: method.input_names for name, method in export.methods.items()} == {"encode": ("image",), "decode": ("input",)}
    assert set(export.stages_done()[1].methods) == {"encode", "decode"}
    with pytest.raises(BadModel) as refused:
        prepare({"encode": Encoder()}, example_inputs=(torch.ones(2),))
    golden.check(refused.value)


def test_a_dict_of_programs_and_one_of_paths_are_models_too(golden: Golden, tmp_path: Path) -> None:
    programs = {"a": torch.export.export(Encoder().eval(), (torch.ones(2),)), "b": torch.export.export(mlp(), X)}
    created = prepare(programs)
    assert set(created.methods) == {"a", "b"} and created.methods["a"].input_names == ("image",)
    for name, program in programs.items():
        torch.export.save(program, tmp_path / f"{name}.pt2")
    paths = prepare({name: tmp_path / f"{name}.pt2" for name in programs})
    assert paths.name == "a+b" and paths.methods["b"].pt2 == tmp_path / "b.pt2"
    with pytest.raises(BadModel) as refused:
        prepare({"a": programs["a"], "b": mlp()})
    golden.check(refused.value)


def test_constant_methods_are_kept() -> None:
    export = export_of(ModelSource.of(mlp(), X, constant_methods={"bos": 3}), "portable")
    assert set(export.constants) == {"bos"}


def test_exports_are_files_where_a_folder_is_given(tmp_path: Path) -> None:
    export = export_of(ModelSource.of(mlp(), X), "portable", folder=tmp_path)
    pt2 = export.methods["forward"].pt2
    assert isinstance(pt2, Path) and pt2.parent == tmp_path and read_program(pt2.read_bytes())


@pytest.mark.parametrize(
    "recipe", ["coreml_torchao_int4_weight_only_per_channel", "coreml_codebook_weight_only:bits=4,block_size=-1x16"]
)
def test_core_mls_transforms_are_its_providers_own(recipe: str) -> None:
    pytest.importorskip("coremltools")
    export = export_of(mlp(), recipe, example_inputs=X)
    assert stages(export) == ["SOURCE_TRANSFORM", "TORCH_EXPORT"]
    pt2 = export.methods["forward"].pt2
    assert isinstance(pt2, bytes) and read_archive(pt2).transformed


def test_what_an_archive_says_of_itself_needs_no_torch(tmp_path: Path) -> None:
    assert read_archive(b"no zip") == read_archive(tmp_path / "none.pt2") == ArchiveFacts()
    with zipfile.ZipFile(tmp_path / "odd.pt2", "w") as archive:
        archive.writestr("odd/models/model.json", '{"graph_module": []}')
    assert read_archive(tmp_path / "odd.pt2") == ArchiveFacts()


def int8_weights(module: nn.Module) -> nn.Module:
    quantize_(module, Int8WeightOnlyConfig())
    return module


def four_bit_groups(module: nn.Module) -> nn.Module:
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(module, config)
    return module


class Tied(nn.Module):
    """A quantized weight that belongs to no nn.Linear, and is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = four_bit_groups(nn.Sequential(nn.Linear(64, 64)))[0].weight
        self.out = nn.Linear(64, 64)
        self.out.weight = self.table

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.linear(x, self.table))


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: int8_weights(mlp()), id="int8"),
        pytest.param(lambda: four_bit_groups(mlp()), id="8da4w"),
        pytest.param(lambda: int8_weights(nn.Linear(64, 8).eval()), id="root"),
        pytest.param(lambda: Tied().eval(), id="own parameter"),
        pytest.param(lambda: unwrap_tensor_subclass(int8_weights(mlp())), id="unwrapped by the factory"),
    ],
)
@pytest.mark.parametrize("transforms", [False, True])
def test_quantized_weights_of_a_factory_become_plain_tensors(module: Callable[[], nn.Module], transforms: bool) -> None:
    built = module()
    kinds = [type(parameter) for parameter in built.parameters()]
    source = ModelSource.of(built, X, source_transforms=[lambda method, module: module] if transforms else ())
    export = export_of(source, "portable")
    assert not any(config["use_pickle"] for config in payloads(export))
    assert torch.equal(program_of(export).module()(*X), built(*X))
    assert [type(parameter) for parameter in built.parameters()] == kinds


class Branched(nn.Module):
    """Uses a layer, or its weight, within a branch."""

    def __init__(self, *, is_given: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_given = nn.Linear(64, 64), is_given

    def forward(self, x: Tensor) -> Any:
        if self.is_given:
            return torch.cond(x.sum() > 5, lambda v, w: v * 2, lambda v, w: F.linear(v, w), (x, self.layer.weight))
        return torch.cond(x.sum() > 5, lambda v: v * 2, lambda v: self.layer(v), (x,))


def test_quantized_activations_within_a_branch_are_refused_with_what_helps() -> None:
    module = Branched(is_given=False).eval()
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    error = refusal(module, "portable", example_inputs=X)
    assert error.reason == "EXPORT_FAILED" and "with UncapturedHigherOrderOpError" in error.message
    assert "quantize those with Int8WeightOnlyConfig, or leave them out with the filter of quantize_" in error.remedy
    mended = program_of(export_of(int8_weights(Branched(is_given=False).eval()), "portable", example_inputs=X))
    assert torch.equal(mended.module()(*X), int8_weights(Branched(is_given=False)).layer(*X))
    kept = Branched(is_given=False).eval()
    quantize_(kept, Int8DynamicActivationInt8WeightConfig(), lambda part, path: False)
    assert torch.equal(program_of(export_of(kept, "portable", example_inputs=X)).module()(*X), kept(*X))


def test_operators_that_quantized_tensors_lack_are_refused_with_what_helps() -> None:
    error = refusal(int8_weights(Branched(is_given=True).eval()), "portable", example_inputs=X)
    assert error.reason == "EXPORT_FAILED" and "test_transform.py:" in error.message
    assert error.remedy.endswith("leave that layer out with the filter of quantize_.")
    kept = Branched(is_given=True).eval()
    quantize_(kept, Int8WeightOnlyConfig(), lambda part, path: False)
    assert torch.equal(program_of(export_of(kept, "portable", example_inputs=X)).module()(*X), kept(*X))


def test_quantize_works_in_a_transform() -> None:
    export = export_of(ModelSource.of(mlp(), X, source_transforms=[lambda method, module: int8_weights(module)]), "portable")
    assert not any(config["use_pickle"] for config in payloads(export))
    assert torch.equal(program_of(export).module()(*X), int8_weights(mlp())(*X))
    assert torch.int8 in {tensor.dtype for tensor in program_of(export).state_dict.values()}


def test_a_subclass_that_only_adds_methods_becomes_a_plain_tensor() -> None:
    class Named(torch.Tensor):
        pass

    module = mlp()
    module.register_buffer("offset", torch.ones(8).as_subclass(Named))
    module.forward = lambda x: nn.Sequential.forward(module, x) + module.offset  # type: ignore[method-assign]
    export = export_of(module, "portable", example_inputs=X)
    assert not any(config["use_pickle"] for config in payloads(export))
    assert torch.equal(program_of(export).module()(*X), module(*X)) and type(module.offset) is Named


def payloads(export: PreparedExport) -> list[dict[str, Any]]:
    """Return the entries of an archive's weights and constants."""
    pt2 = export.methods["forward"].pt2
    assert isinstance(pt2, bytes)
    with zipfile.ZipFile(io.BytesIO(pt2)) as archive:
        configs = [json.loads(archive.read(name))["config"] for name in archive.namelist() if name.endswith("_config.json")]
    return [entry for config in configs for entry in config.values()]
