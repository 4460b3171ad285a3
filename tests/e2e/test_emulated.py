"""Emulated Arm devices through a real farm: outputs and lines of x86, no times, and a processor whose kernels are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

from etfarm.wire import tensors
from tests.support.emulation import need_emulator
from tests.support.farm import FarmProcess, etfarm
from tests.support.huggingface import write_config
from tests.support.programs import program
from tests.support.quick_jobs import QUICK_OPTIONS, bench
from tests.support.two_machines import farm_for_aarch64, must_have_equal_operators

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="an emulated Arm device runs every program")]

FP32, INT8 = "xnnpack_fp32", "xnnpack_pt2e_int8_static_per_channel"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of this machine and two emulated ones."""
    with farm_for_aarch64(tmp_path_factory.mktemp("mixed")) as running:
        running.add_agent("--emulate", "aarch64")
        running.add_agent("--emulate", "aarch64", "--cpu", "max")
        yield running


def test_an_emulated_board_returns_the_outputs_and_lines_of_x86(mixed: FarmProcess, tmp_path: Path) -> None:
    where = ("--device", "soc=qemu cortex-a76", "--device", "emulated=false")
    document, printed = bench(mixed, tmp_path, "demo:resnet8", "--recipe", FP32, "--recipe", INT8, *where, *QUICK_OPTIONS)
    with mixed.client() as client:
        job = client.job(document["job"]["id"])
        outputs = [[tensors.to_array(value) for value in job.outputs(cell)] for cell in range(4)]
    cells = {
        (report["recipe"], report["device"]["arch"]): (report, *values)
        for report, values in zip(document["reports"], outputs, strict=True)
    }
    assert len(cells) == 4
    for recipe, most in ((FP32, 1e-5), (INT8, 0.1)):
        emulated, here = cells[recipe, "aarch64"], cells[recipe, "x86_64"]
        np.testing.assert_allclose(emulated[1], here[1], rtol=0, atol=most)
        must_have_equal_operators(emulated[0], here[0])
        report = emulated[0]
        assert report["verdict"]["status"] == "NOT_BENCHMARKABLE" and report["device"]["emulated"]
        assert (report["device"]["soc"], report["memory"]["peak_rss_bytes"]) == ("qemu cortex-a76", None)
    assert printed.count("NOT BENCHMARKABLE") == 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", ""), ("qwen2", ":logits=all")],  # the second as optimum-executorch exports: logits of each token
)
def test_a_language_model_of_transformers_is_measured_here_and_runs_on_an_emulated_board(
    mixed: FarmProcess, tmp_path: Path, kind: str, options: str
) -> None:
    write_config(tmp_path, kind)
    done = etfarm(
        "bench", f"hf:{kind}{options}", "--recipe", FP32, "--generate", "8", "--prompt-tokens", "4,12", "--depth", "0,50%",
        "--repetitions", "3", "--repeat", "2", "--threads", "1", "--device", "emulated=false", "--device", "soc=qemu cortex-a76",
        "--json", "r.json", "--server", mixed.address, cwd=tmp_path, timeout_s=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no checkpoint (*.safetensors): its weights are random") == 1
    here, emulated = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["reports"]
    assert (here["device"]["arch"], emulated["device"]["arch"]) == ("x86_64", "aarch64")
    for report in (here, emulated):
        assert (
            report["model"]["name"] == f"{kind}{options}:random"
            and report["generation"]["model"]["metadata"]["get_n_layers"] == 2
        )
        points = report["generation"]["points"]
        assert [(point["prompt_tokens"], point["error"]) for point in points] == [(4, None), (4, None), (12, None), (12, None)]
        assert all(point["tokens_equal"] is True and point["repetitions"] == 6 for point in points)
    for point in here["generation"]["points"]:
        for rate in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            low, high = point[f"{rate}_ci95"]
            assert 0 < low <= point[rate] <= high
    for point in emulated["generation"]["points"]:
        assert point["verdict"]["status"] == "NOT_BENCHMARKABLE"


def test_the_numeric_gap_names_wrongly_computed_operators(mixed: FarmProcess, tmp_path: Path) -> None:
    where = ("--recipe", INT8, "--device", "arch=aarch64,feature=sme", "--numerics")
    document, printed = bench(mixed, tmp_path, "demo:resnet8", *where, *QUICK_OPTIONS)
    (report,) = document["reports"]
    assert report["device"]["soc"] == "qemu max"
    first = report["numeric_gap"][report["numerics"]["first_bad"]]
    assert first["reference"] == "QUANTIZED" and first["snr_db"] < 10
    assert any("convolution" in op for op in first["ops"])
    assert first["source"]["code"] == "y = self.conv(image)"
    assert report["accuracy"][0]["sqnr_db"] < 10
    assert "first bad operator: convolution" in printed


def test_an_emulated_device_keeps_its_id_and_has_the_features_of_its_processor(mixed: FarmProcess) -> None:
    with mixed.client() as client:
        known = {device.soc: device for device in client.devices("emulated=true,arch=aarch64")}
    assert set(known) == {"qemu cortex-a76", "qemu max"}
    board = known["qemu cortex-a76"]
    assert set(board.features) == {"dotprod", "fp16"} and [cluster.part for cluster in board.clusters] == ["Cortex-A76"]
    assert {"dotprod", "i8mm", "sve2", "sme"} <= set(known["qemu max"].features)
    agent = mixed.agents[1]
    agent.stop()
    agent.start()
    assert agent.expect("connected to").endswith(f"({board.id})")
    log = mixed.agents[2].log.read_text()
    assert "with which qemu computes XNNPACK's int8 kernels wrongly" in log and "max,sme=off" in log


def test_a_farm_without_a_runner_says_how_to_build_it(breakable: FarmProcess, tmp_path: Path) -> None:
    # Not the farm that others share: it would know the device from now on.
    need_emulator()
    created = program("add").path
    breakable.start(agents=0)
    breakable.add_agent("--emulate", "aarch64", "--name", "bare")
    done = etfarm("bench", str(created), "--device", "name=bare", "--server", breakable.address, cwd=tmp_path)
    assert done.returncode == 1
    assert "no runner bundle for aarch64" in done.stderr and "etfarm bundle build --arch aarch64 -o FILE" in done.stderr
