"""`etfarm doctor` on this machine: with a farm of its own, with a server, and without a compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="starts a server and a real compile process")


def _findings(cwd: Path, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = etfarm("doctor", "--json", cwd=cwd, environment={"ETFARM_DATA": str(cwd / "data"), **environment})
    document = json.loads(result.stdout)
    assert document["usable"] is (result.returncode == 0), result.stderr
    return result.returncode, {finding["name"]: finding for finding in document["findings"]}


def test_without_a_compiler_the_main_job_works_and_the_remedy_is_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    code, findings = _findings(tmp_path, PATH=str(programs))
    assert code == 0
    assert {"compile jail", "runner jail", "server", "data folder"} <= findings.keys()
    missing = [finding for name, finding in findings.items() if name.startswith("compiler") and finding["status"] == "WARNING"]
    assert len(missing) == 1
    assert "apt-get install g++" in missing[0]["remedy"]
    assert not (tmp_path / "data").exists(), "a check changes nothing"


def test_a_server_that_answers_is_described_and_one_that_does_not_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    folder.mkdir()
    with FarmProcess(folder, bundle=False) as farm:
        code, findings = _findings(tmp_path, ETFARM_SERVER=farm.start().address)
        assert (code, findings["server"]["status"]) == (0, "OK")
        assert "admin" in findings["server"]["detail"]
        address = farm.address
    code, findings = _findings(tmp_path, ETFARM_SERVER=address)
    assert (code, findings["server"]["status"]) == (1, "MISSING")
