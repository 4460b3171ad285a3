"""Small cases of the client's errors, and what their remedies say to do instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etfarm.client.admin import artifacts
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.submit.preparation import prepare
from etfarm.v1 import artifact_pb2, common_pb2, job_pb2
from etfarm.v1.artifact_pb2 import StoredArtifact
from etfarm.wire.comparison import Side, compare
from tests.support.comparisons import report
from tests.support.programs import program
from tests.support.refusals import refuses


@pytest.mark.remedy("AMBIGUOUS_DIGEST")
async def test_a_digest_with_more_digits_names_one_artifact() -> None:
    digests = ["ab" + "0" * 62, "ac" + "0" * 62]

    async def listed(_: object) -> artifact_pb2.ListArtifactsResponse:
        rows = [StoredArtifact(artifact=common_pb2.Artifact(digest=each)) for each in digests]
        return artifact_pb2.ListArtifactsResponse(artifacts=rows)

    stubs = cast(Any, SimpleNamespace(artifacts=SimpleNamespace(List=listed), server="farm:1"))
    with refuses("AMBIGUOUS_DIGEST"):
        await artifacts.find(stubs, "a")
    assert (await artifacts.find(stubs, "ac")).digest == digests[1]


@pytest.mark.remedy("CELL_NOT_FOUND", "NOT_PRODUCED")
async def test_a_cell_that_is_listed_has_what_it_produced_once_it_has_ended() -> None:
    job = job_pb2.Job(id="j1", cells=[job_pb2.Cell(id="c1", index=0, state=common_pb2.CELL_STATE_RUNNING)])
    ended = job_pb2.Job(id="j1", cells=[job_pb2.Cell(id="c1", index=0, state=common_pb2.CELL_STATE_SUCCEEDED)])

    async def get(_: object) -> job_pb2.Job:
        return ended

    stubs: Any = SimpleNamespace(jobs=SimpleNamespace(Get=get), lasting=lambda _: stubs)
    running = AsyncJob(stubs, job)
    with refuses("CELL_NOT_FOUND"):
        running._cell(1)
    (listed,) = running.info.cells
    running._cell(listed.index)
    with refuses("NOT_PRODUCED"):
        running._produced(0, "etrecord")
    ended.cells[0].etrecord.digest = "b" * 64
    await running.refresh()
    assert running._produced(0, "etrecord").digest == "b" * 64


@pytest.mark.remedy("BAD_DATA_FILE")
def test_the_data_files_that_were_written_with_a_program_are_taken(tmp_path: Path) -> None:
    split = program("split")
    (tmp_path / "weights.ptd").write_bytes(b"no flat tensors")
    for wrong in (tmp_path / "none.ptd", tmp_path / "weights.ptd"):
        with refuses("BAD_DATA_FILE"):
            prepare(str(split.path), data=[wrong])
    assert len(prepare(str(split.path), data=split.data).data) == len(split.data)


@pytest.mark.remedy("NOTHING_TO_COMPARE")
def test_one_report_of_each_side_is_compared_though_their_models_differ() -> None:
    base = [report(cell, model={"name": "chain"}) for cell in ("c1", "c2")]
    candidate = [report(cell, model={"name": "resnet8"}) for cell in ("c3", "c4")]
    with refuses("NOTHING_TO_COMPARE", match="BASE#NUMBER"):
        compare(Side(base), Side(candidate))
    assert len(compare(Side(base, choice="0"), Side(candidate, choice="1")).pairs) == 1
