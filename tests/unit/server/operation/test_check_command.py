"""`etfarm serve --check` and the doctor's check of a configuration file."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER, claim, owner_of
from etfarm.server.artifacts.s3.errors import BlobsUnusable
from etfarm.server.checks import check_configuration
from etfarm.server.main import main
from etfarm.server.state.identity import Identity
from etfarm.wire.doctor import Status
from tests.support.s3 import S3Server, reach


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose certificate expires soon."""
    soon = datetime.now(UTC) + timedelta(days=3)
    certificate = trustme.CA().issue_cert("localhost", not_after=soon)
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    path = tmp_path / "farm.toml"
    path.write_text('listen = "127.0.0.1:0"\ndata = "data"\ntls-cert = "cert.pem"\ntls-key = "key.pem"\nmetrics = "0.0.0.0:0"\n')
    return path


def problem_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """Return the only problem of a check with options."""
    assert main([*options, "--check", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    return problem


def test_each_value_is_shown_with_its_source_and_warnings_do_not_prevent_the_start(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "--check", "--json", "--workers", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"], document["problems"]) == ("etfarm.serve_check/1", True, [])
    settings = {each["name"]: (each["value"], each["source"]) for each in document["settings"]}
    assert settings["workers"] == (2, "--workers")
    assert settings["tls-cert"] == (str(config.parent / "cert.pem"), "farm.toml, line 3")
    assert settings["metrics"] == ("0.0.0.0:0", "farm.toml, line 5")
    assert settings["patience"] == (60.0, "default")
    assert {"network", "seccomp"} <= {each["name"] for each in document["jail"]}
    assert len(document["warnings"]) >= 2
    assert any("expires soon" in text for text in document["warnings"])
    assert any("can read the metrics" in text for text in document["warnings"])
    assert not (config.parent / "data").exists()


def test_problems_are_listed_and_the_exit_code_is_1(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "tokens").write_text("not a token\n")
    (config.parent / "tokens").chmod(0o644)  # whatever the umask, which commands change
    config.write_text(config.read_text() + 'tokens = "tokens"\n')
    assert main(["--config", str(config), "--check", "--listen", "0.0.0.0:0", "--tls-key", str(config)]) == 1
    output = capsys.readouterr().out
    assert f"problem: {config} holds no private key (PEM)." in output
    assert f"problem: The file {config.parent / 'tokens'} has a secret, and other users may read or change it." in output
    assert output.endswith("the server would not start\n")
    assert main(["--check", "--quota", "nothing=1"]) == 1
    assert "problem: 'nothing=1' does not set a quota." in capsys.readouterr().out


def test_a_database_that_cannot_be_reached_is_the_only_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    database = f"postgresql://farm:secret@127.0.0.1:{port}/farm"
    options = ["--listen", "0.0.0.0:0", "--insecure", "--advertise", "farm.example:1", "--data", str(tmp_path)]
    assert main([*options, "--database", database, "--database-wait", "1", "--check", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [problem["reason"] for problem in document["problems"]] == ["DATABASE_UNAVAILABLE"]
    assert {"name": "tokens", "text": "unknown, as the database cannot be used"} in document["facts"]


@pytest.mark.remedy("BLOBS_UNUSABLE")
def test_the_folder_of_another_farm_is_a_problem(
    tmp_path: Path, s3_server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = s3_server.new_location()
    another = Identity("another", datetime.now(UTC))
    asyncio.run(claim(Bucket(location), another))
    reach(location, monkeypatch)
    options = ["--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"), "--blobs", location.url]
    problem = problem_of(capsys, *options)
    assert problem["reason"] == "BLOBS_UNUSABLE"
    with pytest.raises(BlobsUnusable) as refused:
        main(options)
    assert refused.value.message == problem["message"]
    assert asyncio.run(owner_of(Bucket(location))) == another
    asyncio.run(Bucket(location).delete(OWNER))
    assert main([*options, "--check"]) == 0
    assert asyncio.run(owner_of(Bucket(location))) is None, "a check claims nothing"


def test_artifacts_that_are_elsewhere_are_a_problem(
    tmp_path: Path, s3_server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = s3_server.new_location()
    reach(location, monkeypatch)
    local = ["--listen", "127.0.0.1:0", "--data", str(tmp_path)]
    there = [*local, "--blobs", location.url]
    file, copies = tmp_path / "artifacts" / "blobs" / "ab" / f"ab{'0' * 62}", tmp_path / "artifacts" / "cache"
    for folder, options, others in ((file, [*there, "--begin-empty"], local), (copies, local, there)):
        folder.mkdir(parents=True)
        problem = problem_of(capsys, *options)
        with pytest.raises(BlobsUnusable) as refused:
            main(options)
        assert (refused.value.message, refused.value.remedy) == (problem["message"], problem["remedy"])
        assert main([*others, "--begin-empty", "--check"]) == 0, "the remedy: the other place"
        capsys.readouterr()
        shutil.rmtree(tmp_path / "artifacts")


def test_a_misspelled_bucket_is_not_created(
    tmp_path: Path, s3_server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = s3_server.owners_location("etfarm-tets")
    reach(location, monkeypatch)
    for _ in range(2):
        problem = problem_of(capsys, "--listen", "127.0.0.1:0", "--data", str(tmp_path), "--blobs", location.url)
        assert "there is no bucket 'etfarm-tets'" in problem["message"]


def test_the_doctor_checks_the_file_of_the_environment(config: Path) -> None:
    assert list(check_configuration({})) == []
    (config.parent / "data").mkdir()
    variables = {"ETFARM_SERVE_CONFIG": str(config)}
    findings = {finding.name: finding for finding in check_configuration(variables)}
    assert set(findings) == {"server configuration", "server certificate", "server disk"}
    assert findings["server configuration"].status is Status.OK
    assert findings["server certificate"].status is Status.WARNING
    config.write_text("worker = 2\n")
    (finding,) = check_configuration(variables)
    assert finding.status is Status.WARNING and "there is no setting 'worker'" in finding.detail
    assert finding.remedy == "Did you mean 'workers'?"
