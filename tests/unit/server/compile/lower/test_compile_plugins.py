"""Recipes and stages of installed distributions: used by name, and reported with their errors."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.compile.lower import plugins  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402 - needs torch
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import compiled, listed, run, warm_workers  # noqa: E402
from tests.support.refusals import refuses  # noqa: E402

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(reason="starts workers with plug-ins of its own, which load torch"),
]

ACME = """
from executorch.backends.xnnpack._passes.remove_noop_expand_copy_pass import RemoveNoopExpandCopyPass
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from executorch.exir import EdgeCompileConfig
from executorch.export import ExportRecipe, LoweringRecipe, QuantizationRecipe
from executorch.export.stages import EdgeProgramManagerTransformStage, ToBackendStage
from etfarm.wire.recipes import Argument, Quantization, Specification


def fast(each=False):
    return ExportRecipe(
        name="fast",
        aten_transform_passes=[doubled],
        lowering_recipe=LoweringRecipe(
            partitioners=[XnnpackPartitioner(per_op_mode=each)],
            edge_compile_config=EdgeCompileConfig(_check_ir_validity=False),
            edge_manager_transform_passes=[nothing],
        ),
    )


def doubled(method, program):
    program.state_dict["out.bias"].data.mul_(2)
    return program


def nothing(manager):
    print("acme saw", *sorted(manager.methods))
    return [RemoveNoopExpandCopyPass()]


fast.specification = Specification(
    "fast", "acme", Quantization.NONE, "quick", arguments=(Argument("each", "a delegate for each operator", bool),)
)


def int8():
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    recipe = fast()
    recipe.aten_transform_passes = None
    recipe.quantization_recipe = QuantizationRecipe(quantizers=[quantizer])
    return recipe



def text():
    return "no recipe"


def failing():
    raise RuntimeError("no licence")


def levelled(level):
    if level not in (0, 1, 2, 3):
        raise ValueError("level is 0 to 3")
    return fast()


class Told(ToBackendStage):
    def run(self, artifact):
        print("acme partitions")
        super().run(artifact)


def to_backend():
    return Told([XnnpackPartitioner()])


class Nothing(ToBackendStage):
    def run(self, artifact):
        self._artifact = artifact.copy_with_new_data(None)


def gives_nothing():
    return Nothing()


def transform():
    return EdgeProgramManagerTransformStage()
"""

ENTRY_POINTS = """
[etfarm.recipes]
acme.fast = acme:fast
acme.int8 = acme:int8
acme.text = acme:text
acme.broken = acme_missing:fast
acme.failing = acme:failing
acme.levelled = acme:levelled

[etfarm.stages]
acme.to_backend = acme:to_backend
acme.gives_nothing = acme:gives_nothing
acme.transform = acme:transform
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """A forkserver in whose environment a distribution acme is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "acme.py").write_text(ACME)
    (site / "acme-1.0.dist-info").mkdir()
    (site / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        async with warm_workers(tmp_path_factory.mktemp("workers")) as pool:
            await pool.ready()
            yield pool


def replaced(stage: str, plugin: str) -> recipes.Recipe:
    return recipes.from_toml(
        'recipe = "portable"\nstages = ["TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]\n'
        f'[replace]\n{stage} = "{plugin}"'
    )


async def test_a_plug_ins_recipe_compiles_with_all_that_it_says(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, "acme.fast:each=true")
    assert one.stages == ["TO_EDGE_TRANSFORM_AND_LOWER", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_EXECUTORCH"]
    assert any("acme saw forward" in line for line in one.log)
    assert one.result["delegation"]["forward"]["subgraphs"] > 1
    (tmp_path / "model.etrecord").write_bytes(one.files["model.etrecord"])
    assert "edge_after_transform/forward" in zipfile.ZipFile(tmp_path / "model.etrecord").namelist()
    torch.manual_seed(0)
    program = models.conv()
    program.state_dict["out.bias"].data.mul_(2)
    image = torch.randn(1, 3, 8, 8)
    assert torch.allclose(run(one.pte, [image])[0], program.module()(image), atol=1e-5)


async def test_a_plug_ins_recipe_may_quantize(workers: Workers, tmp_path: Path) -> None:
    stages = 'stages = ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]'
    one = await compiled(workers, tmp_path, models.conv, recipes.from_toml(f'recipe = "acme.int8"\n{stages}'))
    assert one.stages == ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]
    assert any("dequantize" in row["op"] for row in one.result["delegation"]["forward"]["operators"])


async def test_a_plug_ins_stage_stands_in_for_executorchs(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, replaced("TO_BACKEND", "acme.to_backend"))
    assert any("acme partitions" in line for line in one.log)
    assert one.result["delegation"]["forward"]["subgraphs"] >= 1


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("acme.text", "the plug-in acme.text of acme returned str, not an ExportRecipe"),
        ("acme.broken", "the plug-in acme.broken of acme cannot be imported"),
        ("acme.failing", "the plug-in acme.failing of acme failed (no licence)"),
        ("other.fast", "no installed package has the entry point other.fast"),
    ],
)
async def test_a_plug_in_that_is_wrong_is_named_with_its_distribution(
    workers: Workers, tmp_path: Path, recipe: Any, words: str
) -> None:
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, models.conv, recipe)
    assert words in caught.value.message
    assert caught.value.fault is Fault.FARM


@pytest.mark.remedy("PLUGIN_FAILED")
async def test_a_plug_in_that_was_corrected_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_late.py").write_text("def late(): return None\n")
    (tmp_path / "late-1.0.dist-info").mkdir()
    (tmp_path / "late-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (tmp_path / "late-1.0.dist-info" / "entry_points.txt").write_text("[etfarm.recipes]\nacme.late = acme_late:late\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refuses("PLUGIN_FAILED"):
        plugins.recipe("acme.late", {})
    del sys.modules["acme_late"]
    (tmp_path / "acme_late.py").write_text(
        "from executorch.export import ExportRecipe\ndef late(): return ExportRecipe('late')\n"
    )
    assert plugins.recipe("acme.late", {}).name == "late"


@pytest.mark.parametrize(
    ("recipe", "reason", "words"),
    [
        ("acme.int8:every=true", "UNKNOWN_RECIPE_ARGUMENT", "has no argument 'every'"),
        ("acme.levelled", "BAD_RECIPE_ARGUMENT", "needs the argument 'level'"),
        (
            "acme.levelled:level=high",
            "BAD_RECIPE_ARGUMENT",
            "The plug-in acme.levelled of acme refuses level=high: level is 0 to 3.",
        ),
        (replaced("TO_BACKEND", "acme.transform"), "BAD_RECIPE_FIELD", "acme replaces EDGE_PROGRAM_MANAGER_TRANSFORM"),
    ],
)
async def test_what_a_plug_in_does_not_take_is_the_users_to_mend(
    workers: Workers, tmp_path: Path, recipe: Any, reason: str, words: str
) -> None:
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, models.conv, recipe)
    assert (caught.value.reason, caught.value.fault) == (reason, Fault.USER)
    assert words in str(caught.value)


async def test_a_stage_without_a_result_is_reported(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(EtfarmError, match=r"the plug-in's stage Nothing returned NoneType, not EdgeProgramManager"):
        await compiled(workers, tmp_path, models.conv, replaced("TO_BACKEND", "acme.gives_nothing"))


async def test_plug_ins_are_listed_behind_the_others(workers: Workers) -> None:
    async with await workers.run("etfarm.server.compile.lower.available:list_recipes", None, deadline_s=120) as finished:
        rows = {row["name"]: row for row in listed(finished.result)}
    assert list(rows) == [*recipes.RECIPES, "acme.broken", "acme.failing", "acme.fast", "acme.int8", "acme.levelled", "acme.text"]
    assert (rows["acme.fast"]["summary"], rows["acme.fast"]["available"]) == ("quick", True)
    assert rows["acme.fast"]["arguments"] == ["each=true, false: a delegate for each operator"]
    assert rows["acme.int8"]["quantization"] == "pt2e-static"
    assert rows["acme.levelled"]["available"]
    assert "cannot be imported" in rows["acme.broken"]["missing"]
    assert "not an ExportRecipe" in rows["acme.text"]["missing"]
