"""Every bad input gets one clear sentence on stderr, the right exit code and a --json with its error; the farm stays up."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from etfarm.client.models import Progress
from tests.support import factories, models
from tests.support.farm import FarmProcess, etfarm, runners, wait_until
from tests.support.programs import program
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="each case is a command that loads torch, and many compile on a farm")

FACTORIES = str(Path(factories.__file__))


@dataclass(frozen=True)
class Bad:
    """Arguments after `bench`; {0} is what `make` gave."""

    arguments: tuple[str, ...]
    code: int
    reason: str
    says: tuple[str, ...]
    make: Callable[[Path], Path] | None = None


LARGE = """
import torch

def large():
    return torch.nn.Linear(10_000, 10_000, bias=False).eval(), (torch.zeros(1, 10_000),)
"""
"""400 MB of weights."""


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


def _newer_pt2(folder: Path) -> Path:
    """Return a whole .pt2 whose schema's major version is the next one, as torch 3.1 may write it."""
    saved, newer = folder / "saved.pt2", folder / "newer.pt2"
    torch.export.save(models.conv(), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(newer, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("models/model.json"):
                program = json.loads(data)
                program["schema_version"]["major"] += 1
                program["torch_version"] = "3.1.0"
                data = json.dumps(program).encode()
            new.writestr(member, data)
    return newer


def _recipe_with_a_typo(folder: Path) -> Path:
    (folder / "mine.toml").write_text('recipe = "xnnpack_fp32"\n[executorch]\nmemory_planning = "gredy"\n')
    return folder / "mine.toml"


def _samples_of_another_dtype(folder: Path) -> Path:
    """Return three samples, of which the third is float64."""
    samples = folder / "samples"
    samples.mkdir()
    for index, dtype in enumerate((np.float32, np.float32, np.float64)):
        np.savez(samples / f"{index}.npz", image=np.zeros((1, 3, 16, 16), dtype))
    return samples


CASES = {
    "no_pt2": Bad(("{0}",), 2, "NOT_A_PT2", ("not a .pt2 archive",), _text("model.pt2")),
    "truncated_pte": Bad(("{0}",), 2, "TRUNCATED_PROGRAM", ("cut off",), _truncated),
    "pt2_of_a_newer_torch": Bad(
        ("{0}",), 1, "PT2_OF_ANOTHER_TORCH",
        ("written by torch 3.1.0", f"Export it with torch {torch.__version__.partition('+')[0]}"), _newer_pt2,
    ),
    "missing_file": Bad(("nothing.pte",), 2, "MODEL_NOT_FOUND", ("nothing.pte",)),
    "unknown_recipe": Bad(("demo:ds_cnn", "--recipe", "xnnpack_fp23"), 2, "UNKNOWN_RECIPE", ("xnnpack_fp32",)),
    "recipe_file_with_a_typo": Bad(
        ("demo:ds_cnn", "--recipe", "{0}"), 2, "BAD_RECIPE_FIELD", ("[executorch] memory_planning", "gredy", "greedy", "naive"),
        _recipe_with_a_typo,
    ),
    "calibration_of_another_dtype": Bad(
        (f"{FACTORIES}:small", "--recipe", "xnnpack_pt2e_int8_static_per_channel", "--calibration", "{0}"), 2,
        "CALIBRATION_MISMATCH", ("2.npz", "image", "float32", "float64"), _samples_of_another_dtype,
    ),
    "unknown_demo": Bad(("demo:resnet9",), 2, "UNKNOWN_DEMO", ("resnet8",)),
    "unknown_selector_key": Bad(("demo:ds_cnn", "--device", "colour=red"), 2, "UNKNOWN_SELECTOR_KEY", ("colour", "arch")),
    "train_mode": Bad((f"{FACTORIES}:train_mode",), 1, "TRAINING_MODE", (".eval()",)),
    "data_dependent_branch": Bad((f"{FACTORIES}:branching",), 1, "DATA_DEPENDENT_BRANCH", ("torch.cond", "factories.py:")),
    "dim_without_max": Bad((f"{FACTORIES}:unbounded",), 1, "DIM_WITHOUT_MAXIMUM", ("batch", "max=")),
    "something_else": Bad((f"{FACTORIES}:something_else",), 1, "FACTORY_RETURNED_SOMETHING_ELSE", ("dict", "example_inputs")),
    "no_such_factory": Bad((f"{FACTORIES}:smal",), 2, "FACTORY_NOT_FOUND", ("small",)),
    "wrong_shape": Bad(
        (f"{FACTORIES}:small", "--inputs", "{0}"), 2, "INPUT_MISMATCH", ("image", "[1, 3, 16, 16]"),
        _npz(image=np.zeros((1, 3, 8, 8), np.float32)),
    ),
    "wrong_dtype": Bad(
        (f"{FACTORIES}:small", "--inputs", "{0}"), 2, "INPUT_MISMATCH", ("float32", "float64"),
        _npz(image=np.zeros((1, 3, 16, 16))),
    ),
    "four_bit_of_narrow_layers": Bad(
        (f"{FACTORIES}:small", "--recipe", "xnnpack_torchao_int8da_int4w_per_channel"), 1, "", ("'out' has 8 inputs", "32"),
    ),
    "missing_data": Bad(("{0}",), 1, "PROGRAM_DATA_MISSING", (".ptd",), lambda folder: program("external_xnnpack").path),
    "cannot_run": Bad((f"{FACTORIES}:fourier", "--recipe", "portable"), 1, "", ("fft",)),
    "hangs": Bad((f"{FACTORIES}:slow", "--recipe", "portable", "--timeout", "10"), 1, "PROGRAM_TIMED_OUT", ("10 s",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, farm: FarmProcess, tmp_path: Path) -> None:
    bad = CASES[name]
    created = str(bad.make(tmp_path)) if bad.make else ""
    arguments = [argument.replace("{0}", created) for argument in bad.arguments]
    done = etfarm("bench", *arguments, "--server", farm.address, "--json", "report.json", cwd=tmp_path)
    assert done.returncode == bad.code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    document = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert document["schema"] == "etfarm.report/1"
    failed = [report["error"] for report in document["reports"] if report["error"]]
    error = failed[0] if failed else document["error"]
    assert error["fault"] == "USER", error
    assert bad.reason in ("", error["reason"]), error
    text = f"{error['message']} {error['remedy'] or ''}"
    for words in bad.says:
        assert words in text, text
        assert words in done.stderr + done.stdout
    with farm.client() as client:
        assert wait_until(lambda: [device.state.name for device in client.devices()] == ["IDLE"])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_an_input_with_the_wrong_memory_format_is_refused(farm: FarmProcess, tmp_path: Path, order: tuple[int, ...]) -> None:
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


def test_a_program_with_an_unsupported_kernel_is_never_sent(farm: FarmProcess, tmp_path: Path) -> None:
    from executorch.exir import to_edge

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


def test_a_crashing_program_is_a_user_error_and_the_next_program_runs(farm: FarmProcess, tmp_path: Path) -> None:
    """The runtime refuses what is known to crash it, so the kernel's signal is sent by hand, in the middle of the timed pass."""
    with farm.client() as client:
        job = client.bench(program("chain").path, min_time_s=60.0)
        until_phase(job, "TIMED")
        (runner,) = runners(farm.agents[0].pid)
        os.kill(runner, signal.SIGSEGV)
        error = job.result().reports[0].error
        assert (error.fault, error.reason) == ("USER", "PROGRAM_CRASHED"), error
        assert "SIGSEGV" in error.message
        assert client.bench(_pte(tmp_path), min_time_s=0.0).result().report.state == "SUCCEEDED"


def test_a_program_with_excessive_memory_is_a_user_error_and_the_next_program_runs(farm: FarmProcess, tmp_path: Path) -> None:
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


def test_a_model_larger_than_the_compilers_memory_is_refused_with_the_limit(breakable: FarmProcess, tmp_path: Path) -> None:
    """And what fits is compiled afterwards."""
    (tmp_path / "large.py").write_text(LARGE)
    with FarmProcess(breakable.folder, bundle=False, serve=("--memory-gib", "1")) as limited:
        limited.start(agents=0)
        arguments = ("-o", "x.pte", "--server", limited.address, "--json", "r.json")
        done = etfarm("compile", "large.py:large", *arguments, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "1024 MiB" in done.stderr and "--memory-gib" in done.stderr and "Traceback" not in done.stderr
        error = json.loads((tmp_path / "r.json").read_text())["reports"][0]["error"]
        assert (error["fault"], error["reason"]) == ("USER", "CHILD_OUT_OF_MEMORY"), error
        assert etfarm("compile", f"{FACTORIES}:small", *arguments, cwd=tmp_path).returncode == 0


def test_an_unreachable_server_is_exit_code_4(tmp_path: Path) -> None:
    done = etfarm("bench", "demo:ds_cnn", "--server", "127.0.0.1:1", "--server-wait", "0", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 4
    assert json.loads((tmp_path / "r.json").read_text())["error"]["reason"] == "SERVER_UNREACHABLE"
    assert "127.0.0.1:1" in done.stderr
