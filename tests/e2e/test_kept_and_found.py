"""Stored results of a farm: tags of jobs, a history over jobs, operators by view, and reports analyzed again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from etfarm.client.models import JobResult
from etfarm.v1 import job_pb2, job_pb2_grpc, report_pb2, report_service_pb2_grpc
from etfarm.wire import tensors, views
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from etfarm.wire.words import number_of
from tests.support.farm import FarmProcess, descendants, etfarm, wait_until
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="a farm measures several jobs, and commands read them")

QUICK: dict[str, Any] = {"iterations": 20, "warmup": 2, "min_time_s": 0.01}


class Kept:
    """A farm with jobs in it: of `conv` twice, then of `add` with two thread counts."""

    def __init__(self, farm: FarmProcess) -> None:
        self.farm = farm
        with farm.client() as client:
            self.conv = [client.bench(program("conv").path, threads=[1], **QUICK).result() for _ in range(2)]
            self.add = client.bench(program("add").path, threads=[1, 2], name="adding", **QUICK).result()

    def blob(self, digest: str) -> Path:
        """Return the path of a stored file."""
        return self.farm.folder / "server" / "artifacts" / "blobs" / digest[:2] / digest


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with FarmProcess(tmp_path_factory.mktemp("kept"), serve=["--analysis-timeout", "10"]) as farm:
        farm.start()
        yield Kept(farm)


def ask(farm: FarmProcess, rpc: str, request: Any, service: Any = report_service_pb2_grpc.ReportServiceStub) -> Any:
    """Return the answer of an rpc, of ReportService by default."""

    async def call() -> Any:
        async with open_channel(Access(farm.address)) as channel:
            try:
                return await getattr(service(channel), rpc)(request)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, server=farm.address) from None

    return asyncio.run(call())


def raw(farm: FarmProcess, result: JobResult) -> Any:
    """Return a job's reports as messages, with fields that the JSON lacks."""
    return ask(farm, "Get", report_pb2.GetReportsRequest(job_id=result.job.id)).reports


def model_of(result: JobResult) -> str:
    return str(result.reports[0].model.digest)


def test_a_tag_is_accepted_in_place_of_a_job_id_and_can_move(kept: Kept, tmp_path: Path) -> None:
    first, second = (result.job.id for result in kept.conv)
    with kept.farm.client() as client:
        assert client.tag(first[:6], "baseline") is None
        assert client.job("baseline").id == first
        assert [job.tags for job in client.jobs() if job.id == first] == [("baseline",)]
        assert client.tag(second, "baseline") == first
        assert client.job("baseline").info.tags == ("baseline",)
        assert client.tag("latest", "v1.0_adding-2") is None
        assert client.job("v1.0_adding-2").id == kept.add.job.id
    listed = etfarm("jobs", "list", "--server", kept.farm.address, cwd=tmp_path).stdout
    assert any(second in line and "baseline" in line for line in listed.splitlines())
    shown = etfarm("report", "show", "baseline", "--json", "r.json", "--server", kept.farm.address, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads((tmp_path / "r.json").read_text())["job"]["id"] == second
    with kept.farm.client() as client:
        assert client.untag("baseline") == second
        with pytest.raises(EtfarmError, match="no job 'baseline'"):
            client.job("baseline")


def test_a_full_id_precedes_a_tag_and_a_tag_precedes_an_id_prefix(kept: Kept) -> None:
    first, second = (result.job.id for result in kept.conv)
    with kept.farm.client() as client:
        client.tag(second, first[:6])
        assert client.job(first[:6]).id == second
        assert client.job(first).id == first
        client.untag(first[:6])
        assert client.job(first[:6]).id == first


@pytest.mark.parametrize("tag", ["", "a b", "-x", "x" * 65, "latest", "0123456789abcdef", "größe", "a/b"])
def test_an_invalid_job_name_is_refused(kept: Kept, tag: str) -> None:
    with kept.farm.client() as client, pytest.raises(EtfarmError) as refused:
        client.tag("latest", tag)
    assert refused.value.reason == "BAD_TAG" and refused.value.remedy


def test_commands_add_and_remove_a_tag(kept: Kept, tmp_path: Path) -> None:
    def tag(*arguments: str) -> tuple[int, str]:
        done = etfarm("report", "tag", *arguments, "--server", kept.farm.address, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    first, second = (result.job.id for result in kept.conv)
    assert tag(first, "spoken") == (0, f"Job {first} is spoken.\n")
    assert tag(second, "spoken") == (0, f"Job {second} is spoken; before it was job {first}.\n")
    assert tag("spoken", "--remove") == (0, f"Job {second} is no longer spoken.\n")
    code, text = tag("spoken", "--remove")
    assert code == 2 and "No job has the tag 'spoken'" in text
    assert tag(first)[0] == 2


def test_a_models_history_lists_slim_reports_newest_first(kept: Kept) -> None:
    with kept.farm.client() as client:
        client.tag(kept.conv[0].job.id, "old")
        actual = client.history(model_of(kept.conv[0])[:12])
        client.untag("old")
    assert [entry.job for entry in actual] == [result.job.id for result in reversed(kept.conv)]
    assert [entry.tags for entry in actual] == [(), ("old",)]
    assert actual[0].at > actual[1].at
    for entry, result in zip(actual, reversed(kept.conv), strict=True):
        whole = result.reports[0].json()
        slim = entry.report.json()
        assert slim["latency"] == {**whole["latency"], "samples_ns": []}
        assert whole["operators"] and slim["operators"] is None
        assert slim["telemetry"] == {**whole["telemetry"], "series": []}
        assert slim["runs"] == [{**run, "telemetry": None} for run in whole["runs"]]
        shortened = dict.fromkeys(("latency", "operators", "telemetry", "profile", "runs"))
        assert {**slim, **shortened} == {**whole, **shortened}


def test_a_history_is_filtered_by_device_recipe_method_and_threads(kept: Kept) -> None:
    name = kept.add.reports[0].model.name
    with kept.farm.client() as client:

        def count(**narrowed: Any) -> int:
            return len(client.history(name, **narrowed))

        everything = count()
        assert everything >= 4
        assert count(threads=2) == 1 and count(threads=7) == 0
        assert count(device="name=board-0") == everything and count(device="name=another") == 0
        assert count(device="emulated=true") == 0
        assert count(recipe="portable") == 0, "a ready program has no recipe"
        assert count(method="forward") == everything and count(method="encode") == 0
        assert count(limit=3) == 3
        with pytest.raises(EtfarmError, match="'core'"):
            client.history(name, device="core=1")
        with pytest.raises(EtfarmError, match=f"There are reports of: .*{name}") as unknown:
            client.history("nobody's")
    assert unknown.value.reason == "NO_HISTORY"


def test_the_history_command_prints_text_and_json(kept: Kept, tmp_path: Path) -> None:
    name = kept.add.reports[0].model.name
    done = etfarm("history", name, "--threads", "1", "--json", "h.json", "--server", kept.farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    series = json.loads((tmp_path / "h.json").read_text(), parse_constant=pytest.fail)["series"]
    assert {one["threads"] for one in series} == {1}
    points = [point for one in series for point in one["points"]]
    assert points and all(point["report"]["threads"] == 1 and point["p50_ns"] > 0 for point in points)
    for point in points:
        assert point["job"][:8] in done.stdout and point["verdict"] in done.stdout
    by_file = etfarm("history", f"gone/{name}.pte", "--threads", "1", "--server", kept.farm.address, cwd=tmp_path)
    assert (by_file.returncode, by_file.stdout) == (0, done.stdout), "a model as `bench` takes it"
    missing = etfarm("history", "nobody", "--json", "n.json", "--server", kept.farm.address, cwd=tmp_path)
    assert missing.returncode == 2 and name in missing.stderr
    assert json.loads((tmp_path / "n.json").read_text())["error"]["reason"] == "NO_HISTORY"
    none = etfarm("history", name, "--recipe", "portable", "--server", kept.farm.address, cwd=tmp_path)
    assert none.returncode == 0 and "none matches --recipe portable" in none.stdout


def test_history_and_compare_report_changed_inputs(kept: Kept, tmp_path: Path) -> None:
    ones = {str(place): np.ones_like(tensors.to_array(value)) for place, value in enumerate(program("add").inputs)}
    with kept.farm.client() as client:
        values = client.bench(program("add").path, threads=[1], inputs=ones, **QUICK).result()
    assert kept.add.reports[0].inputs.digest is None, "the runner made them up"
    assert [value.shape for value in values.report.inputs.tensors] == [array.shape for array in ones.values()]
    name = kept.add.reports[0].model.name
    arguments = (name, "--threads", "1", "--json", "h.json", "--server", kept.farm.address)
    assert etfarm("history", *arguments, cwd=tmp_path).returncode == 0
    points = [point for one in json.loads((tmp_path / "h.json").read_text())["series"] for point in one["points"]]
    (point,) = [point for point in points if point["job"] == values.job.id]
    assert [change for change in point["changes"] if change["what"] == "inputs"] == [
        {"what": "inputs", "base": None, "candidate": values.report.inputs.digest}
    ]
    sides = (f"{kept.add.job.id}#0", values.job.id)
    done = etfarm("compare", *sides, "--server", kept.farm.address, cwd=tmp_path)
    assert f"inputs none -> {values.report.inputs.digest[:8]}" in done.stdout, done.stderr


@pytest.mark.parametrize("by", ["", *views.BY])
def test_operators_are_paged_in_the_views_order(kept: Kept, by: str) -> None:
    report = kept.conv[0].reports[0].json()
    request = report_pb2.ListOperatorsRequest(
        report_id=report["id"],
        by=number_of(report_pb2.OperatorGrouping.DESCRIPTOR, by),
        sort=report_pb2.OPERATOR_SORT_TOTAL,
        page_size=2,
    )
    result: list[Any] = []
    while True:
        page = ask(kept.farm, "ListOperators", request)
        part = page.groups if by else page.operators
        assert 1 <= len(part) <= 2
        result += part
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    if by:
        expected = views.group(report["operators"], by, "total")
        assert [(group.key, list(group.indexes)) for group in result] == [(one.key, list(one.indexes)) for one in expected]
    else:
        assert sorted(row.index for row in result) == [row["index"] for row in report["operators"]]
        shares = [row.share for row in result]
        assert shares == sorted(shares, reverse=True)


def test_a_reanalyzed_report_is_equal_and_keeps_its_id(kept: Kept, tmp_path: Path) -> None:
    before = raw(kept.farm, kept.conv[0])
    done = etfarm(
        "report", "analyze", kept.conv[0].job.id, "--json", "a.json", "--server", kept.farm.address, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = raw(kept.farm, kept.conv[0])
    assert [report.analysis.cached for report in (*before, *after)] == [False, True]
    for report in after:
        report.analysis.cached = False
    assert list(after) == list(before)
    (reported,) = json.loads((tmp_path / "a.json").read_text())["reports"]
    assert reported["analysis"]["key"] == before[0].analysis.key


def test_a_live_job_is_not_reanalyzed(kept: Kept) -> None:
    with kept.farm.client() as client:
        job = client.bench(program("conv").path, min_time_s=60)
        with pytest.raises(EtfarmError) as refused:
            client.analyze(job.id)
        job.cancel()
    assert refused.value.reason == "JOB_LIVE" and refused.value.remedy


def test_reanalysis_without_the_compilation_keeps_the_report_and_warns(kept: Kept) -> None:
    with kept.farm.client() as client:
        result = client.bench(program("chain").path, **QUICK).result()
        (before,) = raw(kept.farm, result)
        forget_compilation(kept.farm, result)
        for _ in range(2):
            reported = client.analyze(result.job.id).reports[0]
            assert [warning.code for warning in reported.compile.warnings] == ["ANALYSIS_FILE_MISSING"], "once, however often"
    (after,) = raw(kept.farm, result)
    after.compile.ClearField("warnings")
    assert after == before


def test_reanalysis_without_series_keeps_the_rest_and_warns(kept: Kept, tmp_path: Path) -> None:
    with kept.farm.client() as client:
        job = client.bench(program("conv").path, **QUICK).result().job.id
        other = kept.conv[1].job.id

        def views() -> list[str]:
            compared = client.compare(other, job)
            shown = etfarm("report", "show", job, "--server", kept.farm.address, cwd=tmp_path)
            assert shown.returncode == 0, shown.stderr
            return [shown.stdout, json.dumps(compared.to_dict())]

        before = client.job(job).result().json()
        with_series = views()
        (report,) = ask(kept.farm, "Get", report_pb2.GetReportsRequest(job_id=job)).reports
        for artifact in (report.samples, report.trace_times):
            kept.blob(artifact.digest).unlink()
        assert views() == with_series
        after = client.job(job).result().json()
    assert before["reports"][0]["latency"]["samples_ns"] and before["reports"][0]["profile"]["times_ns"]
    shown = etfarm("report", "show", job, "--json", "s.json", "--server", kept.farm.address, cwd=tmp_path)
    page = etfarm("report", "export", job, "--format", "html", "--output", "s.html", "--server", kept.farm.address, cwd=tmp_path)
    assert (shown.returncode, page.returncode) == (0, 0), shown.stderr + page.stderr
    assert (tmp_path / "s.html").stat().st_size > 10_000
    for document in (after, json.loads((tmp_path / "s.json").read_text())):
        (actual,), (expected,) = copy.deepcopy((document["reports"], before["reports"]))
        codes = [warning["code"] for warning in actual["compile"]["warnings"]]
        assert codes.count("SERIES_NOT_STORED") == 2
        assert actual["latency"]["samples_ns"] == [] and actual["profile"]["times_ns"] is None
        assert all(row["times_ns"] is None for row in actual["operators"])
        expected["latency"]["samples_ns"] = []
        for holder in (expected["profile"], *expected["operators"]):
            holder["times_ns"] = None
        actual["compile"]["warnings"] = [w for w in actual["compile"]["warnings"] if w["code"] != "SERIES_NOT_STORED"]
        assert actual == expected


def forget_compilation(farm: FarmProcess, result: JobResult) -> None:
    """Delete the compilation of a job's first cell from the server's database."""
    request = job_pb2.GetJobRequest(job_id=result.job.id)
    key = ask(farm, "Get", request, job_pb2_grpc.JobServiceStub).cells[0].compilation_key
    with contextlib.closing(sqlite3.connect(farm.folder / "server" / "farm.sqlite", timeout=30)) as database, database:
        assert database.execute("DELETE FROM compilations WHERE key = ?", (key,)).rowcount == 1


def hold_a_child(farm: FarmProcess) -> set[int]:
    """Stop the next child of the server's workers in the middle of its work; gives all processes below the server then."""
    assert farm.server is not None
    server = psutil.Process(farm.server.pid)
    held: set[int] = set()

    def hold() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            forkservers = {child.pid for child in server.children()}
            # What a forkserver started is the child's supervisor, which must be able to end it.
            for process in server.children(recursive=True):
                if process.ppid() not in {server.pid, *forkservers}:
                    process.suspend()
                    held.update(descendants(server.pid))
        return bool(held)

    assert wait_until(hold)
    return held


def test_reanalysis_survives_a_hanging_child_a_missing_file_and_a_killed_server(kept: Kept) -> None:
    with kept.farm.client() as client:
        result = client.bench(program("conv").path, no_cache=True, **QUICK).result()
        (before,) = raw(kept.farm, result)
        trap = kept.blob(before.etdump.digest)
        holding = threading.Thread(target=hold_a_child, args=(kept.farm,))
        holding.start()
        again = client.analyze(result.job.id).reports[0]
        holding.join()
    assert "ANALYSIS_CUT_SHORT" in [warning.code for warning in again.compile.warnings]
    (known,) = raw(kept.farm, result)
    assert_as_before(before, known)

    def ask_in_vain() -> None:
        with contextlib.suppress(EtfarmError):
            ask(kept.farm, "Analyze", report_pb2.AnalyzeJobRequest(job_id=result.job.id))

    asking = threading.Thread(target=ask_in_vain)
    asking.start()
    children = hold_a_child(kept.farm)
    kept.farm.kill9()
    asking.join()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    kept.farm.restart()
    assert list(raw(kept.farm, result)) == [known]
    # A pipe in the place of a stored file would keep its reader for good.
    trap.unlink()
    os.mkfifo(trap)
    with kept.farm.client() as client:
        again = client.analyze(result.job.id).reports[0]
    assert "ANALYSIS_FILE_MISSING" in [warning.code for warning in again.compile.warnings]
    assert not trap.exists(), "it was moved away"
    (after,) = raw(kept.farm, result)
    assert_as_before(before, after)


def assert_as_before(before: Any, after: Any) -> None:
    """What could not be analyzed again, and who the report is, are as they were."""
    assert (after.id, after.create_time, after.analysis.cached) == (before.id, before.create_time, False)
    assert list(after.operators) == list(before.operators) and after.operators
    assert (after.profile, after.latency, after.verdict) == (before.profile, before.latency, before.verdict)
