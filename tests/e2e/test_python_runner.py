"""A farm without a compiler: no runner bundle anywhere, and devices that have torch and ExecuTorch themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from etfarm.client import Farm
from etfarm.client.models import DeviceState
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.v1 import common_pb2
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import arrays, close, runner_archive

pytestmark = [
    pytest.mark.skipif(not PythonRunner.available(), reason="torch and executorch are not installed"),
    pytest.mark.slow(reason="every run of the Python runner loads torch"),
]


@pytest.fixture(scope="module")
def bundleless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("bundleless"), bundle=False) as running:
        yield running.start()


@pytest.fixture
def client(bundleless: FarmProcess) -> Iterator[Farm]:
    with bundleless.client() as client:
        yield client


def test_a_measurement_on_the_python_binding_is_reported_as_such(client: Farm) -> None:
    report = client.bench(program("conv").path, iterations=20, min_time_s=0.0).result().report
    assert report["runner"]["kind"] == "python"
    assert report["runner"]["bundle_digest"] is None
    assert report["runner"]["executorch"] == "1.5.1"
    assert len(report["latency"]["samples_ns"]) >= 20
    assert report["operators"]
    assert report["memory"]["peak_rss_bytes"] is None, "Python's and torch's, not the program's"
    assert sum(report["memory"]["planned_bytes"]) > 0


def test_a_run_returns_torchs_outputs(client: Farm) -> None:
    created = program("conv")
    values = {str(index): array for index, array in enumerate(arrays(created.inputs))}
    job = client.run(created.path, inputs=values)
    assert job.result().report["runner"]["kind"] == "python"
    assert close(job.outputs(), created.expected)


def test_the_python_binding_serves_a_session(client: Farm) -> None:
    created = program("conv")
    with client.session(created.path) as session:
        assert session._async._calls.ready.runner.kind == common_pb2.RUNNER_KIND_PYTHON
        np.testing.assert_allclose(
            session.run("forward", *arrays(created.inputs))[0], arrays(created.expected)[0], rtol=1e-4, atol=1e-5
        )


def test_devices_show_names_the_python_binding(bundleless: FarmProcess, tmp_path: Path) -> None:
    shown = etfarm("devices", "show", "board-0", "--server", bundleless.address, cwd=tmp_path)
    assert "python, its own" in shown.stdout, shown.stdout + shown.stderr
    listed = etfarm("devices", "list", "--server", bundleless.address, cwd=tmp_path)
    assert "board-0: its runner is python, its own" in listed.stdout, listed.stdout + listed.stderr


@pytest.fixture
def own_farm(tmp_path: Path) -> Iterator[FarmProcess]:
    """A farm of the test's own without a bundle, not yet started."""
    with FarmProcess(tmp_path, bundle=False) as running:
        yield running


def test_an_added_bundle_is_used_for_later_jobs(own_farm: FarmProcess) -> None:
    own_farm.start()
    with own_farm.client() as client:
        assert client.device("board-0").runner == "python"
        client.add_bundle(runner_archive())
        assert client.device("board-0").runner == "native"
        assert client.run(program("add").path).result().report["runner"]["kind"] == "native"


def test_a_device_without_bundle_and_binding_is_refused_with_the_remedy(own_farm: FarmProcess) -> None:
    own_farm.start(agents=0)
    own_farm.add_agent(bare=True)
    with own_farm.client() as client:
        device = client.device("board-0")
        assert device.state is DeviceState.UNUSABLE and "etfarm bundle build" in str(device.problem)
        with pytest.raises(EtfarmError) as early:
            client.run(program("add").path)
        assert early.value.reason == "BUNDLE_MISSING" and "etfarm bundle build" in early.value.remedy
        with refuses("BUNDLE_MISSING", match="no runner bundle"), client.session(program("add").path):
            pass
