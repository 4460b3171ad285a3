"""Every bad input gets one clear sentence on stderr, the right exit code and a --json with its error; the farm stays up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import factories, models
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program

FACTORIES = str(Path(factories.__file__))


@dataclass(frozen=True)
class Bad:
    """Arguments after `bench`; {0} is what `make` gave."""

    arguments: tuple[str, ...]
    code: int
    reason: str
    says: tuple[str, ...]
    make: Callable[[Path], Path] | None = None


def _text(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text("this is no model\n")
        return folder / name

    return make


def _npz(**arrays: np.ndarray) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        np.savez(folder / "in.npz", **arrays)
        return folder / "in.npz"

    return make


def _pte(folder: Path) -> Path:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    path = folder / "conv.pte"
    program = to_edge_transform_and_lower(models.conv(), partitioner=[XnnpackPartitioner()]).to_executorch()
    path.write_bytes(program.buffer)
    return path


def _truncated(folder: Path) -> Path:
    whole = _pte(folder).read_bytes()
    (folder / "cut.pte").write_bytes(whole[: len(whole) // 2])
    return folder / "cut.pte"


CASES = {
    "no_pt2": Bad(("{0}",), 2, "NOT_A_PT2", ("no .pt2",), _text("model.pt2")),
    "truncated_pte": Bad(("{0}",), 2, "TRUNCATED_PROGRAM", ("cut off",), _truncated),
    "missing_file": Bad(("nothing.pte",), 2, "MODEL_NOT_FOUND", ("nothing.pte",)),
    "unknown_recipe": Bad(("demo:ds_cnn", "--recipe", "xnnpack_fp23"), 2, "UNKNOWN_RECIPE", ("xnnpack_fp32",)),
    "unknown_demo": Bad(("demo:resnet9",), 2, "UNKNOWN_DEMO", ("resnet8",)),
    "unknown_selector_key": Bad(("demo:ds_cnn", "--device", "colour=red"), 2, "UNKNOWN_SELECTOR_KEY", ("colour", "arch")),
    "no_device_matches": Bad((f"{FACTORIES}:small", "--device", "name=nobody"), 2, "NO_SUCH_DEVICE", ("name=nobody", "board-0")),
    "train_mode": Bad((f"{FACTORIES}:train_mode",), 1, "MODEL_IN_TRAIN_MODE", (".eval()",)),
    "data_dependent_branch": Bad((f"{FACTORIES}:branching",), 1, "DATA_DEPENDENT_BRANCH", ("torch.cond", "factories.py:")),
    "dim_without_max": Bad((f"{FACTORIES}:unbounded",), 1, "DIM_WITHOUT_MAXIMUM", ("batch", "max=")),
    "something_else": Bad((f"{FACTORIES}:something_else",), 1, "FACTORY_RETURNED_SOMETHING_ELSE", ("dict", "example_inputs")),
    "no_such_factory": Bad((f"{FACTORIES}:smal",), 2, "FACTORY_NOT_FOUND", ("small",)),
    "wrong_shape": Bad(
        (f"{FACTORIES}:small", "--inputs", "{0}"), 1, "INPUT_MISMATCH", ("image", "[1, 3, 16, 16]"),
        _npz(image=np.zeros((1, 3, 8, 8), np.float32)),
    ),
    "wrong_dtype": Bad(
        (f"{FACTORIES}:small", "--inputs", "{0}"), 1, "INPUT_MISMATCH", ("float32", "float64"),
        _npz(image=np.zeros((1, 3, 16, 16))),
    ),
    "unknown_input": Bad(
        (f"{FACTORIES}:small", "--inputs", "{0}"), 2, "UNKNOWN_INPUT", ("picture", "image"),
        _npz(picture=np.zeros((1, 3, 16, 16), np.float32)),
    ),
    "four_bit_of_an_exported_program": Bad(
        (f"{FACTORIES}:small", "--recipe", "xnnpack_torchao_int8da_int4w_per_channel"), 2, "RECIPE_NEEDS_EAGER_MODULE",
        ("xnnpack_pt2e_int8_static_per_channel",),
    ),
    "cannot_run": Bad((f"{FACTORIES}:fourier", "--recipe", "portable"), 1, "", ("fft",)),
    "hangs": Bad((f"{FACTORIES}:slow", "--recipe", "portable", "--timeout", "3"), 1, "PROGRAM_TIMED_OUT", ("3 s",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, farm: FarmProcess, tmp_path: Path) -> None:
    bad = CASES[name]
    made = str(bad.make(tmp_path)) if bad.make else ""
    arguments = [argument.replace("{0}", made) for argument in bad.arguments]
    done = etfarm("bench", *arguments, "--server", farm.address, "--json", "report.json", cwd=tmp_path)
    assert done.returncode == bad.code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    document = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert document["schema"] == "etfarm.report/1"
    failed = [report["error"] for report in document["reports"] if report["error"]]
    error = failed[0] if failed else document["error"]
    assert error["fault"] == "USER", error
    assert bad.reason in ("", error["reason"]), error
    said = f"{error['message']} {error['remedy'] or ''}"
    for words in bad.says:
        assert words in said, said
        assert words in done.stderr + done.stdout
    with farm.client() as client:
        assert [device.state.name for device in client.devices()] == ["IDLE"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_an_input_of_another_memory_format_is_refused_and_the_right_one_runs(
    farm: FarmProcess, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """ExecuTorch itself would accept it, and compute with the wrong elements."""
    image = np.random.default_rng(0).random((1, 3, 16, 16), np.float32)
    np.savez(tmp_path / "in.npz", **{"image": image, "image.dim_order": np.array(order)})
    done = etfarm(
        "bench", f"{FACTORIES}:channels_last", "--inputs", "in.npz", "--json", "r.json", "--server", farm.address,
        cwd=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "r.json").read_text())["reports"][0]
    if order == (0, 2, 3, 1):
        assert done.returncode == 0, done.stderr
        assert report["accuracy"][0]["sqnr_db"] > 80
    else:
        assert done.returncode == 1
        assert report["error"]["reason"] == "INPUT_MISMATCH"
        assert "dim order" in report["error"]["message"] and "[0, 2, 3, 1]" in report["error"]["message"]


def test_a_program_that_needs_a_kernel_the_device_lacks_is_never_sent(farm: FarmProcess, tmp_path: Path) -> None:
    from executorch.exir import to_edge

    from etfarm.client.models import Progress

    with torch.library._scoped_library("etfarm_test", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.define("odd.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.impl("odd", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("odd.out", lambda x, *, out: out.copy_(x), "CompositeExplicitAutograd")

        class Odd(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.ops.etfarm_test.odd(x) + 1

        program = to_edge(torch.export.export(Odd(), (torch.rand(4),))).to_executorch()
    path = tmp_path / "odd.pte"
    path.write_bytes(program.buffer)
    with farm.client() as client:
        job = client.bench(path)
        phases = {event.phase for event in job.watch() if isinstance(event, Progress)}
        result = job.result()
    assert phases.isdisjoint({"FETCH", "LOAD", "TIMED"})
    error = result.reports[0].error
    assert (error.fault, error.reason) == ("USER", "OPERATOR_MISSING")
    assert "etfarm_test::odd.out" in error.message


def test_a_program_that_crashes_is_the_users_fault_and_the_next_one_runs(farm: FarmProcess, tmp_path: Path) -> None:
    """Its XNNPACK weights are in a data file that is not given: the runtime dereferences null."""
    with farm.client() as client:
        error = client.bench(program("external_xnnpack").path).result().reports[0].error
        assert (error.fault, error.reason) == ("USER", "PROGRAM_CRASHED"), error
        assert "SIGSEGV" in error.message
        assert client.bench(_pte(tmp_path), min_time_s=0.0).result().report.state == "SUCCEEDED"


def test_a_program_that_eats_memory_is_the_users_fault_and_the_next_one_runs(farm: FarmProcess, tmp_path: Path) -> None:
    """It plans tebibytes: more than any device of this test has."""
    from executorch.exir import to_edge

    path = tmp_path / "hungry.pte"
    module, inputs = factories.hungry()
    path.write_bytes(to_edge(torch.export.export(module, inputs)).to_executorch().buffer)
    done = etfarm("bench", str(path), "--server", farm.address, "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 1
    error = json.loads((tmp_path / "r.json").read_text())["reports"][0]["error"]
    assert (error["fault"], error["reason"]) == ("USER", "PROGRAM_OUT_OF_MEMORY"), error
    with farm.client() as client:
        assert client.bench(_pte(tmp_path), min_time_s=0.0).result().report.state == "SUCCEEDED"


def test_an_unreachable_server_is_exit_code_4(tmp_path: Path) -> None:
    done = etfarm("bench", "demo:ds_cnn", "--server", "127.0.0.1:1", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 4
    assert json.loads((tmp_path / "r.json").read_text())["error"]["reason"] == "SERVER_UNREACHABLE"
    assert "127.0.0.1:1" in done.stderr
