"""Int8 of models that compute with integers, and what a quantizer that fails is blamed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refuses

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils import _convert_scalars_to_attrs  # noqa: E402
from executorch.export import QuantizationRecipe  # noqa: E402
from torch import nn  # noqa: E402
from torchao.quantization.pt2e.quantizer import Quantizer  # noqa: E402

from etfarm.server.compile.errors import QuantizerFailed  # noqa: E402
from etfarm.server.compile.lower import build, integers, quantize, tasks  # noqa: E402
from etfarm.server.compile.request import QuantizeRequest  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import STATIC, compiled, plain, run, sample, sqnr_db  # noqa: E402

pytestmark = pytest.mark.slow(reason="quantizes and compiles")


class Positions(nn.Module):
    """Embeds ids and their positions, like BERT; both are computed with integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]) + 1
        ids = 2 * ids - 1
        return self.out(self.table(ids) + self.table(places))


class Ids(nn.Module):
    """Takes no ids of 20 or more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * 2.0


def positions() -> Any:
    torch.manual_seed(0)
    return torch.export.export(Positions().eval(), (torch.arange(1, 9).reshape(1, 8),))


class Floating(Quantizer):  # type: ignore[misc]
    """A quantizer outside of XNNPACK's that turns every number of a sum or product into a float."""

    def transform_for_annotation(self, model: Any) -> Any:
        return _convert_scalars_to_attrs(model)

    def annotate(self, model: Any) -> Any:
        return model

    def validate(self, model: Any) -> None:
        pass


def floating() -> QuantizationRecipe:
    return QuantizationRecipe(quantizers=[Floating()])


def xnnpack() -> Any:
    return build.quantization(recipes.parse(STATIC), "forward")


class Joined(nn.Module):
    """Joins ids, and features with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.out = nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features = self.table(torch.cat([ids, ids], 1)).view(1, -1, 32)
        return torch.cat([self.out(features), ids.view(1, -1, 1) * torch.ones(1, 1, 4, dtype=torch.long)], 1)


@pytest.mark.asyncio(loop_scope="session")
async def test_integers_that_are_joined_are_not_observed(workers: Workers, tmp_path: Path) -> None:
    ids = torch.randint(1, 30, (1, 8))
    model = Joined().eval()
    one = await compiled(workers, tmp_path, lambda: torch.export.export(model, (ids,)), STATIC)
    assert "STAYED_FP32" not in one.codes
    assert sqnr_db(model(ids), run(one.pte, [ids])[0]) > 40


@pytest.mark.asyncio(loop_scope="session")
async def test_int8_of_a_model_with_integer_arithmetic_is_close(workers: Workers, tmp_path: Path) -> None:
    torch.manual_seed(1)
    files = [sample(tmp_path / f"{seed}.ett", torch.randint(1, 30, (1, 8))) for seed in range(8)]
    one = await compiled(workers, tmp_path, positions, STATIC, calibration={"forward": files})
    assert one.codes == ["INTEGERS_KEPT"] and one.quantized is not None
    (warning,) = one.quantized["warnings"]
    assert warning["message"].startswith("2 sums and products of integers in forward stay integers")
    assert "places = torch.arange(ids.shape[1]) + 1" in warning["message"]
    inputs = torch.randint(1, 30, (1, 8))
    assert sqnr_db(positions().module()(inputs), run(one.pte, [inputs])[0]) > 15


def test_only_integers_are_kept_from_the_quantizer() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return (x + 1) * (n + 2) + (n * 0.5) + (n + n) + (n - 3)

    program = torch.export.export(Mixed().eval(), (torch.ones(2), torch.ones(2, dtype=torch.long)))
    module = program.module(check_guards=False)
    assert [node.args[1] for node in integers.find_scalar_arithmetic(program)] == [2]
    integers.keep_integers(module)
    assert [node.args[1] for node in module.graph.nodes if str(node.target).endswith(".Scalar")] == [2]
    assert torch.equal(module(torch.ones(2), torch.ones(2, dtype=torch.long)), torch.full((2,), 6.5))


@pytest.mark.remedy("QUANTIZER_FAILED")
def test_a_quantizer_is_blamed_where_the_model_itself_runs() -> None:
    with pytest.raises(QuantizerFailed) as caught:
        quantize.quantize(positions(), floating(), "acme", "forward", [])
    assert caught.value.reason == "QUANTIZER_FAILED" and "indices" in caught.value.metadata["why"]
    assert "test_compile_integers.py" in caught.value.metadata["source"]
    assert "return self.out(self.table(ids) + self.table(places))" in caught.value.message
    assert quantize.quantize(positions(), xnnpack(), STATIC, "forward", [])


@pytest.mark.remedy("CALIBRATION_FAILED")
def test_a_sample_is_blamed_where_the_model_fails_on_it(tmp_path: Path) -> None:
    program = torch.export.export(Ids().eval(), (torch.arange(8),))
    bad = sample(tmp_path / "bad.ett", torch.arange(15, 23))
    good = sample(tmp_path / "good.ett", torch.arange(8))
    with refuses("CALIBRATION_FAILED") as caught:
        quantize.quantize(program, xnnpack(), STATIC, "forward", [bad])
    assert quantize.quantize(program, xnnpack(), STATIC, "forward", [good])
    assert caught.value.metadata["sample"] == "calibration sample 0" and "index out of range" in caught.value.message


@pytest.mark.remedy("NO_EXAMPLE_INPUTS")
def test_a_program_without_example_inputs_is_exported_again(tmp_path: Path) -> None:
    program = torch.export.export(Ids().eval(), (torch.arange(8),))
    torch.export.save(program, tmp_path / "again.pt2")
    program.example_inputs = None
    with refuses("NO_EXAMPLE_INPUTS"):
        quantize.check(program, STATIC, "forward")
    again = torch.export.load(tmp_path / "again.pt2")
    quantize.check(again, STATIC, "forward")
    assert quantize.quantize(again, xnnpack(), STATIC, "forward", [])


@pytest.mark.parametrize("asked", [False, True])
def test_a_method_that_the_quantizer_fails_on_stays_unless_its_quantizers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    quantizations = {"text": floating(), "image": xnnpack()}
    monkeypatch.setattr(build, "quantization", lambda recipe, method: quantizations[method])
    own = '[methods.text]\nquantizers = [{name = "xnnpack", per_channel = true}]\n' if asked else ""
    recipe = recipes.from_toml(f'recipe = "{STATIC}"\n{own}')
    sources = {"image": models.save(models.conv, tmp_path / "image"), "text": models.save(positions, tmp_path / "text")}
    request = QuantizeRequest(sources, "tiny", recipe.json, {}, threads=1)
    folder = tmp_path / "work"
    folder.mkdir()
    threads = torch.get_num_threads()
    try:
        if asked:
            with pytest.raises(QuantizerFailed):
                tasks.quantize_model(request, folder, lambda event: None)
            return
        result = plain(tasks.quantize_model(request, folder, lambda event: None))
    finally:
        torch.set_num_threads(threads)
    assert result["programs"] == {"image": "image.pt2", "text": "text.pt2"}
    assert (folder / "text.pt2").read_bytes() == sources["text"].read_bytes()
    failed = next(warning for warning in result["warnings"] if warning["code"] == "QUANTIZER_FAILED")
    assert failed["message"].startswith("text fails once recipe") and failed["message"].endswith("The method stays as it is.")
