"""The default time limit of an attempt."""

from __future__ import annotations

from etfarm.server.jobs.cells.dispatch import deadline_s
from etfarm.v1 import job_pb2


def test_the_default_limit_grows_with_the_runs_and_the_candidates() -> None:
    job = job_pb2.Job()
    assert (deadline_s(job, 1), deadline_s(job, 3)) == (600, 1800)
    job.spec.measurement.repeat = 5
    assert deadline_s(job, 1) == 600 + 4 * 120
    job.spec.measurement.min_time_s = 300
    assert deadline_s(job, 1) == 600 + 4 * (80 + 60), "without a limit a timed pass ends after 60 s"
    job.spec.measurement.max_time_s = 300
    assert deadline_s(job, 1) == 600 + 4 * (80 + 300)
    job.spec.measurement.min_time_s = job.spec.measurement.max_time_s = 1e7
    assert deadline_s(job, 1) == 600 + 86_400, "a program that hangs occupies its device for a day at most"
    job.spec.timeout_s = 30
    assert deadline_s(job, 1) == 30
