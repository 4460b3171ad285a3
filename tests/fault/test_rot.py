"""Bit flips in the store of a real farm: damaged files are never used, and are compiled or uploaded again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from etfarm.client.cli.commands import artifacts
from etfarm.client.models import JobState
from etfarm.v1 import job_pb2, job_pb2_grpc
from etfarm.wire import digest as digests
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import models
from tests.support.credentials import ADMIN
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="farms compile and measure around damaged files")

ACTS_AS = ADMIN


def flip(path: Path) -> None:
    """Flip one bit in the middle of a stored file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def blob(farm: FarmProcess, digest: str) -> Path:
    return farm.folder / "server" / "artifacts" / "blobs" / digest[:2] / digest


def test_damaged_models_and_programs_are_replaced_and_never_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.save(models.conv, tmp_path / "conv.pt2")
    with FarmProcess(tmp_path, bundle=False) as farm:
        farm.restart()
        with farm.client() as client:
            job = client.compile(model)
            assert job.wait() is JobState.SUCCEEDED
            program = job.result().report.compile.program

        async def get() -> job_pb2.Job:
            async with open_channel(Access.of(farm.address)) as channel:
                return await job_pb2_grpc.JobServiceStub(channel).Get(job_pb2.GetJobRequest(job_id=job.id))

        known = asyncio.run(get())
        sent = known.spec.candidates[0].model.methods["forward"].exported_program.digest
        pte = known.cells[0].program.pte.digest
        farm.stop()
        for name in (sent, pte):
            flip(blob(farm, name))
        farm.restart()
        monkeypatch.setenv("ETFARM_SERVER", farm.address)

        # Who submits without sending the model is refused, instead of getting another program.
        async def submit() -> None:
            async with open_channel(Access.of(farm.address)) as channel:
                await job_pb2_grpc.JobServiceStub(channel).Submit(
                    job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="again", spec=known.spec)
                )

        with pytest.raises(grpc.aio.AioRpcError, match="damaged where it is stored"):
            asyncio.run(submit())
        with farm.client() as client:
            again = client.compile(model)
            assert again.wait() is JobState.SUCCEEDED
            healed = again.result().report.compile
        assert not healed.cached, "the damaged program was compiled again"
        assert healed.program == program
        for name in (sent, pte):
            assert digests.of_file(blob(farm, name)) == name
        quarantine = farm.folder / "server" / "artifacts" / "quarantine"
        assert {path.name.partition(".")[0] for path in quarantine.iterdir()} == {sent, pte}

        assert artifacts.main(["verify"]) == 0
        assert "; 0 damaged" in capsys.readouterr().out
        flip(blob(farm, pte))
        assert artifacts.main(["verify"]) == 1
        out = capsys.readouterr().out
        assert f"damaged: {pte}" in out and "; 1 damaged" in out
        assert artifacts.main(["get", pte, "-o", str(tmp_path / "got.pte")]) == 1
        assert "is damaged where it is stored" in capsys.readouterr().err


def test_commands_list_upload_and_fetch_artifacts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FarmProcess(tmp_path, bundle=False) as farm:
        farm.restart()
        monkeypatch.setenv("ETFARM_SERVER", farm.address)
        file, got = tmp_path / "file", tmp_path / "got"
        file.write_bytes(b"some bytes" * 1000)
        name = digests.of_file(file)
        assert artifacts.main(["list"]) == 0
        assert "No artifacts yet" in capsys.readouterr().out
        assert artifacts.main(["put", str(file)]) == 0
        assert capsys.readouterr().out.strip() == name
        assert artifacts.main(["put", str(file)]) == 0
        assert "stored already" in capsys.readouterr().out
        assert artifacts.main(["list"]) == 0
        row = capsys.readouterr().out.splitlines()[-1]
        assert name[:12] in row and "default" in row and ADMIN in row
        assert artifacts.main(["get", name[:8], "-o", str(got)]) == 0
        assert got.read_bytes() == file.read_bytes()
        assert artifacts.main(["get", "0" * 8, "-o", str(got)]) != 0
        assert artifacts.main(["get", "zz", "-o", str(got)]) != 0
        assert artifacts.main(["collect"]) == 0
        assert "Deleted 0 artifacts" in capsys.readouterr().out
        assert artifacts.main(["delete", name[:8]]) != 0
        assert "was used 0 minutes ago" in capsys.readouterr().err
        assert artifacts.main(["delete", "--force", name[:8]]) == 0
        assert artifacts.main(["collect", "--keep", "2"]) == 2
        assert "must be a size" in capsys.readouterr().err
