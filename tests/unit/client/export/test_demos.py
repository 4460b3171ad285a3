"""The demos: quick, the same in every process, with outputs that tell inputs apart before and after int8."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from etfarm.client.export import DEMOS, Demo, ModelSource, demo_models, export_source, load_source
from etfarm.client.export.eager import ExportedMethod
from etfarm.wire import digest
from tests.support.exports import read_program

ROOT = Path(__file__).parents[4]

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="compiles every demo, some in several processes")]


@pytest.fixture(scope="module")
def demos() -> dict[str, ModelSource]:
    return {name: load_source(Demo(name)) for name in DEMOS}


@pytest.fixture(scope="module")
def exported(demos: dict[str, ModelSource]) -> dict[str, ExportedMethod]:
    return {name: export_source(source, name=name).methods["forward"] for name, source in demos.items()}


def test_two_processes_give_the_same_bytes_whatever_their_folder_threads_and_processor(
    exported: dict[str, ExportedMethod],
) -> None:
    """With `default`, torch computes as on a processor without AVX, where it also draws other random numbers."""
    code = (
        "import torch; torch.set_num_threads(2); torch.manual_seed(99)\n"
        "from etfarm.client.export import *; from etfarm.wire import digest\n"
        "for name in DEMOS:\n"
        "    method = export_source(load_source(Demo(name)), name=name).methods['forward']\n"
        "    for data in (method.pt2, *method.calibration): print(digest.of_bytes(data))\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    run = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    here = [digest.of_bytes(data) for method in exported.values() for data in (method.pt2, *method.calibration)]
    assert run.stdout.split() == here


@pytest.mark.parametrize("name", DEMOS)
def test_outputs_tell_inputs_apart(demos: dict[str, ModelSource], name: str) -> None:
    samples = demos[name].calibration_inputs["forward"]
    outputs = torch.cat([demos[name].methods["forward"](*sample) for sample in samples])
    assert len(samples) == 8
    assert demos[name].example_inputs["forward"] == samples[0]
    assert outputs.std(0).mean() > 0.5
    assert outputs.argmax(1).tolist() == [index % outputs.shape[1] for index in range(8)]


@pytest.mark.parametrize("name", DEMOS)
def test_int8_keeps_what_a_demo_says(demos: dict[str, ModelSource], name: str) -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    module, samples = demos[name].methods["forward"], demos[name].calibration_inputs["forward"]
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(module, samples[0]).module(), quantizer)
    for sample in samples:
        prepared(*sample)
    quantized = convert_pt2e(prepared)
    reference = torch.cat([module(*sample) for sample in samples]).double()
    actual = torch.cat([quantized(*sample) for sample in samples]).double()
    signal = reference - reference.mean(0)  # a bias that all inputs share is no information
    sqnr_db = 10 * torch.log10(signal.square().sum() / (reference - actual).square().sum())
    assert sqnr_db > (20 if name == "mobilenet_v1_025" else 30)
    assert torch.equal(reference.argmax(1), actual.argmax(1))


@pytest.mark.parametrize("name", DEMOS)
def test_every_operator_names_a_line_of_the_demo(exported: dict[str, ExportedMethod], name: str) -> None:
    operators = [node for node in read_program(exported[name].pt2).graph.nodes if node.op == "call_function"]
    assert operators
    for node in operators:
        files = re.findall(r'File "([^"]+)"', node.meta["stack_trace"])
        users = [file for file in files if not file.startswith(("torch/", "<"))]
        assert users and users[-1] == f"etfarm/client/export/demo_models/{name}.py"


def test_making_a_demo_is_quick_and_leaves_torch_as_it_was() -> None:
    torch.manual_seed(7)
    threads, expected = torch.get_num_threads(), torch.rand(1)
    torch.manual_seed(7)
    started = time.process_time()
    load_source(Demo("ds_cnn"))
    assert time.process_time() - started < 10
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("name", "top"), [("ds_cnn", list(range(8))), ("mobilenet_v1_025", [0, 1] * 4)])
def test_the_generator_writes_a_file_like_the_committed_one(
    demos: dict[str, ModelSource], tmp_path: Path, name: str, top: list[int]
) -> None:
    """Its numbers are the committed ones on one kind of processor only: everywhere, they are a network that was trained."""
    command = [sys.executable, str(ROOT / "client" / "generate_demos.py"), name, "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    path, kept = tmp_path / f"{name}.npz", Path(demo_models.__file__).with_name(f"{name}.npz")
    assert path.stat().st_size == pytest.approx(kept.stat().st_size, rel=0.01) and kept.stat().st_size < 500_000
    with np.load(path) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    samples = arrays.pop(demo_models.SAMPLES_KEY).float()
    committed = demos[name]
    assert samples.shape == torch.cat([sample for (sample,) in committed.calibration_inputs["forward"]]).shape
    assert arrays.keys() == committed.methods["forward"].state_dict().keys()
    trained = type(committed.methods["forward"])()
    trained.load_state_dict(arrays)
    assert trained.eval()(samples).argmax(1).tolist() == top
