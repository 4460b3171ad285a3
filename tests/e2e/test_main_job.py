"""The main job, end to end, from three shells: serve, agent, bench."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from etfarm.client.submit.names_file import read_names
from etfarm.server.reports.latency.statistics import median_interval
from tests.support.farm import WAIT_FOR_NOTHING, Daemon, FarmProcess, etfarm
from tests.support.inspector import numeric_gaps_db
from tests.support.programs import program

RECIPES = ("xnnpack_fp32", "xnnpack_pt2e_int8_static_per_channel")


@pytest.mark.slow(reason="builds the runner and measures two real networks")
def test_three_processes(tmp_path: Path) -> None:
    """A server that builds its own runner, an agent, and a command; no process remains."""
    serve = Daemon(["serve", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "server")], tmp_path / "serve.log")
    serve.start()
    try:
        address = serve.expect("listening on").rpartition(" ")[2]
        agent = Daemon(
            ["agent", "--server", address, "--data", str(tmp_path / "agent"), "--name", "board", *WAIT_FOR_NOTHING],
            tmp_path / "agent.log",
        )
        agent.start()
        try:
            agent.expect("connected to")
            recipes = [word for recipe in RECIPES for word in ("--recipe", recipe)]
            options = ("--server", address, "--json", "report.json")
            # With an environment, so in a process of its own.
            done = etfarm("bench", "demo:resnet8", *recipes, *options, cwd=tmp_path, environment={})
            assert done.returncode == 0, done.stderr
            serve.expect("is ready")
            _check_document(json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail))
            assert re.search(r"p50 [\d.]+ [mµ]s \[", done.stdout), done.stdout
        finally:
            agent.signal(signal.SIGTERM)
            assert agent.process is not None
            assert agent.process.wait(timeout=60) == 0
    finally:
        serve.signal(signal.SIGTERM)
        assert serve.process is not None
        assert serve.process.wait(timeout=60) == 0


def _check_document(document: dict[str, object]) -> None:
    reports = document["reports"]
    assert isinstance(reports, list)
    assert [report["recipe"] for report in reports] == list(RECIPES)
    for report, sqnr_db in zip(reports, (100, 25), strict=True):
        assert report["state"] == "SUCCEEDED"
        assert report["device"]["name"] == "board"
        latency, measurement = report["latency"], report["measurement"]
        samples = latency["samples_ns"]
        assert len(samples) == measurement["iterations"] >= 100
        assert measurement["duration_ns"] >= 10**9
        assert latency["min_ns"] == min(samples)
        assert latency["p50_ns"] == pytest.approx(np.percentile(samples, 50))
        interval = median_interval(np.array(samples))  # None if a busy machine's samples are worth fewer than 6 independent ones
        assert latency["p50_ci95_ns"] == (interval and list(interval))
        assert report["accuracy"][0]["sqnr_db"] > sqnr_db
        assert report["memory"]["peak_rss_bytes"] > 1 << 20
        assert len(report["memory"]["planned_bytes"]) == 1 and report["memory"]["planned_bytes"][0] > 1000
        assert report["verdict"]["status"] in ("VALID", "INVALID")
        assert report["compile"]["delegation"]["forward"]["delegated_nodes"] > 20
        leaves = [row for row in report["operators"] if not any(other["parent"] == row["index"] for other in report["operators"])]
        assert sum(row["share"] for row in leaves) == pytest.approx(1)
        assert {"DELEGATE", "KERNEL", "REST"} <= {row["kind"] for row in report["operators"]}
        phases = [phase["phase"] for phase in report["timeline"]]
        assert phases.index("COMPILE") < phases.index("TIMED") < phases.index("ANALYZE")
    stages = [[stage["stage"] for stage in report["compile"]["stages"]] for report in reports]
    assert "QUANTIZE" not in stages[0] and "QUANTIZE" in stages[1]
    sizes = [report["compile"]["program"]["size_bytes"] for report in reports]
    assert sizes[1] < sizes[0] / 2


def test_a_repeated_bench_uses_the_cache(farm: FarmProcess, tmp_path: Path) -> None:
    with farm.client() as client:
        first = client.bench("demo:ds_cnn", min_time_s=0.0).result().report
        again = client.bench("demo:ds_cnn", min_time_s=0.0).result().report
    assert again.compile.cached
    assert again.compile.program.digest == first.compile.program.digest
    assert again.compile.etrecord.digest == first.compile.etrecord.digest
    assert again.inputs.digest == first.inputs.digest
    (value,) = again.inputs.tensors
    assert (value.dtype, value.shape) == ("float32", (1, 1, 49, 10))


@pytest.mark.slow(reason="a command exports and compiles a model")
def test_undelegated_operators_name_the_users_lines(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        y = torch.cumsum(x, 0)\n"
        "        return torch.sin(y)\n"
        "def factory():\n"
        "    return Mine().eval(), (torch.rand(64, 64),)\n"
    )
    arguments = ("mine.py:factory", "--recipe", "portable", "--min-time", "0", "--json", "r.json", "--server", farm.address)
    done = etfarm("bench", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["reports"][0]["operators"]
    lines = {row["source"]["line"]: row["source"] for row in rows if row["kind"] == "OPERATOR"}
    assert lines == {
        4: {"file": "mine.py", "line": 4, "code": "y = torch.cumsum(x, 0)"},
        5: {"file": "mine.py", "line": 5, "code": "return torch.sin(y)"},
    }
    assert "mine.py:4" in done.stdout


def test_run_returns_the_programs_outputs(farm: FarmProcess, tmp_path: Path) -> None:
    created = program("add")
    arrays = {str(index): np.asarray(value) for index, value in enumerate(_arrays(created.inputs))}
    np.savez(tmp_path / "in.npz", **arrays)
    done = etfarm("run", str(created.path), "--inputs", "in.npz", "-o", "out.npz", "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote out.npz, " in done.stdout.splitlines()[-1] and "float32 [" in done.stdout.splitlines()[-1]
    with np.load(tmp_path / "out.npz") as outputs:
        for got, expected in zip(outputs.values(), _arrays(created.expected), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


def _arrays(values: list[object]) -> list[np.ndarray]:
    from etfarm.wire.tensors import Tensor, to_array

    return [to_array(value) for value in values if isinstance(value, Tensor)]


@pytest.mark.slow(reason="a command exports and compiles a model")
def test_compile_writes_a_program_that_the_reference_runtime_runs(farm: FarmProcess, tmp_path: Path) -> None:
    done = etfarm(
        "compile", "demo:ds_cnn", "--recipe", "xnnpack_fp32", "-o", "x.pte", "--etrecord", "x.etrecord", "--server", farm.address,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_names(tmp_path / "x.pte") and "wrote x.inputs.json" in done.stdout
    import torch
    from executorch.runtime import Runtime

    outputs = Runtime.get().load_program(tmp_path / "x.pte").load_method("forward").execute([torch.rand(1, 1, 49, 10)])
    assert outputs[0].shape == (1, 12)
    gaps_db = numeric_gaps_db(tmp_path / "x.pte", tmp_path / "x.etrecord", [torch.rand(1, 1, 49, 10)], tmp_path)
    assert gaps_db and min(gaps_db) > 80, "ExecuTorch's Inspector runs the downloaded ETRecord's program"


@pytest.mark.slow(reason="a command exports and compiles a model")
def test_the_other_commands_list_the_farms_contents(farm: FarmProcess, tmp_path: Path) -> None:
    def say(*arguments: str) -> str:
        done = etfarm(*arguments, "--server", farm.address, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    bench = etfarm(
        "bench", str(program("conv").path), "--min-time", "0", "--name", "nightly", "--server", farm.address, cwd=tmp_path
    )
    assert bench.returncode == 0, bench.stderr
    assert "board-0" in say("devices", "list")
    shown = say("devices", "show", "board-0")
    assert "XnnpackBackend" in shown
    assert "nightly" in say("jobs", "list")
    assert "SUCCEEDED" in say("jobs", "show", "latest")
    assert say("report", "show", "latest").count("p50") >= 1
    assert "RUNNER" in say("jobs", "logs", "latest") or say("jobs", "logs", "latest")
    recipes = say("recipes", "list")
    assert "xnnpack_fp32" in recipes and "qnn_fp16" in recipes
    assert "Qualcomm" in say("recipes", "show", "qnn_fp16")
    assert "x86_64" in say("bundle", "list") or "aarch64" in say("bundle", "list")
