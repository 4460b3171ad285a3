"""ETRecords have the weights once, and ExecuTorch's Inspector reads them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402 - needs torch

from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.recipes import Recipe  # noqa: E402
from tests.support.compiling import ASSISTANT, DYNAMIC, STATIC, compiled  # noqa: E402
from tests.support.inspector import numeric_gaps_db  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow(reason="each test compiles in a child")]

WEIGHTS = 512
SEPARATE = 'stages = ["TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]'
TRANSFORMED = 'stages = ["TORCH_EXPORT", "TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_BACKEND", "TO_EXECUTORCH"]'


class Wide(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A network whose weights are larger than everything else in a record, with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WEIGHTS, WEIGHTS), torch.nn.Linear(WEIGHTS, WEIGHTS)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)) + torch.arange(WEIGHTS) / WEIGHTS).softmax(-1)


def wide() -> Any:
    torch.manual_seed(3)
    return torch.export.export(Wide().eval(), (torch.randn(1, WEIGHTS),))


def written(folder: Path, files: dict[str, bytes]) -> tuple[Path, Path]:
    for name in ("model.pte", "model.etrecord"):
        (folder / name).write_bytes(files[name])
    return folder / "model.pte", folder / "model.etrecord"


@pytest.mark.parametrize(
    ("recipe", "at_least_db"),
    [
        ("xnnpack_fp32", 80),
        ("portable", 80),
        (recipes.from_toml(f'recipe = "xnnpack_fp32"\n{SEPARATE}'), 80),
        (recipes.from_toml(f'recipe = "xnnpack_fp32"\n{TRANSFORMED}'), 80),
        (STATIC, 15),
        (DYNAMIC, 15),
    ],
    ids=["fp32", "portable", "separate", "transformed", "static", "dynamic"],
)
async def test_weights_are_stored_once_and_inspector_compares_with_them(
    workers: Workers, tmp_path: Path, recipe: str | Recipe, at_least_db: float
) -> None:
    pte, etrecord = written(tmp_path, (await compiled(workers, tmp_path, wide, recipe, done=())).files)
    with zipfile.ZipFile(etrecord) as archive:
        assert archive.testzip() is None
        sizes = {info.filename: info.file_size for info in archive.infolist() if info.filename.endswith("_state_dict")}
        graph = archive.getinfo("exported_program")
        assert graph.compress_size < graph.file_size / 4
    large = [name for name, size in sizes.items() if size > WEIGHTS * WEIGHTS]
    assert large == ["exported_program_state_dict"] and len(sizes) >= 2
    torch.manual_seed(4)
    gaps = numeric_gaps_db(pte, etrecord, [torch.randn(1, WEIGHTS)], tmp_path)
    assert gaps and min(gaps) > at_least_db


async def test_each_method_has_its_weights_in_the_program_that_inspector_runs(workers: Workers, tmp_path: Path) -> None:
    from executorch.devtools import parse_etrecord

    pte, etrecord = written(tmp_path, (await compiled(workers, tmp_path, ASSISTANT)).files)
    parsed = parse_etrecord(str(etrecord))
    for method in ASSISTANT:
        for program, is_fake in ((parsed.edge_dialect_program[method], False), (parsed.graph_map[f"exported/{method}"], True)):
            assert program.state_dict
            assert {isinstance(value, FakeTensor) for value in program.state_dict.values()} == {is_fake}
        weights = {name: value.shape for name, value in parsed.edge_dialect_program[method].state_dict.items()}
        exported = parsed.graph_map[f"exported/{method}"].state_dict
        assert {name: weights[name] for name in exported} == {name: value.shape for name, value in exported.items()}
    torch.manual_seed(4)
    gaps = numeric_gaps_db(pte, etrecord, [torch.rand(1, 3, 32, 32)], tmp_path, "vision_encoder")
    assert gaps and min(gaps) > 80
