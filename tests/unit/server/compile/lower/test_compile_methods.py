"""Programs of several methods: one .pte, one record, each method by its own options."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.reports.trace.graph import read_record  # noqa: E402 - needs torch
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support.compiling import ASSISTANT, STATIC, WIDTH, compiled, run, sample, sqnr_db, text_decoder  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow(reason="each test compiles in a child")]


def eager(method: str) -> Any:
    torch.manual_seed(0)
    return ASSISTANT[method]().module()


async def test_three_methods_are_one_program_that_gives_what_the_model_gives(workers: Workers, tmp_path: Path) -> None:
    constants = {
        "get_width": sample(tmp_path / "w", WIDTH),
        "get_scale": sample(tmp_path / "s", torch.tensor([2.0, 3.0])),
        "get_both": sample(tmp_path / "b", 7, 0.5),
    }
    whole = await compiled(workers, tmp_path, ASSISTANT, constants=constants)
    result = whole.result
    assert list(result["delegation"]) == sorted(ASSISTANT)
    assert result["facts"] is not None
    assert set(result["facts"]["methods"]) == {*ASSISTANT, *constants}
    assert result["facts"]["methods"]["text_decoder"]["inputs"][0]["dims"] == [{"min": 2, "max": 24}, WIDTH]
    assert set(result["inputs"]) == set(ASSISTANT)
    assert {(c["method"], c["inputs"]) for c in result["checks"] if c["ran"]} == {
        ("vision_encoder", "EXAMPLE"), *((m, i) for m in ("token_embedding", "text_decoder") for i in ("EXAMPLE", "MIN", "MAX")),
    }  # fmt: skip
    assert whole.codes == ["INITIALIZED_MUTABLE_BUFFERS"]
    assert "calls, which text_decoder changes" in result["warnings"][0]["message"]

    image = torch.rand(1, 3, 32, 32)
    assert torch.allclose(run(whole.pte, [image], "vision_encoder")[0], eager("vision_encoder")(image), atol=1e-5)
    for length in (2, 24):
        vectors = torch.randn(length, WIDTH)
        third = run(whole.pte, [vectors], "text_decoder", times=3)[0]
        assert torch.allclose(third, eager("text_decoder")(vectors) + 2, atol=1e-4)
    assert run(whole.pte, [], "get_width") == [WIDTH]
    assert run(whole.pte, [], "get_scale")[0].tolist() == [2.0, 3.0]
    assert run(whole.pte, [], "get_both") == [7, 0.5]


async def test_the_order_of_methods_does_not_change_the_program(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path / "a", ASSISTANT)
    other = await compiled(workers, tmp_path / "b", dict(reversed(list(ASSISTANT.items()))))
    assert one.pte == other.pte


@pytest.mark.parametrize("separate", [False, True], ids=["combined", "separate"])
async def test_the_record_has_each_methods_programs(workers: Workers, tmp_path: Path, separate: bool) -> None:
    stages = 'stages = ["TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]' if separate else ""
    recipe = recipes.from_toml(f'recipe = "xnnpack_fp32"\n{stages}')
    whole = await compiled(workers, tmp_path, ASSISTANT, recipe)
    path = tmp_path / "model.etrecord"
    path.write_bytes(whole.files[str(whole.result["etrecord"])])
    for method in ASSISTANT:
        record = read_record(path, method)
        assert record.handles, method
        assert any(node.source for nodes in record.nodes.values() for node in nodes), method
    names = set(zipfile.ZipFile(path).namelist())
    for method in ASSISTANT:
        assert {f"exported/{method}", f"edge_dialect_exported_program/{method}"} <= names
    from executorch.devtools.etrecord import parse_etrecord

    parsed = parse_etrecord(str(path))
    assert set(parsed.edge_dialect_program) == set(ASSISTANT)
    assert set(parsed.graph_map) == {f"exported/{method}" for method in ASSISTANT}


async def test_a_method_that_is_not_called_forward_is_filed_under_its_name(workers: Workers, tmp_path: Path) -> None:
    whole = await compiled(workers, tmp_path, {"text_decoder": text_decoder})
    path = tmp_path / "model.etrecord"
    path.write_bytes(whole.files[str(whole.result["etrecord"])])
    names = set(zipfile.ZipFile(path).namelist())
    assert {"edge_dialect_exported_program/text_decoder", "exported_program"} <= names
    assert "edge_dialect_exported_program/forward" not in names
    assert read_record(path, "text_decoder").nodes


async def test_each_method_has_its_own_partitioners(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(
        'recipe = "xnnpack_fp32"\n'
        "[methods.token_embedding]\npartitioners = []\n"
        '[[methods.text_decoder.partitioners]]\nname = "xnnpack"\nper_op = true\n'
    )
    delegation = (await compiled(workers, tmp_path, ASSISTANT, recipe)).result["delegation"]
    assert delegation["vision_encoder"]["subgraphs"] >= 1
    assert delegation["token_embedding"]["subgraphs"] == 0
    whole = (await compiled(workers, tmp_path, ASSISTANT)).result["delegation"]
    assert delegation["text_decoder"]["subgraphs"] > whole["text_decoder"]["subgraphs"]
    assert delegation["vision_encoder"] == whole["vision_encoder"]


async def test_each_method_has_its_own_quantizers(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(
        'recipe = "xnnpack_fp32"\n[methods.vision_encoder]\nquantizers = [{name = "xnnpack", per_channel = true}]\n'
        '[methods.text_decoder]\nquantizers = [{name = "xnnpack", dynamic = true, per_channel = true}]\n'
    )
    whole = await compiled(workers, tmp_path, ASSISTANT, recipe)
    assert whole.quantized is not None
    times = {stage["stage"]: stage["methods"] for stage in whole.quantized["stages"]}
    assert set(times["QUANTIZE"]) == set(times["TORCH_EXPORT"]) == {"vision_encoder", "text_decoder"}
    text = {m: " ".join(row["op"] for row in d["operators"]) for m, d in whole.result["delegation"].items()}
    assert "choose_qparams" in text["text_decoder"]
    assert "quantize_per_tensor_default" in text["vision_encoder"]
    assert "quantize" not in text["token_embedding"]
    assert whole.codes.count("FEW_CALIBRATION_INPUTS") == 1
    vectors = torch.randn(11, WIDTH)
    assert sqnr_db(eager("text_decoder")(vectors), run(whole.pte, [vectors], "text_decoder")[0]) > 20


async def test_a_method_without_quantizable_operators_is_kept_and_reported(workers: Workers, tmp_path: Path) -> None:
    whole = await compiled(workers, tmp_path, ASSISTANT, STATIC)
    assert "QUANTIZED_NOTHING" in whole.codes
    assert whole.quantized is not None
    reported = next(w["message"] for w in whole.quantized["warnings"] if w["code"] == "QUANTIZED_NOTHING")
    assert "token_embedding" in reported
    assert run(whole.pte, [torch.arange(4)], "token_embedding")[0].shape == (4, WIDTH)


@pytest.mark.remedy("EXTERNAL_CONSTANTS_CLASH")
async def test_constants_of_one_name_in_two_methods_are_not_mixed_up(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml('recipe = "portable"\n[executorch]\nexternal_constants = "weights"')

    def scaled(by: float) -> Any:
        class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.by = torch.nn.Parameter(torch.full((4,), by))

            def forward(self, x: Any) -> Any:
                return x * self.by

        return torch.export.export(Scaled().eval(), (torch.ones(4),))

    with pytest.raises(EtfarmError, match=r"The constant by differs between one and two") as caught:
        await compiled(workers, tmp_path, {"one": lambda: scaled(2.0), "two": lambda: scaled(3.0)}, recipe)
    assert caught.value.reason == "EXTERNAL_CONSTANTS_CLASH"
    shared = await compiled(workers, tmp_path, {"one": lambda: scaled(2.0), "two": lambda: scaled(2.0)}, recipe)
    assert list(shared.result["program"]["data"]) == ["weights"]
    inside = await compiled(workers, tmp_path, {"one": lambda: scaled(2.0), "two": lambda: scaled(3.0)}, "portable")
    assert not inside.result["program"]["data"]
