"""`etfarm run`: what it says of the file that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etfarm.client.cli.commands import run
from etfarm.client.submit import npz
from etfarm.wire.tensors import Scalar, from_array


def test_a_written_file_is_described_with_the_keys_that_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.npz"
    values = [
        from_array("logits", np.zeros((1, 10), np.float32)),
        from_array("same", np.zeros(2, np.int64)),
        from_array("same", np.zeros((), np.int64)),
        Scalar("count", 3),
    ]
    npz.write_outputs(file, {"forward": values}, {"forward": [value.name for value in values]})
    run.print_written(file, values, to_stderr=False)
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {file}, ")
    assert printed.endswith("B: logits float32 [1, 10], 1 int64 [2], 2 int64 [], count scalar\n")
    assert {"logits", "1", "2", "count"} <= npz.load(file).keys()


@pytest.mark.parametrize("name", ["out.npy", "out.NPY", "out.txt"])
def test_another_ending_than_npz_is_refused_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["demo:resnet8", "--server", "127.0.0.1:1", "-o", name]) == 2
    assert f"-o writes an .npz, and {name} has another ending. Name it out.npz." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["out.npz", "out.NPZ", "out"])
def test_an_npz_or_no_ending_is_accepted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.pte").write_bytes(b"\x20\0\0\0ET12" + bytes(200))
    assert run.main(["x.pte", "--server", "127.0.0.1:1", "--server-wait", "0", "-o", name]) == 4, "it goes on to the server"
    error = capsys.readouterr().err
    assert "127.0.0.1:1" in error and "another ending" not in error
