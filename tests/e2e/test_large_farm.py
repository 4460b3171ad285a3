"""A farm on all engines at once: two servers, PostgreSQL, S3 and Ray lead jobs from the model to the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from etfarm.client import Farm
from tests.fault.engines import Engines, running_engines
from tests.support import models
from tests.support.farm import FarmProcess
from tests.support.ray_cluster import RayCluster, running_cluster

pytestmark = [
    pytest.mark.slow(reason="starts PostgreSQL, an S3 server, a Ray cluster and two servers"),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")

LEADS = "leading the farm"


@pytest.fixture
def engines() -> Iterator[Engines]:
    with running_engines() as engines:
        yield engines


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        for name, value in cluster.credentials.items():
            monkeypatch.setenv(name, value)
        cluster.start()
        yield cluster


def test_jobs_go_on_when_the_leader_is_killed(tmp_path: Path, engines: Engines, cluster: RayCluster) -> None:
    node = cluster.add_node()
    serve = [*engines.arguments, "--compile-pool", cluster.address]
    first, second = (FarmProcess(tmp_path / name, serve=serve) for name in ("first", "second"))
    measured = {"threads": [1], "iterations": 30, "warmup": 2, "min_time_s": 0.01}
    try:
        for farm in (first, second):
            farm.folder.mkdir()
            farm.restart()
            assert farm.server is not None
            if farm is first:
                farm.server.expect(LEADS)
                farm.offer_runner()
        addresses = f"{first.address},{second.address}"
        agent = first.add_agent(server=addresses)
        with Farm(addresses) as client:
            path = models.save(models.conv, tmp_path / "conv.pt2")
            job = client.bench(path, recipe="xnnpack_fp32", **measured)
            report = job.result().report
            assert report.state == "SUCCEEDED" and report.latency.p50_ns
            assert any(operator.source for operator in report.operators), "the ETRecord was joined on a node"
            assert node.actors(), "the model was compiled elsewhere"
            outputs = [numpy.asarray(value) for value in job.outputs()]

            first.kill9()
            assert second.server is not None
            second.server.expect(LEADS)
            agent.expect("connected to")
            other = client.bench(path, recipe="portable", **measured)
            assert other.result().report.state == "SUCCEEDED"
            again = client.job(job.id)
            assert again.result().report.id == report.id
            for before, after in zip(outputs, again.outputs(), strict=True):
                numpy.testing.assert_array_equal(before, numpy.asarray(after))
        first.restart()
        with first.client() as standby:
            assert {each.id for each in standby.jobs()} >= {job.id, other.id}
            assert standby.job(other.id).result().report.latency.p50_ns
        assert "Traceback" not in second.server.log.read_text()
    finally:
        for farm in (second, first):
            farm.stop()
