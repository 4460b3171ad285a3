"""The audit log: what is written, in which order, and what is counted instead."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from etfarm.server.access import audit as module
from etfarm.server.access.audit import REFUSALS_AN_HOUR, SAME_S, AuditLog, Entry
from etfarm.server.rpc.door.auditing import CHANGES, Auditor, rpc_of
from etfarm.server.rpc.door.roles import ROLES
from etfarm.server.rpc.door.token_file import LOCAL
from etfarm.server.state.engine import Database
from etfarm.v1 import job_pb2, token_pb2


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(database: Database, clock: Clock) -> AuditLog:
    return AuditLog(database, lambda: datetime.now(UTC), clock)


async def lines(log: AuditLog, most: int = 5000) -> list[tuple[int, str, str]]:
    return [(entry.number, entry.principal, entry.detail) for entry in await log.list(most, None, "", "")]


async def test_entries_are_numbered_without_gaps_over_restarts(log: AuditLog, database: Database, clock: Clock) -> None:
    for name in "abc":
        log.record(Entry("JobService.Submit", "OK", principal=name))
    await log.flush()
    again = AuditLog(database, lambda: datetime.now(UTC), clock)
    again.record(Entry("JobService.Submit", "OK", principal="d"))
    assert [(number, name) for number, name, _ in await lines(again)] == [(4, "d"), (3, "c"), (2, "b"), (1, "a")]
    assert [entry.principal for entry in await again.list(1, 4, "", "")] == ["c"]
    assert [entry.number for entry in await again.list(9, None, "b", "JobService.Submit")] == [2]


async def test_equal_refusals_are_one_entry_and_their_number(log: AuditLog, clock: Clock) -> None:
    for _ in range(1000):
        log.refuse(Entry("JobService.Get", "UNAUTHENTICATED", peer="10.0.0.7"))
    clock.now += SAME_S + 1
    log.summarize()
    assert [detail for _, _, detail in await lines(log)] == ["999 more in 61 s", ""]


async def test_a_change_that_is_made_again_and_again_is_one_entry_and_its_number(log: AuditLog, clock: Clock) -> None:
    for number in range(300):
        log.change(Entry("ReportService.Tag", "OK", principal="a", subject=str(number % 3)))
    clock.now += SAME_S + 1
    log.summarize()
    assert [detail for _, _, detail in await lines(log)] == ["99 more in 61 s"] * 3 + [""] * 3


async def test_refusals_of_an_hour_are_bounded_whatever_they_are(log: AuditLog, clock: Clock) -> None:
    for number in range(20 * REFUSALS_AN_HOUR):
        log.refuse(Entry("JobService.Get", "UNAUTHENTICATED", peer=str(number)))
    clock.now += 3601
    log.summarize()
    result = await lines(log)
    assert len(result) == REFUSALS_AN_HOUR + 1
    assert result[0][2] == f"{19 * REFUSALS_AN_HOUR} more from many callers"


async def test_entries_wait_for_a_disk_and_what_is_too_much_is_counted(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    for _ in range(5):
        log.record(Entry("JobService.Submit", "OK"))
    result = await lines(log)
    assert [number for number, _, _ in result] == [4, 3, 2, 1]
    assert result[0][2] == "2 entries: the disk was too slow"


def test_every_change_is_an_rpc_and_no_rpc_that_changes_is_forgotten() -> None:
    rpcs = {rpc_of(method) for method in ROLES if method.startswith("/etfarm.v1.")}
    assert rpcs >= CHANGES.keys()
    reads = ("Get", "Inspect", "List", "Watch", "Compare", "TailLog", "FindMissing", "GetUploadStatus", "Download")
    transfers = {"ArtifactService.Upload", "SessionService.Call", "SessionService.Generate", "AgentService.ServeSession"}
    assert {rpc for rpc in rpcs - CHANGES.keys() if not rpc.partition(".")[2].startswith(reads)} == transfers


async def test_an_entry_names_what_was_changed_and_no_secret(log: AuditLog) -> None:
    token = token_pb2.Token(id="17", principal="eve")
    auditor = Auditor(log, "/etfarm.v1.TokenService/Create", LOCAL, "10.0.0.7")
    auditor.examine(token_pb2.CreateTokenRequest(principal="eve", role=2))
    auditor.succeeded(token_pb2.CreateTokenResponse(token=token, secret="etf_secret"))
    auditor.succeeded()
    refused = Auditor(log, "/etfarm.v1.JobService/Cancel", LOCAL, "10.0.0.7")
    refused.examine(job_pb2.CancelJobRequest(job_id="j" * 5000))
    refused.failed("JOB_NOT_FOUND")
    read = Auditor(log, "/etfarm.v1.JobService/Get", LOCAL, "10.0.0.7")
    read.examine(job_pb2.GetJobRequest(job_id="j"))
    read.succeeded()
    second, first = await log.list(9, None, "", "")
    assert (first.subject, first.detail, first.principal, first.peer) == ("eve 17", "role=ROLE_USER", "local", "10.0.0.7")
    assert (second.outcome, second.subject) == ("JOB_NOT_FOUND", "j" * 100)


async def test_of_checks_of_a_job_only_the_refused_are_written(log: AuditLog) -> None:
    for reason in ("", "JOB_QUOTA"):
        auditor = Auditor(log, "/etfarm.v1.JobService/Submit", LOCAL, "10.0.0.7")
        auditor.examine(job_pb2.SubmitJobRequest(validate_only=True))
        if reason:
            auditor.failed(reason)
        else:
            auditor.succeeded(job_pb2.Job())
    assert [entry.outcome for entry in await log.list(9, None, "", "")] == ["JOB_QUOTA"]
