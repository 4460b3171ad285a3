"""A farm that has measured is moved to PostgreSQL and S3, backed up there, and moved back, with all of its reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client import Farm
from tests.support.databases import PostgresDatabases
from tests.support.farm import START_S, FarmProcess, etfarm
from tests.support.programs import program
from tests.support.s3 import S3Server, reach

pytestmark = pytest.mark.slow(reason="starts databases and farms that measure jobs, and moves them")

SHORT = {"threads": [1], "iterations": 20, "warmup": 2, "min_time_s": 0.0}


def measure(client: Farm) -> None:
    assert len(client.bench(program("add").path, **SHORT).result().reports) == 1  # type: ignore[arg-type]


def shown(client: Farm) -> dict[str, tuple[object, list[str]]]:
    """Return the reports and the outputs of all jobs."""
    jobs = [client.job(job.id) for job in client.jobs(500)]
    return {job.id: (job.result().json()["reports"], [repr(value) for value in job.outputs()]) for job in jobs}


def test_a_farm_is_moved_out_and_back_with_its_reports(
    tmp_path: Path, postgres_databases: PostgresDatabases, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, location = postgres_databases.server, s3_server.new_location()
    reach(location, monkeypatch)
    for name in ("moved", "restored"):
        server.execute("CREATE DATABASE {}", name)
    folder, data = tmp_path / "farm", tmp_path / "farm" / "server"
    folder.mkdir()
    there = ["--database", server.url("moved"), "--blobs", location.url]
    out = ["migrate", "--data", str(data), "--to-database", server.url("moved"), "--to-blobs", location.url]
    back = ["migrate", "--data", str(data), *there, "--to-database", "sqlite", "--to-blobs", "files"]

    with FarmProcess(folder) as farm:
        farm.start()
        with farm.client() as client:
            measure(client)
            before = shown(client)
        refused = etfarm(*out, cwd=tmp_path)
        assert refused.returncode != 0 and "Another server" in refused.stderr
    done = etfarm(*out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'database = "{server.url("moved")}"' in done.stdout and f'blobs = "{location.url}"' in done.stdout
    refused = etfarm("serve", "--listen", "127.0.0.1:0", "--data", str(data), "--no-bundle", "--exit-with-stdin", cwd=tmp_path)
    assert refused.returncode != 0 and "was moved to a PostgreSQL database" in refused.stderr

    with FarmProcess(folder, bundle=False, serve=there) as scaled:
        scaled.address = farm.address
        scaled.start()
        with scaled.client() as client:
            assert shown(client) == before
            measure(client)
            after = shown(client)
            assert len(after) == 2
            refused = etfarm(*back, cwd=tmp_path)
            assert refused.returncode != 0 and "Another server" in refused.stderr
            backup = etfarm("backup", str(tmp_path / "backup"), "--data", str(data), *there, cwd=tmp_path)
            assert backup.returncode == 0, backup.stderr
            damaged = etfarm("artifacts", "verify", "--server", scaled.address, cwd=tmp_path)
            assert damaged.returncode == 0 and "0 damaged" in damaged.stdout
    done = etfarm(*back, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "remove database" in done.stdout and "remove blobs" in done.stdout

    with FarmProcess(folder, bundle=False) as home:
        home.address = farm.address
        home.start()
        with home.client() as client:
            assert shown(client) == after
            measure(client)
    with FarmProcess(tmp_path / "former", bundle=False, serve=there) as former:
        former.folder.mkdir()
        former.restart()
        assert former.server is not None and former.server.process is not None
        assert former.server.process.wait(START_S) == 1, "it ends as soon as it leads"
        assert f"was moved to {data}" in former.server.log.read_text()

    elsewhere = s3_server.new_location()
    places = {"files": [], "s3": ["--database", server.url("restored"), "--blobs", elsewhere.url]}
    for name, options in places.items():
        with FarmProcess(tmp_path / name, bundle=False, serve=options) as restored:
            restored.folder.mkdir()
            done = etfarm("restore", str(tmp_path / "backup"), "--data", str(restored.folder / "server"), *options, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            restored.restart()
            if options:
                assert restored.server is not None
                restored.server.expect("leading the farm")
            with restored.client() as client:
                assert shown(client) == after, name
