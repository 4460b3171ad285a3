"""A farm whose artifacts are in a bucket: a real job, and its report and artifacts after the server's copies are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program
from tests.support.s3 import S3Server, reach

pytestmark = pytest.mark.slow(reason="starts an S3 server, and a farm measures a job")


def test_a_job_outlives_the_copies_of_its_artifacts(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    location = s3_server.new_location()
    reach(location, monkeypatch)
    with FarmProcess(tmp_path, serve=["--blobs", location.url]) as farm:
        data = tmp_path / "server"
        copies = data / "artifacts" / "cache"
        farm.start()
        with farm.client() as client:
            job = client.bench(program("add").path, threads=[1], iterations=20, warmup=2, min_time_s=0.01)
            assert len(job.result().reports) == 1
            before = [repr(value) for value in job.outputs()]
        assert list(copies.glob("??/*"))
        assert not list((data / "artifacts" / "blobs").glob("??/*"))
        farm.stop()
        shutil.rmtree(copies)
        farm.agents.clear()
        farm.restart()
        with farm.client() as client:
            again = client.job(job.id)
            assert len(again.result().reports) == 1
            assert before and [repr(value) for value in again.outputs()] == before
        assert list(copies.glob("??/*"))
        backup, restored = tmp_path / "backup", tmp_path / "restored"
        options = ["--blobs", location.url]
        done = etfarm("backup", str(backup), "--data", str(data), *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        refused = etfarm("backup", str(backup), "--data", str(data), cwd=tmp_path)
        assert refused.returncode != 0 and "bucket" in refused.stderr
        elsewhere = s3_server.new_location()
        copied = etfarm("restore", str(backup), "--data", str(restored), "--blobs", elsewhere.url, cwd=tmp_path)
        assert copied.returncode == 0, copied.stderr
