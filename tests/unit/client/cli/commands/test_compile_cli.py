"""What `etfarm compile` writes of a stage, and how it says to load it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.cli.commands import compile
from etfarm.wire import recipes


def test_a_stages_files_go_where_their_kind_says(tmp_path: Path) -> None:
    class Stopped:
        asked: dict[str, Path] | None = None

        async def stage_files(self) -> list[str]:
            return ["a.pt2", "a.txt", "b.pt2", "b.txt", "delegation.csv"]

        async def save_stage_files(self, folder: Path, *, to: dict[str, Path] | None = None) -> list[Path]:
            self.asked = to
            return [folder] if to is None else list(to.values())

    job: Any = Stopped()
    saved = [asyncio.run(compile._save_stage(job, tmp_path / name)) for name in ("x.pt2", "t.csv", "all")]
    assert saved == [[tmp_path / "x.a.pt2", tmp_path / "x.b.pt2"], [tmp_path / "t.csv"], [tmp_path / "all"]]


@pytest.mark.parametrize(
    ("stage", "recipe", "note"),
    [
        ("TO_EDGE_TRANSFORM_AND_LOWER", "xnnpack_fp32", "Load a.pt2, b.pt2 with executorch.exir.serde.serialize.load: "),
        ("TORCH_EXPORT", "xnnpack_fp32", ""),
        ("QUANTIZE", "xnnpack_pt2e_int8_static_per_channel", "Import torchao before torch.export.load reads a.pt2, b.pt2: "),
        ("SOURCE_TRANSFORM", "xnnpack_torchao_int8da_int4w_per_channel", "Import torchao before "),
        ("", "xnnpack_pt2e_int8_static_per_channel", ""),
    ],
)
def test_a_hint_shows_how_to_load_a_stages_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, recipe: str, note: str
) -> None:
    files = [tmp_path / "a.pt2", tmp_path / "b.pt2", tmp_path / "a.txt"]
    for path in files:
        path.write_bytes(b"x")
    text = compile._how_to_load(stage, recipes.parse(recipe), files)
    assert text.startswith(note) and bool(text) == bool(note)
    compile._print_written(files, to_stderr=False, note=text)
    reported = " ".join(capsys.readouterr().out.split())
    assert reported.count("wrote ") == 3 and reported.endswith(text)
