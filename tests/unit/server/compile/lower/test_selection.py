"""Names in a recipe file's quantizers: what they select, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.refusals import refuses

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e  # noqa: E402 - needs torch

from etfarm.server.compile.lower import components  # noqa: E402
from etfarm.server.compile.lower.selection import Selection, require_found  # noqa: E402
from etfarm.wire import recipes  # noqa: E402

pytestmark = pytest.mark.slow(reason="exports models and inserts observers")

nn = torch.nn
IMAGE = (torch.rand(1, 3, 8, 8),)


class Block(nn.Module):  # type: ignore[misc]
    """Convolutions with a batch norm, an activation module and functional ones, and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.layers = nn.ModuleDict({"a-b": nn.Conv2d(8, 8, 3), "c": nn.Conv2d(8, 8, 1)})
        self.drop, self.self_attn = nn.Dropout(), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.act(self.bn1(self.conv1(x))))
        x = nn.functional.relu(self.layers["a-b"](x))
        x = torch.relu(self.layers["c"](x))
        x = x.flatten(2).transpose(1, 2)
        attended: torch.Tensor = self.self_attn(x, x, x)[0]
        return attended


def quantizer(text: str) -> Any:
    """Return the quantizer of a recipe file."""
    recipe = recipes.from_toml(f'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\n{text}\n')
    (built,) = components.quantizers(recipe.options.quantizers or ())
    return built


def annotated(text: str, module: Any = None, *, strict: bool = False, inputs: Any = IMAGE) -> tuple[list[str], list[Any]]:
    """Return the operators with weights, sums and activations that are quantized, and what the names selected."""
    module = module or Block()
    program = torch.export.export(module.eval(), inputs, strict=strict)
    built = quantizer(text)
    require_found(built.selection, {"forward": program.module(check_guards=False).graph})
    prepare_pt2e(program.module(check_guards=False), built)
    return sorted(node.name for node in built.annotated), built.selection.listed()


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the operators that were annotated before observers are inserted."""
    original = Selection.restrict

    def restrict(self: Selection, built: Any) -> None:
        original(self, built)
        annotate = built.annotate

        def noting(model: Any) -> Any:
            result = annotate(model)
            built.annotated = [
                node for node in result.graph.nodes
                if node.op == "call_function" and getattr(node.meta.get("quantization_annotation"), "_annotated", False)
                and str(node.target).split(".")[1] in ("conv2d", "linear", "relu", "add", "mul")
            ]  # fmt: skip
            return result

        built.annotate = noting

    monkeypatch.setattr(Selection, "restrict", restrict)


def stack() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 1)))


@pytest.mark.parametrize("strict", [False, True])
def test_children_of_a_root_sequential_are_named_by_their_numbers(strict: bool) -> None:
    names, listed = annotated('only_modules = ["0", "3.0"]', stack(), strict=strict)
    assert names == ["conv2d", "conv2d_2", "relu"]
    assert [(row.name, row.count, row.quantized) for row in listed] == [("0", 1, 1), ("3.0", 1, 1)]
    assert listed[1].operators[0].places[0].module == "3.0"


def test_an_activation_can_stay_in_fp32_without_the_convolution_before_it() -> None:
    names, listed = annotated('skip_modules = ["1"]', stack())
    assert names == ["conv2d", "conv2d_1", "conv2d_2"]
    assert [(row.name, row.quantized) for row in listed] == [("1", 0)]
    assert annotated('skip_modules = ["0"]', stack())[0] == ["conv2d_1", "conv2d_2"]


def test_functional_operators_are_named_by_module_operator_and_ordinal_or_by_line() -> None:
    line = Block.forward.__code__.co_firstlineno + 3
    for name, kept in (
        (":relu#1", {"relu_2"}),
        (f"test_selection.py:{line}", {"conv2d_2", "relu_2"}),
        (":relu", {"relu_1", "relu_2"}),
    ):
        names, (row,) = annotated(f'skip_operators = ["{name}"]')
        heavy = {each for each in names if not each.startswith(("linear", "add", "mul"))}
        assert heavy == {"conv2d", "conv2d_1", "conv2d_2", "relu", "relu_1", "relu_2"} - kept, name
        assert row.name == name and (row.count, row.quantized) == (len(kept), 0)
    names, _ = annotated('only_operators = ["layers.a-b:conv2d"]')
    assert names == ["conv2d_1", "relu_1"]


@pytest.mark.parametrize("key", ["a b", "it's c", "d#1", "e,f;g", "é"])
def test_a_key_of_a_dictionary_of_modules_is_a_name_whatever_its_text(key: str) -> None:
    class Keyed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({key: nn.Conv2d(3, 4, 3), "other": nn.Conv2d(4, 4, 3)})

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers["other"](torch.relu(self.layers[key](x)))

    for argument, name in (("only_modules", f"layers.{key}"), ("only_operators", f"layers.{key}:conv2d")):
        names, (row,) = annotated(f"{argument} = [{json.dumps(name, ensure_ascii=False)}]", Keyed())
        assert names == ["conv2d", "relu"]
        assert (row.name, row.count, row.operators[0].places[0].module) == (name, 1, f"layers.{key}")


def test_a_batch_norm_behind_a_linear_layer_is_refused_where_it_is_folded() -> None:
    with refuses("RECIPE_NAME_NOT_FOUND", match="folded into the layer '0'"):
        annotated('skip_modules = ["1"]', nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), inputs=(torch.rand(2, 8),))
    _, (row,) = annotated(
        'skip_modules = ["1"]', nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(5)), inputs=(torch.rand(2, 5, 8),)
    )
    assert row.count == 1


def test_a_module_that_only_its_enclosing_one_calls_is_found_by_its_parameters() -> None:
    _, (row,) = annotated('skip_modules = ["self_attn.out_proj"]')
    assert [(each.op, each.count) for each in row.operators] == [("linear", 1)]


@pytest.mark.remedy("RECIPE_NAME_NOT_FOUND")
@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ('skip_modules = ["layers.d"]', "layers.d", "layers.c"),
        ('only_modules = ["conv"]', "conv", "conv1"),
        ('skip_modules = ["bn1"]', "bn1", "conv1"),
        ('skip_modules = ["drop"]', "drop", "conv1"),
        ('skip_operators = [":relu#7"]', ":relu#7", "':relu#1'"),
        ('skip_operators = ["test_selection.py:1"]', "test_selection.py:1", "test_selection.py:"),
    ],
)
def test_a_name_that_selects_nothing_is_refused_with_the_nearest(text: str, name: str, nearest: str) -> None:
    with refuses("RECIPE_NAME_NOT_FOUND") as refused:
        annotated(text)
    assert refused.value.metadata["name"] == name and nearest in refused.value.remedy
    assert refused.value.metadata["argument"] == text.split()[0]
    _, (row,) = annotated(text.replace(name, refused.value.metadata["nearest"].split(",")[0]))
    assert row.count


class Counting(nn.Module):  # type: ignore[misc]
    """Changes a buffer, and multiplies with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("one", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        n = self.n + self.one
        self.n.copy_(n)
        return self.a(x) * n


@pytest.mark.parametrize("text", ['skip_operators = [":add", ":mul"]', 'only_modules = ["a"]'])
def test_operators_of_buffers_that_the_model_writes_are_selected_by_name(text: str) -> None:
    names, _ = annotated(text, Counting(), inputs=(torch.randn(2, 8),))
    assert names == ["linear"]
