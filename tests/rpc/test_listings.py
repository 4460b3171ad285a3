"""What commands list of a server's jobs: filters, names, JSON documents and whole lines in a pipe."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from etfarm.client import Farm
from etfarm.client.cli.commands import (
    agents,
    artifacts,
    audit,
    bundle,
    devices,
    jobs,
    projects,
    recipes,
    retention,
    server,
    tokens,
    webhooks,
)
from etfarm.client.cli.listing import to_json
from etfarm.client.models import JobState
from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1.common_pb2 import LogSource
from etfarm.v1.job_pb2 import Job, JobSpec
from etfarm.v1.report_pb2 import Report
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess
from tests.support.refusals import refuses

LONG = "a-name-that-no-narrow-terminal-has-room-for-" * 3


async def store_jobs(path: Path) -> None:
    """Write five finished jobs, as a server leaves them; the farm is theirs from before it starts."""
    database = SqliteDatabase(path)
    await database.open()
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    announcer = Announcer()
    journal = Journal(database, announcer, lambda: at + timedelta(seconds=1))
    log = JobLog(database, announcer, lambda: at + timedelta(milliseconds=250))
    for number, name in enumerate((f"nightly {LONG}", "nightly b", "weekly", "once", "once")):
        labels = {"team": "vision" if number % 2 else "audio"}
        spec = JobSpec(name=name, labels=labels)
        job = Job(id=f"{number:016x}", name=name, owner="anonymous", project="default", spec=spec, labels=labels)
        job.create_time.FromDatetime(at)
        job.cells.add(id=f"cell-{number}", job_id=job.id, state=model.QUEUED, version=1, candidate_name="resnet8")
        written, _ = await journal.submit(job, Request(f"request-{number}", b""))
        cell = await journal.change(model.advance(written.cells[0], model.COMPILING, at=at))
        end = model.FAILED if number == 2 else model.SUCCEEDED
        report = Report(id=f"report-{number}", cell=cell.id)
        await journal.change(model.advance(cell, end, at=at), report=report)
    log.add(f"{2:016x}", "cell-2", LogSource.LOG_SOURCE_RUNNER, "out of memory")
    await log.flush()
    database.close()


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("listings"), bundle=False) as running:
        (running.folder / "server").mkdir()
        asyncio.run(store_jobs(running.folder / "server" / "farm.sqlite"))
        running.start()
        assert artifacts.main(["put", "--server", running.address, __file__]) == 0
        yield running


def names(farm: FarmProcess, **filters: object) -> list[str]:
    """Return the first words of the names of the jobs that are listed."""
    with farm.client() as client:
        return [job.name.partition(" a-")[0] for job in client.jobs(**filters)]  # type: ignore[arg-type]


def test_the_library_lists_jobs_by_name_label_state_and_owner(farm: FarmProcess) -> None:
    assert names(farm) == ["once", "once", "weekly", "nightly b", "nightly"]
    assert names(farm, name="night") == ["nightly b", "nightly"]
    assert names(farm, labels={"team": "vision"}) == ["once", "nightly b"]
    assert names(farm, states="FAILED") == names(farm, states=[JobState.FAILED]) == ["weekly"]
    assert names(farm, owner="anonymous", limit=1) == ["once"]
    assert names(farm, owner="bob") == []
    assert len(names(farm, model="resnet8")) == 5
    assert names(farm, model="resnet") == []
    submitted = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert len(names(farm, since=submitted)) == 5
    assert names(farm, since=submitted + timedelta(seconds=1)) == []


def test_the_library_lists_jobs_by_pages(farm: FarmProcess) -> None:
    with farm.client() as client:
        first = client.job_page(size=2)
        second = client.job_page(first.next_page_token, size=2)
        last = client.job_page(second.next_page_token, size=2)
        assert [job.id for page in (first, second, last) for job in page.jobs] == [job.id for job in client.jobs()]
        assert [len(page.jobs) for page in (first, second, last)] == [2, 2, 1]
        assert last.next_page_token == ""
        filtered = client.job_page(size=3, labels={"team": "audio"})
        assert len(filtered.jobs) == 3
        assert all(job.labels["team"] == "audio" for job in filtered.jobs)
        with refuses("BAD_PAGE_TOKEN"):
            client.job_page("not a token")


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"limit": -1}, "`limit` must be at least 1, got -1."),
        ({"states": "DONE"}, "`states` must be job states, got 'DONE'. Use QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED."),
    ],
)
def test_a_filter_that_cannot_be_is_refused(farm: FarmProcess, filters: dict[str, object], sentence: str) -> None:
    with pytest.raises(EtfarmError) as refused:
        names(farm, **filters)
    assert (str(refused.value), refused.value.reason) == (sentence, "BAD_OPTION")


def test_a_job_s_name_serves_as_its_id(farm: FarmProcess) -> None:
    with Farm(farm.address) as client:
        assert client.job("weekly").id == f"{2:016x}"
        with pytest.raises(EtfarmError, match=f"{4:016x}, {3:016x}"):
            client.job("once")


def test_the_command_lists_what_matches(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*filters: str) -> str:
        assert jobs.main(["list", "--server", farm.address, *filters]) == 0
        return capsys.readouterr().out

    assert "weekly" in listed("--state", "failed") and "once" not in listed("--state", "failed")
    assert listed("--label", "team=vision", "--name", "on").count("once") == 1
    assert listed("--owner", "bob") == "No job matches.\n"
    assert "weekly" in listed("--model", "resnet8", "--since", "2026-01-02")
    assert listed("--since", "2h") == listed("--model", "other") == "No job matches.\n"
    assert jobs.main(["list", "--server", farm.address, "--state", "done"]) == 2
    assert "Values of --state must be job states, got 'DONE'" in capsys.readouterr().err


def test_each_line_of_a_jobs_log_has_its_instant(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["logs", "weekly", "--server", farm.address]) == 0
    assert capsys.readouterr().out == "2026-01-02T03:04:05.250Z   0 runner   out of memory\n"


def reserve_and_release(argv: list[str]) -> int:
    """Run `etfarm devices reserve`, and make the device free for the next one."""
    code = devices.main(argv)
    with Farm(argv[argv.index("--server") + 1]) as client:
        for reservation in client.reservations():
            client.release_reservation(reservation.id)
    return code


COMMANDS = [
    ("jobs", jobs.main, ["list"]),
    ("job", jobs.main, ["show", "weekly"]),
    ("devices", devices.main, ["list"]),
    ("reservations", devices.main, ["reservations"]),
    ("telemetry", devices.main, ["telemetry", "board-0"]),
    ("reservation", reserve_and_release, ["reserve", ""]),
    ("device", devices.main, ["show", "board-0"]),
    ("health_events", devices.main, ["health", "board-0"]),
    ("webhooks", webhooks.main, ["list"]),
    ("deliveries", webhooks.main, ["deliveries"]),
    pytest.param("health_event", devices.main, ["check", "board-0"], marks=pytest.mark.slow(reason="its runner imports torch")),
    ("agents", agents.main, ["list"]),
    ("projects", projects.main, ["list"]),
    ("artifacts", artifacts.main, ["list"]),
    ("collected", artifacts.main, ["collect", "--dry-run"]),
    ("retention", retention.main, ["--dry-run"]),
    ("bundles", bundle.list_, []),
    ("server", server.main, ["--all"]),
    ("tokens", tokens.main, ["list"]),
    ("audit", audit.main, []),
    pytest.param("recipes", recipes.main, ["list"], marks=pytest.mark.slow(reason="a child of the server imports torch")),
    pytest.param("recipe", recipes.main, ["show", "portable"], marks=pytest.mark.slow(reason="a child imports torch")),
]


def refuse_constant(text: str) -> object:
    raise AssertionError(f"{text} is not strict JSON")


@pytest.mark.parametrize(("name", "command", "arguments"), COMMANDS)
def test_each_list_and_show_writes_a_strict_json_document(
    farm: FarmProcess,
    name: str,
    command: Callable[[list[str]], int],
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    argv = [*arguments, "--server", farm.address]
    assert command([*argv, "--json", "-"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text, parse_constant=refuse_constant)
    assert list(document) == ["schema", name, "error"]
    assert (document["schema"], document["error"]) == (f"etfarm.{name}/1", None)
    assert isinstance(document[name], list if name.endswith("s") or name in ("audit", "telemetry", "retention") else dict)
    for value in document[name] if isinstance(document[name], list) else [document[name]]:
        assert value.keys() == DOCUMENTED[name]
    file = tmp_path / "x.json"
    assert command([*argv, "--json", str(file)]) == 0
    assert capsys.readouterr().out, "the table is shown as well"
    assert json.loads(file.read_text())["schema"] == document["schema"]


def documented() -> dict[str, set[str]]:
    """Return the keys of each document by its name, as docs/report-format.md says."""
    text = (Path(__file__).parents[2] / "docs" / "report-format.md").read_text()
    rows = re.findall(r"^\| `etfarm\.(\w+)/1` \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in rows}


DOCUMENTED = documented()


def test_each_document_is_documented() -> None:
    names = {getattr(case, "values", case)[0] for case in COMMANDS}
    # These two have lists within an object, and tests of their own.
    assert names | {"queue", "generation"} == DOCUMENTED.keys()


def test_a_command_that_fails_writes_its_error(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["show", "nothere", "--server", farm.address, "--json", "-"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["job"], document["error"]["reason"]) == ("etfarm.job/1", None, "JOB_NOT_FOUND")


def test_what_is_empty_or_no_number_is_null() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    value = {"a": "", "b": float("nan"), "c": (1, 0.5, True), "d": at, "e": JobState.FAILED, "f": None}
    assert to_json(value) == {"a": None, "b": None, "c": [1, 0.5, True], "d": "2026-01-02T03:04:05Z", "e": "FAILED", "f": None}


@pytest.mark.parametrize(("name", "command", "arguments"), COMMANDS)
def test_no_table_is_cut_in_a_pipe(
    farm: FarmProcess, name: str, command: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*arguments, "--server", farm.address]) == 0
    printed = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert name != "jobs" or f"nightly {LONG}" in printed
