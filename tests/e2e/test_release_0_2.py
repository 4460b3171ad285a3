"""The data folder of a farm of etfarm 0.2.0, whose server was killed, is backed up, restored and opened by this version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from etfarm.server.backup import manifest
from etfarm.server.state.revisions import HEAD
from tests.support import old_release
from tests.support.documents import known_part
from tests.support.farm import FarmProcess, etfarm

pytestmark = [
    pytest.mark.slow(reason="builds a farm of etfarm 0.2.0 and opens its data"),
    pytest.mark.skipif(
        not old_release.is_available(old_release.RELEASE_0_2), reason="needs the history of the repository: git fetch --unshallow"
    ),
]


def test_data_of_0_2_are_migrated_by_a_restore_and_their_references_are_read(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(old_release.data_folder_of_0_2(), old)
    document = json.loads((old / "document.json").read_text())
    done = etfarm("backup", "backup", "--data", str(old / "server"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert manifest.read(tmp_path / "backup").revision < HEAD
    farm = FarmProcess(tmp_path / "farm", bundle=False)
    farm.folder.mkdir()
    done = etfarm("restore", "backup", "--data", str(farm.folder / "server"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    try:
        farm.restart()
        with farm.client() as client:
            after = client.job("baseline").result().json()
            assert known_part(after["reports"], document["reports"]) == document["reports"]
            (report,) = after["reports"]
            assert report["state"] == "SUCCEEDED" and client.collect(dry_run=True).count == 0
            listed = etfarm("artifacts", "list", "--json", "-", "--server", farm.address, cwd=tmp_path)
            digests = [artifact["digest"] for artifact in json.loads(listed.stdout)["artifacts"]]
            assert digests
            refused = etfarm("artifacts", "delete", "--force", *digests, "--server", farm.address, cwd=tmp_path)
            assert refused.returncode != 0 and "is used by" in refused.stderr
            assert client.delete_job("baseline", force=True) == after["job"]["id"]
    finally:
        farm.stop()
