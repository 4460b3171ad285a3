"""Data sets through a whole farm of two devices: order, failures, throughput, metrics, files."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.client import AsyncFarm
from etfarm.client.datasets.dataset import Result
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess, etfarm, runners, wait_until
from tests.support.programs import program
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="farms of two devices run whole data sets")

ONES = np.ones((2, 3), np.float32)
COUNT = 60
MANY = 20_000
"""Where a device must have had a part before something happens."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm with two equal devices."""
    with FarmProcess(tmp_path_factory.mktemp("pair")) as running:
        yield running.start(agents=2)


def sums(count: int = COUNT) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs of `add`: sample i gives i + 1 everywhere."""
    return [(ONES * i, ONES) for i in range(count)]


def devices_of(seen: list[Result]) -> set[str]:
    """Return the names of the devices that ran samples."""
    return {result.device.name for result in seen if result.device}


def collect_what_others_left() -> None:
    """Collect the garbage of earlier tests of this process, whose warnings are not about the test that comes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def write(folder: Path, count: int = 6, wrong: int | None = None, **more: Any) -> Path:
    """Write a folder of inputs for `add`, `0.npz` and so on, optionally with a wrong shape."""
    folder.mkdir()
    for index in range(count):
        x = np.zeros(5, np.float32) if index == wrong else ONES * index
        np.savez(folder / f"{index}.npz", **{"0": x, "1": ONES}, **{key: value[index] for key, value in more.items()})  # type: ignore[arg-type]
    return folder


def test_results_come_in_the_order_of_inputs_from_both_devices(pair: FarmProcess) -> None:
    seen: list[Result] = []

    def inputs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        # One of them may be ready long before the other.
        for index, values in enumerate(sums(MANY)):
            if index >= COUNT and len(devices_of(seen)) == 2:
                return
            yield values

    with pair.client() as client:
        got = list(client.run_dataset(program("add").path, inputs(), devices=2, on_result=seen.append))
    assert [index for index, _ in got] == list(range(len(got))) and len(got) >= COUNT
    assert all((outputs[0] == index + 1).all() for index, outputs in got)
    assert all(outputs.run_ns for _, outputs in got)
    assert devices_of(seen) == {"board-0", "board-1"}
    assert wait_until(pair.is_idle)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("departure", ["break", "raise", "keep the iterator", "break and go on"])
def test_leaving_early_ends_cleanly(pair: FarmProcess, departure: str, caplog: pytest.LogCaptureFixture) -> None:
    collect_what_others_left()
    with pair.client() as client:
        list(client.run_dataset(program("add").path, sums(1)))  # what is created once is there
    before = set(threading.enumerate())
    kept: list[object] = []
    with suppress(ZeroDivisionError), pair.client() as client:
        results = client.run_dataset(program("add").path, sums(10_000), devices=2)
        if departure == "keep the iterator":
            kept.append(results)
        for index, _ in results:
            if departure == "raise" and index == 3:
                raise ZeroDivisionError
            if index == 5:
                break
        if departure == "break and go on":
            del results
            assert wait_until(pair.is_idle, 15)
    assert wait_until(pair.is_idle, 15)
    assert wait_until(lambda: set(threading.enumerate()) <= before, 15), threading.enumerate()
    kept.clear()
    gc.collect()
    assert caplog.records == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keeps", [False, True])
async def test_an_async_iteration_that_is_left_early_ends_with_its_farm(
    pair: FarmProcess, keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    collect_what_others_left()
    kept: list[object] = []
    async with AsyncFarm(pair.address) as client:
        results = client.run_dataset(program("add").path, sums(10_000), devices=2)
        if keeps:
            kept.append(results)
        async for index, _ in results:
            if index == 5:
                break
        del results
    assert wait_until(pair.is_idle, 15)
    kept.clear()
    gc.collect()
    assert caplog.records == []


def test_named_inputs_are_accepted_and_validated(pair: FarmProcess) -> None:
    with pair.client() as client:
        named = [{"1": ONES, "0": ONES * i} for i in range(3)]
        assert [outputs[0][0, 0] for _, outputs in client.run_dataset(program("add").path, named)] == [1, 2, 3]
        with pytest.raises(EtfarmError, match="sample 1: forward: there is no input 'mask'") as refused:
            list(client.run_dataset(program("add").path, [named[0], {**named[1], "mask": ONES}]))
        assert refused.value.metadata["sample"] == "1"


def test_a_stateful_program_receives_a_devices_samples_in_order(pair: FarmProcess) -> None:
    with pair.client() as client:
        got = list(client.run_dataset(program("counter").path, [np.zeros(1, np.float32)] * 40))
    assert [outputs[0].item() for _, outputs in got] == [float(n) for n in range(1, 41)]


def test_reset_restores_the_initial_state_before_each_sample(pair: FarmProcess) -> None:
    with pair.client() as client:
        got = list(client.run_dataset(program("counter").path, [np.zeros(1, np.float32)] * 5, devices=2, reset=True))
    assert [outputs[0].item() for _, outputs in got] == [1.0] * 5


def test_devices_can_return_equal_large_outputs_concurrently(pair: FarmProcess) -> None:
    ones = np.ones((1 << 19,), np.float32).reshape(program("wide").inputs[0].shape)  # type: ignore[union-attr]
    with pair.client() as client:
        for step in range(3):
            # Each output is the next input: both ends and both devices send the same bytes.
            got = list(client.run_dataset(program("wide").path, (ones * (100 * step + i // 2) for i in range(40)), devices=2))
            assert [outputs[0].flat[0] for _, outputs in got] == [100 * step + i // 2 + 1 for i in range(40)]


def test_a_busy_device_joins_once_it_is_free(pair: FarmProcess) -> None:
    waits: list[str] = []
    with pair.client() as client, client.session(program("counter").path, "name=board-0") as session:
        seen: list[Result] = []
        for index, _ in client.run_dataset(program("add").path, sums(), devices=2, on_result=seen.append, on_wait=waits.append):
            if index == 3:
                assert wait_until(lambda: any("board-0 is busy" in wait for wait in waits))
                session.close()
        assert len(seen) == COUNT
    assert any("board-0 is busy" in wait for wait in waits)


def test_the_other_device_runs_a_killed_devices_samples(breakable: FarmProcess) -> None:
    breakable.start(agents=2)
    lost: list[str] = []
    seen: list[Result] = []

    def inputs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        left = COUNT
        for index, values in enumerate(sums(MANY)):
            # Not before it has a part in it: the other may have begun alone.
            if left == COUNT and (index < 30 or "board-0" not in devices_of(seen)):
                yield values
                continue
            if left == COUNT:
                breakable.agents[0].kill9()
            if not left:
                return
            left -= 1
            yield values

    with breakable.client() as client:
        got = list(client.run_dataset(program("add").path, inputs(), devices=2, on_result=seen.append, on_wait=lost.append))
    assert [index for index, _ in got] == list(range(len(got))) and len(got) >= COUNT
    assert all((outputs[0] == index + 1).all() for index, outputs in got)
    assert devices_of(seen[-10:]) == {"board-1"}
    assert any("board-0 is lost" in line for line in lost)


def test_losing_the_last_device_keeps_finished_samples(breakable: FarmProcess) -> None:
    breakable.start()
    done: list[int] = []

    def inputs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index, values in enumerate(sums()):
            if index == 30:
                breakable.agents[0].kill9()
            yield values

    with breakable.client() as client, refuses("SESSION_LOST"):
        for index, _ in client.run_dataset(program("add").path, inputs()):
            done.append(index)
    assert done == list(range(len(done)))
    assert done


def test_a_crash_fails_its_sample_and_the_program_is_reloaded(pair: FarmProcess) -> None:
    seen: list[Result] = []
    # Runners of sessions that ended just now.
    assert wait_until(lambda: not any(runners(agent.pid) for agent in pair.agents))

    def inputs() -> Iterator[np.ndarray]:
        for index in range(30):
            if index == 10:
                (agent,) = [agent for agent in pair.agents if runners(agent.pid)]
                for runner in runners(agent.pid):
                    os.kill(runner, signal.SIGSEGV)
            yield np.zeros(1, np.float32)

    with pair.client() as client:
        got = list(client.run_dataset(program("counter").path, inputs(), keep_going=True, on_result=seen.append))
    (failed,) = [result for result in seen if result.failed]
    assert failed.error is not None
    assert failed.error.reason == "PROGRAM_CRASHED"
    after = [outputs[0].item() for index, outputs in got if index > failed.index]
    assert after == [float(n) for n in range(1, len(after) + 1)], "its state began anew"


def test_a_folder_of_inputs_yields_outputs_of_the_same_names(pair: FarmProcess, tmp_path: Path) -> None:
    write(tmp_path / "in")
    done = etfarm(
        "run", str(program("add").path), "--inputs", "in", "-o", "out", "--devices", "2", "--server", pair.address,
        "--json", "d.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{i}.npz" for i in range(6)]
    for index in range(6):
        with np.load(tmp_path / "out" / f"{index}.npz") as outputs:
            np.testing.assert_array_equal(next(iter(outputs.values())), ONES * index + 1)
    assert "6 samples" in done.stdout
    assert "samples/s" in done.stdout
    document = json.loads((tmp_path / "d.json").read_text())
    assert (document["schema"], document["job"], document["reports"], document["error"]) == ("etfarm.report/1", None, [], None)
    dataset = document["dataset"]
    assert (dataset["total"], dataset["samples"], dataset["failed"], dataset["metrics"]) == (6, 6, [], {})
    assert sum(device["samples"] for device in dataset["devices"]) == 6
    assert dataset["samples_per_s"] == pytest.approx(6 / dataset["wall_s"])
    assert dataset["run_p50_ns"] > 0
    assert 0 < dataset["busy_share"] < 1


@pytest.mark.remedy("SAMPLES_FAILED")
def test_an_invalid_file_is_named_and_earlier_outputs_are_kept(pair: FarmProcess, tmp_path: Path) -> None:
    write(tmp_path / "in", wrong=3)
    (tmp_path / "in" / "4.npz").write_bytes(b"PK nothing")
    command = ("run", str(program("add").path), "--inputs", "in", "-o", "out", "--server", pair.address, "--json", "d.json")
    done = etfarm(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "etfarm: 3.npz: The inputs do not fit the program" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.npz", "1.npz", "2.npz"]
    assert json.loads((tmp_path / "d.json").read_text())["error"]["reason"] == "INPUT_MISMATCH"
    done = etfarm(*command, "--keep-going", cwd=tmp_path)
    assert done.returncode == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.npz", "1.npz", "2.npz", "5.npz"]
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["error"]["reason"] == "SAMPLES_FAILED"
    failed = [(one["index"], one["name"], one["error"]["reason"]) for one in document["dataset"]["failed"]]
    assert failed == [(3, "3.npz", "INPUT_MISMATCH"), (4, "4.npz", "INPUT_FILE_UNREADABLE")]
    for name in ("3.npz", "4.npz"):  # the samples are corrected
        shutil.copy(tmp_path / "in" / "2.npz", tmp_path / "in" / name)
    assert etfarm(*command, "--keep-going", cwd=tmp_path).returncode == 0


def test_ctrl_c_keeps_finished_outputs_and_releases_the_devices(pair: FarmProcess, tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", **{"0": np.zeros((200_000, 2, 3), np.float32), "1": np.zeros((200_000, 2, 3), np.float32)})  # type: ignore[arg-type]
    (tmp_path / "mine.py").write_text(
        "def f(inputs, outputs, index, labels):\n    if index == 20:\n        print('twenty', flush=True)\n    return 0\n"
    )
    command = ["run", str(program("add").path), "--inputs", "many.npz", "--batched", "-o", "out.npz", "--metric", "mine.py:f"]
    process = subprocess.Popen(
        [sys.executable, "-m", "etfarm.wire.command", *command, "--devices", "2", "--server", pair.address, "--json", "d.json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "twenty\n" in process.stderr
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Interrupted after" in errors
    assert "out.npz: " in text
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["error"]["reason"] == "INTERRUPTED"
    with np.load(tmp_path / "out.npz") as outputs:
        (key,) = outputs.files
        assert len(outputs[key]) == document["dataset"]["samples"] > 20
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # Python's, of the metric's module
    assert left == {"d.json", "many.npz", "mine.py", "out.npz"}
    assert wait_until(pair.is_idle)


def test_a_batch_yields_stacked_outputs_and_passes_labels_to_the_metric(pair: FarmProcess, tmp_path: Path) -> None:
    x = np.zeros((8, 2, 3), np.float32)
    x[:, 0, 1] = x[:, 1, 2] = 1.0
    labels = np.tile(np.array([1, 2]), (8, 1))
    labels[:2] = 0
    np.savez(tmp_path / "many.npz", **{"0": x, "1": np.zeros_like(x)}, label=labels)  # type: ignore[arg-type]
    command = ("run", str(program("add").path), "--inputs", "many.npz", "--batched", "--server", pair.address)
    refused = etfarm(*command, cwd=tmp_path)
    assert refused.returncode == 1
    assert "many.npz[0]: forward: there is no input 'label'" in refused.stderr
    np.savez(tmp_path / "wrong.npz", y=x, **{"0": x})  # type: ignore[arg-type]
    missing = etfarm(*command[:3], "wrong.npz", *command[4:], "--metric", "top1", cwd=tmp_path)
    assert "the input '1' is missing. The inputs are 0, 1. Beside them there is y." in missing.stderr
    done = etfarm(*command, "-o", "out.npz", "--metric", "top1", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dataset"]["metrics"] == {"top1": {"mean": 0.75, "count": 8}}
    with np.load(tmp_path / "out.npz") as outputs:
        (key,) = outputs.files
        np.testing.assert_array_equal(outputs[key], x)


def test_custom_and_installed_metrics_are_reported(pair: FarmProcess, tmp_path: Path) -> None:
    write(tmp_path / "in", wanted=[ONES * 2] * 6)
    own = "def far(inputs, outputs, index, labels):\n"
    own += "    y = next(iter(outputs.values()))\n    return {'far': abs(y - labels['wanted']).mean(), 'x': inputs['0'].mean()}\n"
    own += "print('imported')\ndef bad(inputs, outputs, index, labels):\n    print('called')\n    return 1 / (index - 2)\n"
    (tmp_path / "mine.py").write_text(own)
    site = tmp_path / "site"
    (site / "acme-1.0.dist-info").mkdir(parents=True)
    (site / "acme_metrics.py").write_text("def index(inputs, outputs, index, labels):\n    return index\n")
    (site / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text("[etfarm.metrics]\nacme.index = acme_metrics:index\n")
    command = ("run", str(program("add").path), "--inputs", "in", "--server", pair.address, "--json", "-")

    def run_metric(metric: str, *more: str) -> tuple[int, dict[str, Any], str]:
        done = etfarm(*command, "--metric", metric, *more, cwd=tmp_path, environment={"PYTHONPATH": str(site)})
        return done.returncode, json.loads(done.stdout)["dataset"], done.stderr

    for metric in ("mine.py:far", "mine:far"):
        code, dataset, _ = run_metric(metric)
        assert (code, dataset["metrics"]) == (0, {"far": {"mean": 11 / 6, "count": 6}, "x": {"mean": 2.5, "count": 6}})
    code, dataset, _ = run_metric("acme.index")
    assert (code, dataset["metrics"]) == (0, {"acme.index": {"mean": 2.5, "count": 6}})
    code, dataset, text = run_metric("mine.py:bad", "--keep-going")
    assert (code, [one["name"] for one in dataset["failed"]]) == (1, ["2.npz"])
    assert "2.npz: The metric bad failed with ZeroDivisionError" in text


def test_a_model_that_is_compiled_first_accepts_named_inputs(pair: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nclass Less(torch.nn.Module):\n    def forward(self, left, right):\n        return left - right\n"
        "def make():\n    return Less().eval(), (torch.rand(3), torch.rand(3))\n"
    )
    left, right = np.random.default_rng(0).random((2, 5, 3), np.float32)
    np.savez(tmp_path / "many.npz", right=right, left=left)
    done = etfarm(
        "run", "model.py:make", "--recipe", "portable", "--inputs", "many.npz", "--batched", "-o", "out.npz", "--all-devices",
        "--server", pair.address, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_allclose(next(iter(outputs.values())), left - right)
