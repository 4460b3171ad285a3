"""A delegate for each operator, quantized ones with their scales: the same values by way of another program."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.reports.trace import graph, xnnpack  # noqa: E402 - needs torch
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import FOUR_BIT, STATIC, Compiled, Make, compiled, run, sample  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow(reason="each test compiles in a child")]

_LAYOUT = {"StaticTranspose", "Convert"}
"""What ExecuTorch puts around an operation: from and to its layout, and scales of what comes from outside."""
BY_METHOD = """
partitioners = ["xnnpack"]
[methods.forward]
partitioners = [{name = "xnnpack", precision = ["fp32"]}]
"""


def delegates(one: Compiled, folder: Path) -> list[list[str]]:
    """Return the operations of each of the program's delegates, in order of execution, without changes of layout."""
    pte = folder / "program.pte"
    pte.write_bytes(one.pte)
    data = [instruction.data for instruction in graph.read_program(pte, "forward").values() if instruction.delegate]
    return [[node.kind for node in xnnpack.read(each).nodes if node.kind not in _LAYOUT] for each in data if each is not None]


@pytest.mark.parametrize(
    ("recipe", "make", "done"),
    [
        (STATIC, models.conv, ("TORCH_EXPORT",)),
        (FOUR_BIT, models.four_bit, ("SOURCE_TRANSFORM", "TORCH_EXPORT")),
        (recipes.from_toml(BY_METHOD), models.conv, ("TORCH_EXPORT",)),
    ],
)
async def test_each_operator_has_a_delegate_and_the_program_gives_the_same(
    workers: Workers, tmp_path: Path, recipe: str | recipes.Recipe, make: Make, done: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    example = make().example_inputs[0]
    known = recipes.parse(recipe) if isinstance(recipe, str) else recipe
    calibration = {"forward": [sample(tmp_path / "0.ett", *example)]}
    whole = await compiled(workers, tmp_path / "whole", make, known, done=done, calibration=calibration)
    separate = await compiled(workers, tmp_path / "separate", make, known.per_operator(), done=done, calibration=calibration)
    assert separate.quantized_files == whole.quantized_files, "the same scales"
    groups = delegates(separate, tmp_path)
    assert all(len(group) <= 1 for group in groups), groups
    together = [kind for group in delegates(whole, tmp_path) for kind in group]
    assert len(groups) >= len(together) >= 1
    assert separate.result["delegation"]["forward"]["delegated_nodes"] == whole.result["delegation"]["forward"]["delegated_nodes"]
    (expected,), (actual,) = run(whole.pte, [*example]), run(separate.pte, [*example])
    assert torch.allclose(actual, expected, atol=0.02 * float(expected.abs().max()))
