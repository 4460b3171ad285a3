"""A job whose cells share a candidate of 100,000 calibration samples: its keys are computed once and equal those of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.compile import compiler, keys
from etfarm.server.compile.compiler import Compiler
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.v1.job_pb2 import Candidate
from etfarm.wire import digest, recipes

pytestmark = pytest.mark.slow(reason="finds the keys of cells with 100,000 samples each")

RECIPE = recipes.resolve("xnnpack_pt2e_int8_static_per_channel", {})


def candidate(*samples: bytes) -> Candidate:
    created = Candidate(name="net", recipe=RECIPE.json)
    method = created.model.methods["forward"]
    method.exported_program.digest = digest.of_bytes(b"model")
    for sample in samples:
        method.calibration.add(digest=digest.of_bytes(sample))
    return created


async def test_the_keys_of_a_large_candidate_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = SqliteDatabase(tmp_path / "farm.sqlite")
    await database.open()
    store = Store(tmp_path / "store", database)
    workers = Workers(preload=[], limits=Limits(), folder=tmp_path / "jobs", concurrency=1)
    compiling = Compiler(workers, store, database, deadline_s=60, stage_deadline_s=60, threads=1)
    lengths: list[int] = []

    def plan(asked: Candidate, *arguments: object) -> keys.Plan:
        lengths.append(len(asked.model.methods["forward"].calibration))
        return keys.plan(asked, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "plan", plan)
    large, other = candidate(*[b"one"] * 2_000), candidate(*[b"one"] * 1_999, b"two")
    expected = [keys.plan(each, RECIPE) for each in (large, large, other)]
    for each, known in zip((large, large, other), expected, strict=True):
        result = await compiling._plan(each, "")
        assert (result.key, result.quantization_key, result.candidate) == (known.key, known.quantization_key, each)
    assert lengths == [2_000, 0, 2_000]
    assert expected[0].quantization_key != expected[2].quantization_key
    store.close()
    database.close()
