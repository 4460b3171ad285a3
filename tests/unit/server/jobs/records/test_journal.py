"""The journal on a real database: written before announced, each change once, sequences without gaps."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.event import listen

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records import selection
from etfarm.server.jobs.records.journal import StaleVersion
from etfarm.server.jobs.records.rows import resolve_job
from etfarm.server.jobs.records.selection import JobFilter
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1 import report_pb2
from etfarm.v1.agent_pb2 import CandidateResult
from etfarm.v1.job_pb2 import JobEvent, JobSpec, JobState, Progress
from etfarm.v1.report_pb2 import Report
from etfarm.wire.errors import Kind
from tests.support.databases import sqlite_only
from tests.support.golden import Golden
from tests.support.jobs import AT, JournalWorld, queued_job, submit
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

WAIT_S = 60.0


class World(JournalWorld):
    """A journal whose clock moves a second at each look."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, self.now)
        self.looked = 0

    def now(self) -> datetime:
        self.looked += 1
        return AT + timedelta(seconds=self.looked)

    async def events(self, job: str, after: int = 0) -> list[JobEvent]:
        async with asyncio.timeout(WAIT_S):
            return [event async for event in self.journal.watch(job, after)]


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def sequences(events: list[JobEvent]) -> list[int]:
    return [event.sequence for event in events if event.HasField("sequence")]


async def test_a_job_comes_back_as_it_was_submitted(world: World) -> None:
    job = await world.submit(cells=2, name="n", labels={"k": "v"}, spec=JobSpec(priority=3, labels={"k": "v"}))
    again = await world.journal.get(job.id, EVERYTHING)
    assert again == job
    assert (again.owner, again.name, dict(again.labels), again.spec.priority) == ("ann", "n", {"k": "v"}, 3)
    assert [cell.index for cell in again.cells] == [0, 1]
    assert again.state == JobState.JOB_STATE_QUEUED
    assert again.create_time.ToDatetime(UTC) == AT
    assert not again.HasField("end_time")


async def test_a_request_id_is_one_job_for_its_owner_and_another_for_others(world: World) -> None:
    first = await world.submit("job-a", request="r1")
    assert (await world.submit("job-b", request="r1", cells=5)) == first
    assert (await world.submit("job-c", request="r1", owner="bob")).id == "job-c"
    assert (await world.submit("job-d", request="r2")).id == "job-d"
    with refuses("JOB_NOT_FOUND"):
        await world.journal.get("job-b", EVERYTHING)
    await world.step(first.cells[0], model.CANCELLED)
    assert sequences(await world.events("job-a")) == [1, 2, 3]


async def test_the_same_request_twice_at_once_is_one_job(world: World) -> None:
    one, other = await asyncio.gather(world.submit("job-a", request="r"), world.submit("job-b", request="r"))
    assert one == other


async def test_a_change_of_an_older_version_is_refused_and_not_announced(world: World) -> None:
    job = await world.submit()
    stale = job.cells[0]
    await world.step(job.cells[0], model.COMPILING)
    with world.announcer.subscribe(job.id) as subscription:
        with pytest.raises(StaleVersion) as refused:
            await world.step(stale, model.CANCELLED)
        assert refused.value.kind is Kind.ABORTED
        assert not subscription._something.is_set()
    again = await world.journal.get(job.id, EVERYTHING)
    assert (again.cells[0].state, again.cells[0].version) == (model.COMPILING, 2)


async def test_of_two_changes_at_once_one_wins(world: World) -> None:
    job = await world.submit()
    outcomes = await asyncio.gather(
        world.step(job.cells[0], model.COMPILING), world.step(job.cells[0], model.FAILED), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Cell", "StaleVersion"]


PATH = (model.COMPILING, model.WAITING, model.RUNNING, model.ANALYZING, model.SUCCEEDED)


async def test_sequences_are_contiguous_and_end_with_the_job(world: World) -> None:
    job = await world.submit(cells=3)
    await asyncio.gather(*(world.step(cell, *PATH) for cell in job.cells))
    events = await world.events(job.id)
    assert sequences(events) == list(range(1, 1 + 1 + 3 * len(PATH) + 1))
    assert events[0].WhichOneof("event") == events[-1].WhichOneof("event") == "job"
    assert [event.WhichOneof("event") for event in events[1:-1]] == ["cell"] * 15
    assert events[-1].job_state == events[-1].job.state == JobState.JOB_STATE_SUCCEEDED
    assert not events[-1].job.cells and not events[-1].job.HasField("spec")
    assert all(event.HasField("time") for event in events)


async def test_a_job_is_finished_with_its_last_cell_and_not_before(world: World) -> None:
    job = await world.submit(cells=2)
    await world.step(job.cells[0], model.FAILED)
    half = await world.journal.get(job.id, EVERYTHING)
    assert not half.HasField("end_time")
    assert half.state == JobState.JOB_STATE_RUNNING
    assert [one.id for one in await world.journal.live()] == [job.id]
    await world.step(job.cells[1], model.COMPILING, model.SUCCEEDED)
    whole = await world.journal.get(job.id, EVERYTHING)
    assert whole.state == JobState.JOB_STATE_FAILED
    assert whole.end_time.ToDatetime(UTC) > AT
    assert await world.journal.live() == []
    assert (await world.events(job.id))[-1].job.end_time == whole.end_time


@pytest.mark.parametrize("after", range(8))
async def test_watching_after_a_sequence_gives_exactly_the_rest(world: World, after: int) -> None:
    job = await world.submit()
    await world.step(job.cells[0], *PATH)
    assert sequences(await world.events(job.id, after)) == list(range(after + 1, 8))


@pytest.mark.remedy("SEQUENCE_UNKNOWN")
async def test_watching_after_what_has_not_happened_is_refused(golden: Golden, world: World) -> None:
    job = await world.submit()
    with golden.refuses("SEQUENCE_UNKNOWN") as refused:
        await world.events(job.id, 2)
    assert refused.value.kind is Kind.OUT_OF_RANGE
    await world.step(job.cells[0], model.CANCELLED)
    assert await world.events(job.id, 0)


async def test_watchers_of_a_live_job_get_everything_whenever_they_join(world: World) -> None:
    job = await world.submit(cells=2)
    watching = []
    cells = list(job.cells)
    for step in PATH:
        watching.append(asyncio.create_task(world.events(job.id)))
        cells[0] = await world.step(cells[0], step)
        watching.append(asyncio.create_task(world.events(job.id, after=1)))
        cells[1] = await world.step(cells[1], step)
    for number, task in enumerate(watching):
        assert sequences(await task) == list(range(1 + number % 2, 13)), f"watcher {number}"


async def test_a_watcher_gets_current_progress_and_the_end_last(world: World) -> None:
    job = await world.submit()
    cell = await world.step(job.cells[0], model.COMPILING)
    world.announcer.announce(job.id, JobEvent(progress=Progress(cell_id=cell.id, phase="TORCH_EXPORT")))
    received: list[JobEvent] = []

    async def watch() -> None:
        async for event in world.journal.watch(job.id, 0):
            received.append(event)
            if event.WhichOneof("event") == "progress":
                reported.set()

    reported = asyncio.Event()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(watch())
        await reported.wait()
        await world.step(cell, model.SUCCEEDED)
    assert [event.WhichOneof("event") for event in received] == ["job", "cell", "progress", "cell", "job"]
    assert sequences(received) == [1, 2, 3, 4]


async def test_a_watcher_does_not_miss_what_happens_between_its_looks(world: World) -> None:
    """The last change commits right after the watcher looked for the newest event."""
    job = await world.submit()
    read = world.database.read
    finished = False

    async def read_then_finish(do):  # type: ignore[no-untyped-def]
        nonlocal finished
        result = await read(do)
        if not finished:
            finished = True
            await world.step(job.cells[0], *PATH)
        return result

    world.database.read = read_then_finish  # type: ignore[method-assign]
    assert sequences(await world.events(job.id)) == list(range(1, 8))


async def test_a_report_is_written_with_the_last_change_or_not_at_all(world: World) -> None:
    job = await world.submit(cells=2)
    reports = [Report(id=f"r{index}", cell=job.cells[index].id) for index in (0, 1)]
    reports[1].latency.p50_ns = 5.0
    await world.step(job.cells[1], model.COMPILING, model.SUCCEEDED, report=reports[1])
    stale = job.cells[1]
    with pytest.raises(StaleVersion):
        await world.step(stale, model.FAILED, report=Report(id="late", cell=stale.id))
    assert [report.id for report in await world.journal.reports.of_job(job.id)] == ["r1"]
    await world.step(job.cells[0], model.CANCELLED, report=reports[0])
    assert [report.id for report in await world.journal.reports.of_job(job.id)] == ["r0", "r1"]
    rows = await world.database.read(lambda c: c.execute(select(schema.reports.c.id, schema.reports.c.p50_ns)).all())
    assert sorted(map(tuple, rows)) == [("r0", None), ("r1", 5.0)]


async def test_an_attempt_keeps_its_result(world: World) -> None:
    job = await world.submit()
    cell = job.cells[0]
    cell.attempts.add(id="a1", device_id="pi").start_time.FromDatetime(AT)
    cell = await world.journal.change(model.amend(cell, at=AT))
    assert await world.journal.results_of("a1") == {cell.id: CandidateResult()}
    cell.attempts[0].end_time.FromDatetime(AT)
    cell = await world.journal.change(model.amend(cell, at=AT), result=CandidateResult(cell_id=cell.id, iterations=7))
    assert (await world.journal.results_of("a1"))[cell.id].iterations == 7
    await world.journal.change(model.amend(cell, at=AT))
    assert (await world.journal.results_of("a1"))[cell.id].iterations == 7, "a later change keeps it"


async def test_cells_that_share_an_attempt_change_together_or_not_at_all_and_each_keeps_its_result(world: World) -> None:
    job = await world.submit(cells=2)
    for cell in job.cells:
        cell.attempts.add(id="a1", device_id="pi").start_time.FromDatetime(AT)
    changed = [model.amend(cell, at=AT) for cell in job.cells]
    results = [CandidateResult(cell_id=cell.id, iterations=cell.index + 1) for cell in changed]
    with pytest.raises(StaleVersion):
        await world.journal.change_together([(changed[0], results[0]), (job.cells[1], results[1])])
    assert await world.journal.results_of("a1") == {}
    await world.journal.change_together(list(zip(changed, results, strict=True)))
    assert [each.iterations for each in (await world.journal.results_of("a1")).values()] == [1, 2]
    assert [cell.version for cell in (await world.journal.get(job.id, EVERYTHING)).cells] == [changed[0].version] * 2


@pytest.mark.parametrize("key", ["abcdef01", "abcd", "abcde", "latest"])
async def test_a_job_is_found_by_id_prefix_and_latest(world: World, key: str) -> None:
    await world.submit("xyz00000")
    await world.submit("abcdef01")
    assert (await world.journal.get(key, EVERYTHING)).id == "abcdef01"


@pytest.mark.remedy("JOB_NOT_FOUND")
@pytest.mark.parametrize("key", ["", "abc", "zzzz", "abcd", "abc_", "%%%%"])
async def test_what_is_no_job_is_refused(golden: Golden, world: World, key: str) -> None:
    await world.submit("abcdef01", name="one")
    await world.submit("abcdef02", name="other")
    with golden.refuses("JOB_NOT_FOUND") as refused:
        await world.journal.get(key, EVERYTHING)
    assert refused.value.kind is Kind.NOT_FOUND
    listed, _ = await world.journal.list(9, None, EVERYTHING)
    assert [(await world.journal.get(job.id, EVERYTHING)).id for job in listed] == ["abcdef02", "abcdef01"]


async def all_pages(world: World, filter_: JobFilter, size: int = 2) -> list[str]:
    """Return the ids of all jobs that match, read page by page."""
    ids, before = [], None
    while True:
        page, before = await world.journal.list(size, before, EVERYTHING, filter_)
        assert len(page) <= size
        ids += [job.id for job in page]
        if before is None:
            return ids


async def test_jobs_are_listed_by_name_label_and_owner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SCANNED_JOBS", 3)  # a page examines fewer jobs than there are
    for number in range(9):
        labels = {"team": "vision" if number % 2 else "audio", "n": str(number)}
        owner, title = "ann" if number < 4 else "bob", f"nightly 100% {number % 3}"
        await world.submit(f"job-{number}", owner=owner, name=title, labels=labels, spec=JobSpec(labels=labels))
    assert await all_pages(world, JobFilter(name="100% 1")) == ["job-7", "job-4", "job-1"]
    assert await all_pages(world, JobFilter(name="100_")) == []
    assert await all_pages(world, JobFilter(owner="ann")) == ["job-3", "job-2", "job-1", "job-0"]
    assert await all_pages(world, JobFilter(labels={"team": "vision"})) == ["job-7", "job-5", "job-3", "job-1"]
    assert await all_pages(world, JobFilter(labels={"team": "vision", "n": "5"}, owner="bob")) == ["job-5"]
    assert await all_pages(world, JobFilter(labels={"team": "vision"}), size=1) == ["job-7", "job-5", "job-3", "job-1"]


async def test_jobs_are_listed_by_the_state_that_follows_from_their_cells(world: World) -> None:
    ends = {
        "queued": (), "running": (model.COMPILING,), "succeeded": (model.COMPILING, model.SUCCEEDED),
        "failed": (model.COMPILING, model.FAILED), "cancelled": (model.CANCELLED,),
    }  # fmt: skip
    for name, states in ends.items():
        job = await world.submit(name, cells=2)
        for cell in job.cells:
            await world.step(cell, *states)
    half = await world.submit("half", cells=2)
    await world.step(half.cells[0], model.COMPILING, model.FAILED)
    jobs, _ = await world.journal.list(50, None, EVERYTHING)
    for state in JobState.values():
        expected = [job.id for job in jobs if job.state == state]
        assert expected or state == JobState.JOB_STATE_UNSPECIFIED
        assert await all_pages(world, JobFilter(states=[state])) == expected, JobState.Name(state)
    both = [JobState.JOB_STATE_FAILED, JobState.JOB_STATE_CANCELLED]
    assert await all_pages(world, JobFilter(states=both)) == ["cancelled", "failed"]


async def test_a_job_is_known_by_its_name_if_no_other_has_it(world: World, golden: Golden) -> None:
    await world.submit("abcdef01", name="nightly")
    assert (await world.journal.get("nightly", EVERYTHING)).id == "abcdef01"
    await world.submit("abcdef02", name="abcdef01")
    assert (await world.journal.get("abcdef01", EVERYTHING)).id == "abcdef01", "an id comes first"
    for number in range(8):
        await world.submit(f"beef000{number}", name="nightly")
    with golden.refuses("JOB_NOT_FOUND"):
        await world.journal.get("nightly", EVERYTHING)
    await world.submit("fade0001", name="beef0003")
    await world.submit("fade0002", name="fade000")
    with refuses("JOB_NOT_FOUND", match="fade0002, fade0001"):
        await world.journal.get("fade000", EVERYTHING)
    await world.submit("dada0001")
    await world.submit("cafe0003", name="dada")
    assert (await world.journal.get("dada", EVERYTHING)).id == "dada0001", "a unique prefix comes before a name"


async def test_cells_have_the_results_of_replaced_reports(world: World) -> None:
    job = await world.submit(cells=2)
    reports = [Report(id=f"r{cell.index}", cell=cell.id) for cell in job.cells]
    for report, cell in zip(reports, job.cells, strict=True):
        report.create_time.FromDatetime(AT)
        report.latency.p50_ns = 10
        cell.p50_ns = 10
        await world.step(cell, *PATH, report=report)
    before = await world.journal.get(job.id, EVERYTHING)
    reports[1].latency.p50_ns = 20
    reports[1].latency.p50_ci95_ns.extend((19, 21))
    reports[1].verdict.status = report_pb2.VERDICT_STATUS_INVALID
    later = AT + timedelta(hours=1)
    await world.journal.reports.replace(job, reports, at=later)
    unchanged, changed = (await world.journal.get(job.id, EVERYTHING)).cells
    assert unchanged == before.cells[0]
    assert (changed.p50_ns, list(changed.p50_ci95_ns), changed.verdict) == (20, [19, 21], report_pb2.VERDICT_STATUS_INVALID)
    assert changed.state == model.SUCCEEDED and changed.version == before.cells[1].version + 1
    assert changed.update_time.ToDatetime(UTC) == later


@sqlite_only  # asks for SQLite's plan
async def test_jobs_are_found_by_name_with_an_index(world: World) -> None:
    await world.submit("abcdef01", name="nightly", project="team")

    def plans(connection: Connection) -> list[str]:
        queries: list[tuple[str, tuple[object, ...]]] = []
        listen(connection, "before_cursor_execute", lambda c, cur, sql, values, ctx, many: queries.append((sql, values)))
        resolve_job(connection, "nightly", Scope(frozenset({"team"}), "team"))
        return [
            row.detail
            for sql, values in [query for query in queries if "jobs.name" in query[0]]
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)
        ]

    details = await world.database.read(plans)
    assert details and all("jobs_of_a_name" in detail for detail in details)


async def test_a_watcher_that_lags_behind_reads_what_it_missed(world: World) -> None:
    count = 1_200  # more than a subscription keeps
    job = await world.submit(cells=count)
    watching = world.journal.watch(job.id, 0)
    seen = [(await anext(watching)).sequence]
    await asyncio.gather(*(world.step(cell, model.COMPILING) for cell in job.cells))
    async with asyncio.timeout(WAIT_S):
        while len(seen) <= count:
            seen.append((await anext(watching)).sequence)
    await watching.aclose()  # type: ignore[attr-defined]
    assert seen == list(range(1, count + 2))


@sqlite_only  # only releases before PostgreSQL stored them
async def test_jobs_that_were_stored_with_endless_names_can_be_listed_and_watched(world: World) -> None:
    huge = "x" * (8 << 20)
    for number in range(3):
        labels = {"k": "v", "long": huge}
        spec, cell = JobSpec(name=huge, labels=labels), {"candidate_name": huge}
        await world.submit(f"job-{number}", name=huge, spec=spec, labels=labels, cell=cell)
    jobs, following = await world.journal.list(50, None, EVERYTHING)
    assert [job.id for job in jobs] == ["job-2", "job-1", "job-0"]
    assert following is None
    assert sum(job.ByteSize() for job in jobs) < 16 << 20
    assert all(job.name.endswith("…") and len(job.name) == 1000 for job in jobs)
    watching = world.journal.watch("job-0", 0)
    event = await anext(watching)
    await watching.aclose()  # type: ignore[attr-defined]
    assert (event.sequence, event.job.id) == (1, "job-0")
    assert event.ByteSize() < 1 << 20


async def test_labels_are_listed_whatever_follows_them(world: World) -> None:
    spec = JobSpec(name="n", labels={f"k{number}": "ä" * 200 for number in range(64)})
    spec.candidates.add(name="net").model.methods["forward"].calibration.add(digest="a" * 64)
    spec.inputs["forward"].digest = "b" * 64
    await world.submit(name="n", spec=spec)
    (listed,), _ = await world.journal.list(50, None, EVERYTHING)
    assert dict(listed.labels) == dict(spec.labels)


async def test_a_page_of_jobs_ends_before_it_is_too_large(world: World) -> None:
    for number in range(12):
        job = queued_job(f"job-{number:02}", 100)
        for cell in job.cells:
            cell.method = f"{cell.index}" * 20_000
        await submit(world.journal, job)
    jobs, _ = await world.journal.list(500, None, EVERYTHING)
    assert len(jobs) < 12 and sum(job.ByteSize() for job in jobs) <= 16 << 20
    assert await all_pages(world, JobFilter(), 500) == [f"job-{number:02}" for number in reversed(range(12))]


VISION, AUDIO = Scope(frozenset({"vision"}), "vision"), Scope(frozenset({"audio"}), "audio")


async def test_a_prefix_is_unique_among_the_jobs_that_one_sees(world: World) -> None:
    await world.submit("abcdef01", project="vision")
    await world.submit("abcdef02", project="audio")
    assert (await world.journal.get("abcd", VISION)).id == "abcdef01"
    with refuses("JOB_NOT_FOUND", match="Several jobs"):
        await world.journal.get("abcd", EVERYTHING)


async def test_latest_is_the_newest_of_the_active_project(world: World) -> None:
    with refuses("JOB_NOT_FOUND"):
        await world.journal.get("latest", EVERYTHING)
    for number, project in enumerate(("vision", "audio", "vision", "audio")):
        await world.submit(f"job-{number}", project=project)
    both = frozenset({"audio", "vision"})
    assert (await world.journal.get("latest", VISION)).id == "job-2"
    assert (await world.journal.get("latest", Scope(both, "vision"))).id == "job-2"
    assert (await world.journal.get("latest", Scope(both))).id == "job-3"


async def test_jobs_of_the_scope_are_listed_newest_first_in_pages_without_specs(world: World) -> None:
    for number in range(6):
        await world.submit(f"job-{number}", project=("vision", "audio")[number % 2], spec=JobSpec(name="n"))
    for scope, sizes, numbers in ((VISION, (2, 1), (4, 2, 0)), (EVERYTHING, (2, 2, 2), (5, 4, 3, 2, 1, 0))):
        seen, before = [], None
        for size in sizes:
            page, before = await world.journal.list(2, before, scope)
            assert len(page) == size
            seen += page
        assert before is None
        assert [job.id for job in seen] == [f"job-{number}" for number in numbers]
        assert not any(job.HasField("spec") for job in seen)
    assert await world.journal.list(2, None, Scope(frozenset())) == ([], None)


@pytest.mark.remedy("TAG_AMBIGUOUS")
async def test_a_tag_of_several_projects_is_the_active_ones_else_ambiguous(world: World) -> None:
    tags, both = Tags(world.database, world.now), frozenset({"audio", "vision"})
    for name, project in (("job-1", "vision"), ("job-2", "audio")):
        await world.submit(name, project=project)
        assert await tags.put("base", name, project=project, caller=f"owner-of-{project}", is_admin=False) == ""
    assert (await world.journal.get("base", Scope(both, "audio"))).id == "job-2"
    assert (await world.journal.get("base", VISION)).id == "job-1"
    with refuses("TAG_AMBIGUOUS", match="audio, vision"):
        await world.journal.get("base", Scope(both))
    assert (await world.journal.get("base", Scope(both, "vision"))).id == "job-1"
    assert await tags.remove("base", "", scope=AUDIO, caller="owner-of-audio", is_admin=False) == "job-2"
    assert (await world.journal.get("base", Scope(both))).id == "job-1"
