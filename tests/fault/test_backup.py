"""A farm is backed up while jobs run, killed and restored elsewhere: every job that had ended has its report and its files."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client import EtfarmError, Farm
from etfarm.client.models import JobState
from etfarm.server.backup import manifest as manifests
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.backup.restore import restore
from tests.support.credentials import ADMIN
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="runs jobs on a farm, backs it up, kills it and restores it")

ACTS_AS = ADMIN

SHORT = {"iterations": 20, "warmup": 1, "min_time_s": 0.0}


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("farm")) as running:
        yield running.start()


def documents(client: Farm) -> dict[str, object]:
    """Return the reports of the jobs that have ended, by job."""
    return {job.id: client.job(job.id).result().json()["reports"] for job in client.jobs(500) if job.state.is_terminal}


class Load:
    """Jobs that are submitted one after the other, in a thread."""

    def __init__(self, address: str) -> None:
        self.ended: list[str] = []
        self.failures: list[Exception] = []
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._submit)

    def _submit(self) -> None:
        try:
            with Farm(self._address) as client:
                while not self._stop.is_set():
                    job = client.bench(program("add").path, **SHORT)  # type: ignore[arg-type]
                    assert job.wait() is JobState.SUCCEEDED
                    self.ended.append(job.id)
        except Exception as error:  # noqa: BLE001 - the test reports it
            self.failures.append(error)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self.failures, self.failures


def test_a_farm_under_load_is_backed_up_killed_and_restored(farm: FarmProcess, tmp_path: Path) -> None:
    data, folder = farm.folder / "server", tmp_path / "backup"
    with farm.client() as client, Load(farm.address) as load:
        while len(load.ended) < 3:
            assert not load.failures, load.failures
        first = etfarm("backup", str(folder), "--data", str(data), cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        before = documents(client)
        again = etfarm("backup", str(folder), "--data", str(data), cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert len(before) >= 3
    copied = [int(done.stdout.rpartition(" of them new")[0].rpartition(" ")[2]) for done in (first, again)]
    assert copied[0] > copied[1], "the second one copies only what is new"
    manifest = manifests.read(folder)
    assert not manifest.missing and len(list(folder.glob("farm-*.sqlite"))) == 1
    assert {folder.stat().st_mode & 0o777, (folder / manifest.database).stat().st_mode & 0o777} == {0o700, 0o600}

    farm.kill9()
    with FarmProcess(tmp_path / "elsewhere", bundle=False) as elsewhere:
        elsewhere.folder.mkdir()
        done = etfarm("restore", str(folder), "--data", str(elsewhere.folder / "server"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        elsewhere.restart()
        with elsewhere.client() as client:
            after = documents(client)
            assert {job: after.get(job) for job in before} == before
            damaged = etfarm("artifacts", "verify", "--server", elsewhere.address, cwd=tmp_path)
            assert damaged.returncode == 0 and "0 damaged" in damaged.stdout
    farm.restart()


def test_deleted_jobs_leave_the_history_and_their_files_are_collected(farm: FarmProcess, tmp_path: Path) -> None:
    server = ("--server", farm.address)
    with farm.client() as client:
        doomed, kept, live = (client.bench(program(name).path, **SHORT) for name in ("conv", "batch", "conv"))  # type: ignore[arg-type]
        assert [job.wait() for job in (doomed, kept)] == [JobState.SUCCEEDED] * 2 and live.wait() is JobState.SUCCEEDED
        client.tag(kept.id, "kept")
        known = doomed.result().report.model
        assert known is not None
        model = known.name
        count = len(client.history(model))
        done = etfarm("jobs", "delete", "kept", *server, cwd=tmp_path)
        assert done.returncode != 0 and "has the tags kept" in done.stderr and "--force" in done.stderr
        done = etfarm("jobs", "delete", doomed.id, *server, cwd=tmp_path)
        assert done.returncode == 0 and doomed.id in done.stdout, done.stderr
        with pytest.raises(EtfarmError, match="There is no job"):
            client.job(doomed.id)
        assert len(client.history(model)) == count - 1
        planned = client.collect(dry_run=True)
        assert planned.count == 0, "the lease of an hour protects recent files"
        document = etfarm("artifacts", "collect", "--keep", "0MiB", "--dry-run", "--json", "-", *server, cwd=tmp_path)
        assert json.loads(document.stdout)["collected"]["count"] == 0
        digest = next(artifact for artifact in _artifacts(farm) if artifact)
        refused = etfarm("artifacts", "delete", digest, *server, cwd=tmp_path)
        assert refused.returncode != 0 and ("is used by" in refused.stderr or "minutes ago" in refused.stderr)
        shown = etfarm("retention", "--dry-run", "--keep", "jobs=1h", "--keep", "artifacts=1d,1GiB", *server, cwd=tmp_path)
        assert shown.returncode == 0 and "1d,1GiB" in shown.stdout and "forever" in shown.stdout, shown.stderr
        assert kept.result().report.state == "SUCCEEDED"


def _artifacts(farm: FarmProcess) -> list[str]:
    connection = sqlite3.connect(f"file:{farm.folder}/server/farm.sqlite?mode=ro", uri=True)
    try:
        return [row[0] for row in connection.execute("SELECT digest FROM holdings WHERE holder = 'default'")]
    finally:
        connection.close()


@pytest.fixture
def backup(farm: FarmProcess, tmp_path: Path) -> Path:
    back_up(farm.folder / "server", tmp_path / "backup", link=True)
    return tmp_path / "backup"


def test_an_interrupted_restore_keeps_servers_out_and_continues(backup: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    blobs = sorted((backup / "artifacts").rglob("??/*"))
    moved = tmp_path / "moved"
    blobs[-1].rename(moved)
    with pytest.raises(BackupDamaged, match="is missing"):
        restore(backup, data)
    done = etfarm("serve", "--listen", "127.0.0.1:0", "--data", str(data), "--no-bundle", "--exit-with-stdin", cwd=tmp_path)
    assert done.returncode != 0 and "interrupted" in done.stderr and "etfarm restore" in done.stderr
    first = data / blobs[0].relative_to(backup)
    inode = first.stat().st_ino
    moved.rename(blobs[-1])
    restore(backup, data)
    assert first.stat().st_ino == inode, "what was restored before stays"
    with refuses("BACKUP_REFUSED", match="not empty"):
        restore(backup, data)


def test_a_damaged_file_of_a_backup_is_noticed(backup: Path, tmp_path: Path) -> None:
    blob = sorted((backup / "artifacts").rglob("??/*"))[0]
    damaged = bytearray(blob.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    blob.unlink()  # a link to the farm's own file
    blob.write_bytes(damaged)
    with pytest.raises(BackupDamaged, match=blob.name[:12]):
        restore(backup, tmp_path / "data")
    database = backup / manifests.read(backup).database
    with database.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 64)
    with pytest.raises(BackupDamaged, match="other contents"):
        restore(backup, tmp_path / "other")


def test_a_backup_of_a_newer_etfarm_is_refused_and_an_incomplete_one_too(backup: Path, tmp_path: Path) -> None:
    path = backup / manifests.NAME
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"version": "9.0.0", "revision": "9999"}))
    with refuses("BACKUP_REFUSED", match=r"etfarm 9\.0\.0.*Install|etfarm 9\.0\.0"):
        restore(backup, tmp_path / "data")
    path.unlink()
    done = etfarm("restore", str(backup), "--data", str(tmp_path / "data"), cwd=tmp_path)
    assert done.returncode == 2 and "no complete backup" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_damaged_database_is_not_backed_up_over_a_good_backup(farm: FarmProcess, backup: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = sqlite3.connect(farm.folder / "server" / "farm.sqlite")
    source.execute("VACUUM INTO ?", [str(data / "farm.sqlite")])
    source.close()
    before = (backup / manifests.NAME).read_bytes()
    size = (data / "farm.sqlite").stat().st_size
    os.truncate(data / "farm.sqlite", size // 2 // 4096 * 4096)
    done = etfarm("backup", str(backup), "--data", str(data), cwd=tmp_path)
    assert done.returncode == 1 and "is damaged" in done.stderr, done.stderr
    assert (backup / manifests.NAME).read_bytes() == before
    restore(backup, tmp_path / "restored")
    shutil.rmtree(tmp_path / "restored")
