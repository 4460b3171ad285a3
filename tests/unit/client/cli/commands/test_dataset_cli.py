"""What the command line refuses of a data set, and how it tells how far one is. No farm is started here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etfarm.client.cli.commands import run
from etfarm.client.cli.terminal.progress import SampleLines, left
from etfarm.client.datasets.dispatch import Tally, Work
from etfarm.client.models import Device
from etfarm.client.transport.decode import decoded
from etfarm.v1 import device_pb2
from tests.support.golden import Golden


@pytest.mark.parametrize(
    "argv",
    [
        ["--batched"],
        ["--inputs", "one.npz", "--devices", "2"],
        ["--inputs", "one.npz", "--metric", "top1"],
        ["--keep-going"],
        ["--inputs", "in", "--batched"],
        ["--inputs", "in", "--devices", "2", "--all-devices"],
        ["--inputs", "in", "--name", "x"],
        ["--inputs", "empty"],
        ["--inputs", "none.npz", "--batched"],
        ["--inputs", "one.npz", "--batched"],
        ["--inputs", "in", "-o", "in"],
        ["--inputs", "in", "-o", "one.txt"],
        ["--inputs", "in", "-o", "no/out"],
        ["--inputs", "in", "--metric", "top5"],
        ["--inputs", "in", "--device", "arhc=x"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    golden: Golden, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "in" / "a.npz", x=np.zeros(2))
    np.savez(tmp_path / "one.npz", x=np.float32(1))
    (tmp_path / "one.txt").write_text("")
    assert run.main(["demo:resnet8", "--server", "127.0.0.1:1", *argv]) == 2
    golden.check(capsys.readouterr().err)


def test_off_a_terminal_a_line_comes_now_and_then() -> None:
    lines: list[str] = []
    now = [0.0]
    progress = SampleLines(300, lines.append, lambda: now[0])
    for done in range(1, 301):
        now[0] = done / 10
        progress.advance(done, 10.0)
    assert lines == ["100 of 300 samples, 10.0/s, 20.0 s left", "200 of 300 samples, 10.0/s, 10.0 s left"]
    assert left(0, 1, None) == "0 of 1 sample"


def test_a_sample_without_a_time_of_its_own_has_none_instead_of_0() -> None:
    device = decoded(Device, device_pb2.Device(id="d", name="board"))
    tally = Tally(devices={"d": Work(device)})
    tally.begin()
    tally.ran(device, None)
    assert (tally.samples, tally.run_p50_ns, tally.busy_share) == (1, None, None)
    tally.ran(device, 500)
    assert (tally.samples, tally.run_p50_ns, tally.busy_share) == (2, 500, None), "a share of all samples is not known"
