"""The whole staged pipeline from the command line, against a real farm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import assistant
from tests.support.farm import FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="each test exports, compiles and measures a model from the command line")

INT8 = "xnnpack_pt2e_int8_static_per_channel"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """MODEL of the assistant, in a user's own file."""
    shutil.copy(assistant.__file__, tmp_path / "assistant.py")
    return "assistant.py:assistant"


def run(farm: FarmProcess, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command that must succeed; return its --json document."""
    done = etfarm(*arguments, "--json", "report.json", "--server", farm.address, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


def outputs_of(pte: Path, method: str, *inputs: Any, data: Path | None = None) -> list[Any]:
    """Return the outputs of ExecuTorch's own runtime for a program from the farm."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(pte, data_path=data)
    return list(program.load_method(method).execute(list(inputs)))


def test_a_program_of_several_methods(farm: FarmProcess, tmp_path: Path, model: str) -> None:
    """One .pte of three methods and two constants; per-method delegation, checks at all sizes, a record of all methods."""
    import torch

    (report,) = run(farm, tmp_path, "compile", model, "-o", "x.pte", "--etrecord", "x.etrecord")["reports"]
    compiled = report["compile"]
    assert set(compiled["delegation"]) >= {"vision_encoder", "token_embedding", "text_decoder"}
    exported = compiled["stages"][0]
    assert exported["stage"] == "TORCH_EXPORT" and exported["where"] == "CLIENT"
    assert set(exported["methods"]) == {"vision_encoder", "token_embedding", "text_decoder"}
    checks = {(check["method"], check["inputs"]): check for check in compiled["checks"]}
    assert set(checks) == {
        ("vision_encoder", "EXAMPLE"),
        *((method, size) for method in ("token_embedding", "text_decoder") for size in ("EXAMPLE", "MIN", "MAX")),
    }
    assert all(check["ran"] and output["sqnr_db"] > 80 for check in checks.values() for output in check["outputs"])
    assert checks["text_decoder", "MAX"]["shapes"] == [f"1x{assistant.LENGTH}x{assistant.WIDTH}"]
    assert "INITIALIZED_MUTABLE_BUFFERS" in {warning["code"] for warning in compiled["warnings"]}
    embedding = next(row for row in compiled["delegation"]["token_embedding"]["operators"] if row["non_delegated"])
    assert embedding["places"][0]["source"]["file"] == "assistant.py"
    assert "return self.table(tokens)" in embedding["places"][0]["source"]["code"]
    assert compiled["sizes"]["methods"]["vision_encoder"]["delegate_bytes"] > 0

    torch.manual_seed(0)
    logits, calls = outputs_of(tmp_path / "x.pte", "text_decoder", torch.randn(1, 5, assistant.WIDTH))
    assert logits.shape == (1, 5, 100) and calls.item() == 8.0
    assert outputs_of(tmp_path / "x.pte", "get_max_length") == [assistant.LENGTH]
    for method in ("vision_encoder", "token_embedding", "text_decoder"):
        program = torch.export.load(tmp_path / f"x.{method}.pt2")
        assert program.graph_signature.user_inputs
    from etfarm.server.reports.trace.graph import read_record

    for method in ("vision_encoder", "token_embedding", "text_decoder"):
        record = read_record(tmp_path / "x.etrecord", method)
        assert record.handles and record.nodes, method


def test_int8_keeps_dynamic_shapes_and_accuracy(farm: FarmProcess, tmp_path: Path, model: str) -> None:
    (report,) = run(farm, tmp_path, "compile", model, "--recipe", INT8, "-o", "x.pte")["reports"]
    compiled = report["compile"]
    stages = [(stage["stage"], stage["where"]) for stage in compiled["stages"]]
    assert stages[:3] == [("TORCH_EXPORT", "CLIENT"), ("QUANTIZE", "SERVER"), ("TORCH_EXPORT", "SERVER")]
    for check in compiled["checks"]:
        if check["method"] != "token_embedding":
            assert check["ran"] and check["outputs"][0]["sqnr_db"] > 20, check
    sizes = {check["inputs"] for check in compiled["checks"] if check["method"] == "text_decoder"}
    assert sizes == {"EXAMPLE", "MIN", "MAX"}


def test_each_method_is_measured_separately(farm: FarmProcess, tmp_path: Path, model: str) -> None:
    arguments = ("bench", model, "--iterations", "5", "--min-time", "0", "--warmup", "1")
    everything = run(farm, tmp_path, *arguments)["reports"]
    assert {report["method"] for report in everything} == {"vision_encoder", "token_embedding", "text_decoder"}
    assert all(report["state"] == "SUCCEEDED" and report["latency"]["p50_ns"] > 0 for report in everything)
    assert all(row["sqnr_db"] > 80 for report in everything for row in report["accuracy"])
    (one,) = run(farm, tmp_path, *arguments, "--method", "text_decoder")["reports"]
    assert one["method"] == "text_decoder" and one["compile"]["cached"]


def test_four_bit_weights_are_quantized_by_the_client(farm: FarmProcess, tmp_path: Path, model: str) -> None:
    recipe = "xnnpack_torchao_int8da_int4w_per_tensor"
    (report,) = run(farm, tmp_path, "compile", model, "--recipe", recipe, "-o", "four.pte")["reports"]
    stages = [(stage["stage"], stage["where"]) for stage in report["compile"]["stages"]]
    assert stages[:2] == [("SOURCE_TRANSFORM", "CLIENT"), ("TORCH_EXPORT", "CLIENT")]
    (full,) = run(farm, tmp_path, "compile", model, "-o", "full.pte")["reports"]
    assert report["compile"]["program"]["size_bytes"] < full["compile"]["program"]["size_bytes"]
    check = next(c for c in report["compile"]["checks"] if (c["method"], c["inputs"]) == ("text_decoder", "EXAMPLE"))
    assert 5 < check["outputs"][0]["sqnr_db"] < 30  # four bits against the module as it was, not against itself


def test_a_stopped_compilation_writes_its_stages_files(farm: FarmProcess, tmp_path: Path) -> None:
    import torch
    import torch.ao.quantization.fx._decomposed  # registers the operators of quantized programs

    run(farm, tmp_path, "compile", "demo:ds_cnn", "--recipe", INT8, "--stop-after", "QUANTIZE", "-o", "quantized.pt2")
    quantized = torch.export.load(tmp_path / "quantized.pt2")
    assert any("quantize" in str(node.target) for node in quantized.graph.nodes)
    (report,) = run(farm, tmp_path, "compile", "demo:ds_cnn", "--stop-after", "TO_EDGE_TRANSFORM_AND_LOWER", "-o", "edge")[
        "reports"
    ]
    assert report["compile"]["stopped_after"] == "TO_EDGE_TRANSFORM_AND_LOWER" and report["compile"]["program"] is None
    assert {path.name for path in (tmp_path / "edge").iterdir()} == {"forward.pt2", "forward.txt", "delegation.csv"}
    assert "executorch_call_delegate" in (tmp_path / "edge" / "forward.txt").read_text()
    assert (tmp_path / "edge" / "delegation.csv").read_text().startswith("method,")


RECIPE_FILE = """
recipe = "xnnpack_fp32"
strict = false
stages = ["TORCH_EXPORT", "TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_BACKEND", "TO_EXECUTORCH"]

[methods.token_embedding]
partitioners = []

[methods.text_decoder]
partitioners = []

[executorch]
external_constants = "weights"
memory_planning = "naive"
"""


def test_a_recipe_file_sets_methods_and_external_weights(farm: FarmProcess, tmp_path: Path, model: str) -> None:
    import torch

    (tmp_path / "mixed.toml").write_text(RECIPE_FILE)
    (report,) = run(farm, tmp_path, "compile", model, "--recipe", "mixed.toml", "-o", "x.pte")["reports"]
    compiled = report["compile"]
    assert [stage["stage"] for stage in compiled["stages"] if stage["where"] == "SERVER"] == [
        "TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_BACKEND", "TO_EXECUTORCH",
    ]  # fmt: skip
    assert compiled["delegation"]["vision_encoder"]["subgraphs"] > 0 == compiled["delegation"]["text_decoder"]["subgraphs"]
    (name,) = compiled["data"]
    data = next(path for path in tmp_path.iterdir() if path.name.startswith("weights"))
    assert name.startswith("weights") and data.stat().st_size == compiled["data"][name]["size_bytes"] > 4 * 100 * assistant.WIDTH
    (vectors,) = outputs_of(tmp_path / "x.pte", "token_embedding", torch.arange(3).reshape(1, 3), data=data)
    assert vectors.shape == (1, 3, assistant.WIDTH)
    arguments = ("bench", model, "--recipe", "mixed.toml", "--method", "text_decoder", "--iterations", "5", "--min-time", "0")
    (measured,) = run(farm, tmp_path, *arguments)["reports"]
    assert measured["accuracy"][0]["sqnr_db"] > 80
    np.savez(tmp_path / "in.npz", **{"0": np.arange(3).reshape(1, 3)})
    run(farm, tmp_path, "run", "x.pte", "--data", data.name, "--inputs", "in.npz", "--method", "token_embedding", "-o", "out.npz")
    with np.load(tmp_path / "out.npz") as got:
        np.testing.assert_allclose(next(iter(got.values())), vectors.numpy())
    ready = ("bench", "x.pte", "--data", data.name, "--method", "token_embedding", "--inputs", "in.npz")
    (alone,) = run(farm, tmp_path, *ready, "--iterations", "5", "--min-time", "0")["reports"]
    assert alone["latency"]["p50_ns"] > 0 and alone["recipe"] is None
    assert measured["recipe"] == f"mixed [{measured['recipe_digest'][:8]}]"


def test_verbose_shows_the_compilers_output(farm: FarmProcess, tmp_path: Path) -> None:
    arguments = ("compile", "demo:ds_cnn", "-o", "x.pte", "--no-cache", "--server", farm.address)
    quiet, loud = etfarm(*arguments, cwd=tmp_path), etfarm(*arguments, "--verbose", cwd=tmp_path)
    assert quiet.returncode == loud.returncode == 0
    assert "compile: " in loud.stderr and "compile: " not in quiet.stderr
    watch = ("jobs", "watch", "latest", "--server", farm.address)
    watched, reported = etfarm(*watch, cwd=tmp_path), etfarm(*watch, "--verbose", cwd=tmp_path)
    assert watched.returncode == reported.returncode == 0
    assert "compile: " in reported.stderr and "compile: " not in watched.stderr


def test_calibration_samples_come_from_a_folder(farm: FarmProcess, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "samples").mkdir()
    for index in range(12):
        np.savez(tmp_path / "samples" / f"{index}.npz", **{"0": rng.standard_normal((1, 1, 49, 10)).astype("float32")})
    arguments = ("compile", "demo:ds_cnn", "--recipe", INT8, "-o", "x.pte", "--calibration", "samples")
    (report,) = run(farm, tmp_path, *arguments)["reports"]
    assert "FEW_CALIBRATION_INPUTS" not in {warning["code"] for warning in report["compile"]["warnings"]}
    bad = rng.standard_normal((1, 1, 50, 10)).astype("float32")
    np.savez(tmp_path / "samples" / "12.npz", **{"0": bad})
    done = etfarm(*arguments, "--server", farm.address, cwd=tmp_path)
    assert done.returncode in (1, 2) and "12" in done.stderr and "50" in done.stderr
