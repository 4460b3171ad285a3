"""Small cases of the server's errors, and what their remedies say to do instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etfarm.server.cluster.forwarding import Forwarding
from etfarm.server.cluster.leadership import Leader
from etfarm.server.config import Config
from etfarm.server.notices import addresses
from etfarm.server.operation.check import Result, _check_folder
from etfarm.server.rpc.door.token_file import read_tokens
from etfarm.server.rpc.services import reports as report_service
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import locked
from etfarm.server.state.paging import page_of
from etfarm.v1 import job_pb2, report_pb2
from tests.support.refusals import refuses


@pytest.mark.remedy("DATA_FOLDER_IN_USE")
def test_a_data_folder_is_used_once_the_other_server_has_stopped(tmp_path: Path) -> None:
    with locked(tmp_path / "data"):
        with refuses("DATA_FOLDER_IN_USE"), locked(tmp_path / "data"):
            pass
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "data"):
        pass


@pytest.mark.remedy("DATA_FOLDER_UNUSABLE")
def test_another_data_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong, right = Result([]), Result([])
    _check_folder(wrong, Config(data=tmp_path / "file" / "data"))
    assert [problem.reason for problem in wrong.problems] == ["DATA_FOLDER_UNUSABLE"]
    _check_folder(right, Config(data=tmp_path / "data"))
    assert not right.problems


@pytest.mark.remedy("COMPARISON_TOO_LARGE")
def test_a_comparison_of_one_report_each_fits_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [report_pb2.Report(id=f"r{number}", cell=f"c{number}", recipe=f"x{number}") for number in range(9)]
    job = job_pb2.Job(id="j", state=job_pb2.JOB_STATE_SUCCEEDED)
    one = report_service._answer((job, reports, "0"), (job, reports, "0"))
    monkeypatch.setattr(report_service, "MAX_BYTES", one.comparison.ByteSize())
    with refuses("COMPARISON_TOO_LARGE", match="JOB#0"):
        report_service._answer((job, reports, None), (job, reports, None))
    assert len(report_service._answer((job, reports, "1"), (job, reports, "1")).comparison.pairs) == 1


@pytest.mark.remedy("BAD_METADATA")
def test_binary_metadata_are_forwarded_under_a_name_for_them() -> None:
    forwarding = Forwarding(cast(Any, None), cast(Any, None))
    leader = Leader(1, "farm:1", "1", "", "secret")

    def sent(*metadata: tuple[str, str | bytes]) -> Any:
        context = SimpleNamespace(invocation_metadata=lambda: metadata, peer=lambda: "ipv4:127.0.0.1:1")
        return forwarding._metadata(cast(Any, context), leader)

    with refuses("BAD_METADATA"):
        sent(("note", "\x01é"))
    assert ("note-bin", b"\x01") in sent(("note-bin", b"\x01"))


@pytest.mark.remedy("BAD_PAGE_TOKEN", "BAD_DATABASE_URL", "BAD_TOKEN_FILE", "BAD_WEBHOOK")
def test_what_is_written_as_the_remedy_says_is_taken(tmp_path: Path) -> None:
    with refuses("BAD_PAGE_TOKEN"):
        page_of([1], 1, "x")
    assert page_of([1], 1, "")[0] == [1]
    with refuses("BAD_DATABASE_URL"):
        DatabaseUrl.parse("mysql://ann@host/farm")
    DatabaseUrl.parse("postgresql://ann@host/farm")
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text("ann root of-ann-0123456789-0123456789\n")
    with refuses("BAD_TOKEN_FILE"):
        read_tokens(file)
    file.write_text("ann admin of-ann-0123456789-0123456789\n")
    read_tokens(file)
    with refuses("BAD_WEBHOOK"):
        addresses.parse("ftp://127.0.0.1/notices")
    assert addresses.parse("http://127.0.0.1/notices").path == "/notices"
