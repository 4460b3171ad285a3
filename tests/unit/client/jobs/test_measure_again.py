"""Another measurement of a cell: a job of its own, which names the first one in a label."""

from __future__ import annotations

from typing import Any

from etfarm.client.jobs.job import AsyncJob
from etfarm.server.jobs.generation import check_request
from etfarm.v1 import job_pb2
from etfarm.v1.generation_pb2 import GenerationOptions


def test_another_measurement_has_a_label_instead_of_the_name() -> None:
    job = job_pb2.Job(id="j1", spec=job_pb2.JobSpec(name="nightly", labels={"branch": "main"}))
    job.spec.candidates.add(name="net")
    job.cells.add(id="c1", method="forward").attempts.add(device_id="d1")
    stubs: Any = None
    spec = AsyncJob(stubs, job)._spec_of("c1")
    assert (spec.name, dict(spec.labels)) == ("", {"branch": "main", "retry_of": "j1"})
    assert (job.spec.name, spec.devices[0].selector) == ("nightly", "id=d1")


def test_generation_keeps_its_own_methods() -> None:
    job = job_pb2.Job(id="j1")
    job.spec.measurement.generation.MergeFrom(GenerationOptions(tokens=8, decode_method="decode"))
    job.spec.candidates.add(name="net")
    job.cells.add(id="c1", method="decode").attempts.add(device_id="d1")
    stubs: Any = None
    spec = AsyncJob(stubs, job)._spec_of("c1")
    assert not spec.methods and spec.measurement.generation.decode_method == "decode"
    check_request(spec)  # by the server
