"""`etfarm jobs list` and `show`: the measured medians, as the server's list has them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from etfarm.client.cli.commands import jobs
from etfarm.v1 import common_pb2, device_pb2, device_pb2_grpc, job_pb2, job_pb2_grpc, report_pb2
from tests.support.fake_servers import ReadyFarm, serving_in_threads


class Jobs(job_pb2_grpc.JobServiceServicer, device_pb2_grpc.DeviceServiceServicer, ReadyFarm):
    """The server's end: the jobs that a test put there."""

    def __init__(self) -> None:
        self.known: list[job_pb2.Job] = []
        self.states: list[list[int]] = []

    def List(self, request: object, context: grpc.ServicerContext) -> object:
        if isinstance(request, device_pb2.ListDevicesRequest):
            return device_pb2.ListDevicesResponse(devices=[device_pb2.Device(id="d1", name="pi5-a")])
        assert isinstance(request, job_pb2.ListJobsRequest)
        self.states.append(list(request.states))
        start = int(request.page_token or 0)
        end = start + request.page_size
        return job_pb2.ListJobsResponse(jobs=self.known[start:end], next_page_token=str(end) if end < len(self.known) else "")

    def Get(self, request: job_pb2.GetJobRequest, context: grpc.ServicerContext) -> job_pb2.Job:
        return next(job for job in self.known if job.id == request.job_id)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    service = Jobs()
    with serving_in_threads(service) as address:
        monkeypatch.setenv("ETFARM_SERVER", address)
        yield service


def job(id_: str, *medians_ns: float | None) -> job_pb2.Job:
    """Return a finished job with a cell for each median; None is a cell that was not measured."""
    created = job_pb2.Job(id=id_, name=f"name of {id_}", owner="ann", state=job_pb2.JOB_STATE_SUCCEEDED)
    for index, p50_ns in enumerate(medians_ns):
        cell = created.cells.add(
            id=f"{id_}-{index}", index=index, candidate_name=f"net-{index}", state=common_pb2.CELL_STATE_SUCCEEDED, p50_ns=p50_ns
        )
        cell.attempts.add(device_id="d1")
        if p50_ns is not None:
            cell.p50_ci95_ns.extend([p50_ns * 0.99, p50_ns * 1.01])
            cell.verdict = report_pb2.VERDICT_STATUS_VALID
    return created


def test_a_list_shows_the_median_or_the_least_and_the_largest_of_several_cells(
    served: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    served.known = [job("one", 1.84e6), job("several", 2e6, None, 3.5e3, 4e4), job("compiled", None)]
    assert jobs.main(["list"]) == 0
    head, one, several, compiled = capsys.readouterr().out.splitlines()
    at = head.index("P50")
    assert head[at:].split() == ["P50", "OWNER", "SUBMITTED", "TOOK"]
    assert [line[at:].partition("ann")[0].strip() for line in (one, several, compiled)] == ["1.84 ms", "3.50 µs to 2.00 ms", ""]


def test_a_list_says_which_medians_cannot_be_trusted(served: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    served.known = [job("one", 1.84e6), job("all", 1.84e6), job("some", 2e6, 3.5e3, None)]
    for cell in (served.known[1].cells[0], served.known[2].cells[0]):
        cell.verdict = report_pb2.VERDICT_STATUS_INVALID
    assert jobs.main(["list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    shown = [line[head.index("P50") :].partition("ann")[0].strip() for line in lines]
    assert shown == ["1.84 ms", "1.84 ms INVALID", "3.50 µs to 2.00 ms, 1 of 2 INVALID"]


def live(id_: str, *, waits: bool) -> job_pb2.Job:
    created = job_pb2.Job(id=id_, name=f"name of {id_}", owner="ann", state=job_pb2.JOB_STATE_RUNNING)
    state = common_pb2.CELL_STATE_WAITING_FOR_DEVICE if waits else common_pb2.CELL_STATE_RUNNING
    created.cells.add(id=f"{id_}-0", candidate_name="net", state=state)
    return created


def test_the_words_of_a_list_are_those_that_it_can_be_asked_for(served: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    served.known = [live("first", waits=False), live("second", waits=True), live("third", waits=True)]
    assert jobs.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [["RUNNING", "WAITING"]["WAITING" in line] for line in lines] == ["RUNNING", "WAITING", "WAITING"]
    served.states.clear()
    for options, listed in (
        (["WAITING"], ["second", "third"]),
        (["waiting", "--limit", "1"], ["second"]),
        (["RUNNING"], ["first", "second", "third"]),
    ):
        assert jobs.main(["list", "--state", *options]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == listed
    assert served.states == [[job_pb2.JOB_STATE_RUNNING]] * 3
    served.known = [live(f"r{number}", waits=number == 60) for number in range(70)]
    assert jobs.main(["list", "--state", "WAITING", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "r60"


def test_a_job_shows_the_median_of_each_cell_with_its_interval_and_verdict(
    served: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    served.known = [job("several", 1.84e6, None)]
    assert jobs.main(["show", "several"]) == 0
    *_, head, measured, other = capsys.readouterr().out.splitlines()
    at = head.index("P50")
    assert measured[at:].startswith("1.84 ms [1.82, 1.86] VALID  pi5-a")
    assert other[at:].split() == ["pi5-a"]


def test_jobs_without_a_measurement_have_no_column_for_it(served: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    served.known = [job("compiled", None)]
    for command in (["list"], ["show", "compiled"]):
        assert jobs.main(command) == 0
        assert "P50" not in capsys.readouterr().out
