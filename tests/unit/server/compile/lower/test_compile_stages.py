"""Stages in every order that ExecuTorch allows, what stopping after each gives, and what a recipe file can change."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.support.refusals import refuses

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.compile.lower import build  # noqa: E402 - needs torch
from etfarm.server.compile.request import LowerRequest  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import FOUR_BIT, STATIC, Compiled, compiled, run, sample, text_decoder  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow(reason="each test compiles in a child")]

LAST = "TO_EXECUTORCH"
TRANSFORM = "EDGE_PROGRAM_MANAGER_TRANSFORM"
COMBINED = "TO_EDGE_TRANSFORM_AND_LOWER"


def ordered(*stages: str, recipe: str = "xnnpack_fp32") -> recipes.Recipe:
    return recipes.from_toml(f'recipe = "{recipe}"\nstages = {list(stages)}'.replace("'", '"'))


@pytest.mark.parametrize(
    "stages",
    [
        (COMBINED, LAST),
        (COMBINED, TRANSFORM, LAST),
        ("TO_EDGE", "TO_BACKEND", LAST),
        ("TO_EDGE", TRANSFORM, LAST),
        ("TO_EDGE", TRANSFORM, "TO_BACKEND", LAST),
    ],
    ids=" ".join,
)
async def test_every_order_gives_a_program_that_runs(workers: Workers, tmp_path: Path, stages: tuple[str, ...]) -> None:
    one = await compiled(workers, tmp_path, models.conv, ordered("TORCH_EXPORT", *stages))
    assert one.stages == list(stages)
    assert [check["ran"] for check in one.result["checks"]] == [True]
    assert one.result["etrecord"] == "model.etrecord"
    partitions = COMBINED in stages or "TO_BACKEND" in stages
    assert bool(one.result["delegation"]) == partitions
    if partitions:
        assert one.result["delegation"]["forward"]["subgraphs"] >= 1
    torch.manual_seed(0)
    program = models.conv().module()
    image = torch.randn(1, 3, 8, 8)
    assert torch.allclose(run(one.pte, [image])[0], program(image), atol=1e-5)


async def test_undelegated_operators_are_reported_with_their_line(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, "portable")
    rows = {row["op"]: row for row in one.result["delegation"]["forward"]["operators"]}
    (place,) = rows["aten_convolution_default"]["places"]
    assert place["source"] is not None
    assert place["source"]["code"] == "x = torch.relu(self.conv(image))"
    assert place["module"] == "conv"


async def stopped(workers: Workers, tmp_path: Path, recipe: str | recipes.Recipe, stage: str) -> Compiled:
    one = await compiled(workers, tmp_path, {"text_decoder": text_decoder}, recipe, stop_after=stage)
    assert one.result["program"] is None
    assert one.result["facts"] is None
    assert one.result["etrecord"] is None
    assert set(one.result["stage_files"].values()) <= set(one.files)
    assert "def forward(" in one.files["text_decoder.txt"].decode()
    return one


@pytest.mark.parametrize("stage", ["QUANTIZE", "TORCH_EXPORT"])
async def test_stopping_before_the_edge_gives_the_quantized_program(workers: Workers, tmp_path: Path, stage: str) -> None:
    one = await stopped(workers, tmp_path, STATIC, stage)
    assert set(one.result["stage_files"]) == {"text_decoder.pt2", "text_decoder.txt"}
    loaded = torch.export.load(io.BytesIO(one.files["text_decoder.pt2"]))
    assert "quantize_per_tensor" in str(loaded)
    assert one.result["stages"] == []


async def test_stopping_after_the_clients_stages_gives_what_came(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(
        workers, tmp_path, models.four_bit, FOUR_BIT, done=("SOURCE_TRANSFORM", "TORCH_EXPORT"), stop_after="SOURCE_TRANSFORM"
    )
    sent = next(path for path in tmp_path.iterdir() if path.is_file())
    assert one.files["forward.pt2"] == sent.read_bytes()


async def test_stopping_before_the_quantization_gives_what_came(workers: Workers, tmp_path: Path) -> None:
    staged = recipes.from_toml(
        f'recipe = "{STATIC}"\nstages = ["SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT", "{COMBINED}", "{LAST}"]'
    )
    sent = models.save(models.conv, tmp_path / "sent")
    ask = LowerRequest({"forward": sent}, {"forward": sent}, "tiny", staged.json, stop_after="SOURCE_TRANSFORM")
    async with await workers.run("etfarm.server.compile.lower.tasks:lower_model", ask, deadline_s=180) as finished:
        assert (finished.folder / "forward.pt2").read_bytes() == sent.read_bytes()


@pytest.mark.parametrize(
    ("stage", "stages"),
    [
        (COMBINED, (COMBINED, LAST)),
        ("TO_EDGE", ("TO_EDGE", "TO_BACKEND", LAST)),
        (TRANSFORM, ("TO_EDGE", TRANSFORM, "TO_BACKEND", LAST)),
        ("TO_BACKEND", ("TO_EDGE", "TO_BACKEND", LAST)),
    ],
)  # fmt: skip
async def test_stopping_at_the_edge_gives_a_program_that_loads_again(
    workers: Workers, tmp_path: Path, stage: str, stages: tuple[str, ...]
) -> None:
    from executorch.exir.serde.serialize import load

    one = await stopped(workers, tmp_path, ordered("TORCH_EXPORT", *stages), stage)
    assert one.stages == list(stages[: stages.index(stage) + 1])
    partitioned = stage in (COMBINED, "TO_BACKEND")
    loaded = load(io.BytesIO(one.files["text_decoder.pt2"]))
    assert ("executorch_call_delegate" in str(loaded)) == partitioned
    assert loaded.state_dict["calls"].tolist() == [7.0]
    assert ("delegation.csv" in one.result["stage_files"]) == partitioned
    if partitioned:
        table = list(csv.DictReader(io.StringIO(one.files["delegation.csv"].decode())))
        assert sum(int(row["delegated"]) for row in table) == one.result["delegation"]["text_decoder"]["delegated_nodes"]
        assert {row["method"] for row in table} == {"text_decoder"}


async def test_stopping_after_the_last_stage_gives_the_program(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, stop_after=LAST)
    assert one.pte
    assert one.result["stage_files"] == {}


async def test_constants_in_a_data_file_are_found_again(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml('recipe = "portable"\n[executorch]\nexternal_constants = "weights"')
    one = await compiled(workers, tmp_path, models.conv, recipe)
    assert one.result["program"] == {"pte": "model.pte", "data": {"weights": "weights.ptd"}}
    assert one.result["sizes"] is not None
    assert one.result["sizes"]["data_bytes"] == {"weights": len(one.files["weights.ptd"])}
    assert [check["ran"] for check in one.result["checks"]] == [True]
    (tmp_path / "weights.ptd").write_bytes(one.files["weights.ptd"])
    (tmp_path / "model.pte").write_bytes(one.pte)
    from executorch.runtime import Runtime

    torch.manual_seed(0)
    program = models.conv().module()
    image = torch.randn(1, 3, 8, 8)
    method = Runtime.get().load_program(tmp_path / "model.pte", data_path=tmp_path / "weights.ptd").load_method("forward")
    assert method is not None
    assert torch.allclose(method.execute([image])[0], program(image), atol=1e-5)


async def test_memory_is_planned_as_the_file_says(workers: Workers, tmp_path: Path) -> None:
    def planned(one: Compiled) -> int:
        assert one.result["facts"] is not None
        return sum(one.result["facts"]["methods"]["forward"]["planned_bytes"])

    async def planning(line: str) -> int:
        recipe = recipes.from_toml(f'recipe = "portable"\n[executorch]\nmemory_planning = {line}')
        return planned(await compiled(workers, tmp_path, models.conv, recipe))

    naive = await planning('"naive"')
    assert await planning('"greedy"') < naive
    assert await planning('"naive"\nalloc_graph_input = false') < naive


async def test_a_constant_with_the_name_of_a_method_is_refused(workers: Workers, tmp_path: Path) -> None:
    constants = {"forward": sample(tmp_path / "c.ett", 3)}
    with pytest.raises(EtfarmError, match="forward is both a method and a constant method"):
        await compiled(workers, tmp_path / "m", models.conv, constants=constants)


async def test_an_operator_that_the_edge_keeps_is_kept(workers: Workers, tmp_path: Path) -> None:
    text = 'recipe = "portable"\n[edge]\npreserve_ops = ["aten.linear.default"]'
    one = await compiled(workers, tmp_path, models.dynamic, recipes.from_toml(text))
    assert one.result["facts"] is not None
    assert "aten::linear.out" in one.result["facts"]["methods"]["forward"]["operators"]
    with pytest.raises(EtfarmError, match=r"\[edge\] preserve_ops cannot be .aten.liner.default"):
        await compiled(workers, tmp_path, models.dynamic, recipes.from_toml(text.replace("linear", "liner")))


@pytest.mark.parametrize(
    "name",
    ["aten.liner.default", "aten.linear.other", "nowhere.linear", "loaded_libraries.add", "__class__.__init__.__globals__"],
)
async def test_what_is_no_operator_is_refused_by_its_field(name: str) -> None:
    recipe = recipes.from_toml(f'recipe = "portable"\n[edge]\npreserve_ops = ["{name}"]')
    assert recipe.options.edge["preserve_ops"] == (name,)
    with refuses("BAD_RECIPE_FIELD", match=r"^\[edge\] preserve_ops cannot be") as refused:
        build._operator("preserve_ops", name)
    assert refused.value.metadata["value"] == name


async def test_partitioners_alone_are_a_recipe(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, recipes.from_toml('partitioners = ["xnnpack"]'))
    assert one.result["facts"] is not None
    assert one.result["facts"]["methods"]["forward"]["backends"] == ["XnnpackBackend"]


@pytest.mark.parametrize("recipe", ["coreml_fp32", "coreml_fp16", "coreml_fp16+xnnpack_fp32"])
async def test_core_ml_compiles_and_is_not_run_here(workers: Workers, tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("coremltools")
    one = await compiled(workers, tmp_path, models.conv, recipe)
    assert one.result["facts"] is not None
    assert "CoreMLBackend" in one.result["facts"]["methods"]["forward"]["backends"]
    assert one.codes == ["NOT_RUN_ON_HOST"]
