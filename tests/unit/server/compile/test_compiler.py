"""The compiler's daemon side: real workers and a real store; the children's entry points are cheap tasks of the same contract
(`tests.support.compile_tasks`), so that what is shared, kept and cancelled shows without torch."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.access.scope import Scope
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import FOUND_EARLIER, Cache, CompilationNotFound, Outcome, artifacts_of
from etfarm.server.compile.compiler import Compiler, Tasks
from etfarm.server.compile.recipe_catalog import RecipeUnavailable, UnknownStage
from etfarm.server.compile.single_flight import Listener
from etfarm.server.compile.upload_screening import Screening
from etfarm.server.jobs.cells.numerics import candidate_of
from etfarm.server.jobs.submission import Submission
from etfarm.server.state.engine import Database
from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Finished, Workers
from etfarm.v1 import child_pb2, common_pb2, compile_pb2
from etfarm.v1.job_pb2 import Candidate, JobSpec
from etfarm.wire import recipes
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import UnknownRecipe

ROOT = Path(__file__).resolve().parents[4]
MODULE = "tests.support.compile_tasks"
TASKS = Tasks(f"{MODULE}:quantize", f"{MODULE}:lower", f"{MODULE}:inspect", f"{MODULE}:list_recipes")
WAIT_S = 60.0
FP32 = recipes.parse("xnnpack_fp32").json
INT8 = recipes.parse("xnnpack_pt2e_int8_static_per_channel").json
PLANNED = recipes.from_toml('recipe = "xnnpack_pt2e_int8_static_per_channel"\n[executorch]\nmemory_planning = "naive"\n').json
QUANTIZED = ["QUANTIZE", "TORCH_EXPORT"]
LOWERED = ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]


class Watched(Workers):
    """Workers that count the tasks that they were given."""

    ran: list[str]
    requests: list[str]

    async def run(self, task: str, request: object, **more: Any) -> Finished:
        self.ran.append(task.partition(":")[2])
        self.requests.append(repr(request))
        return await super().run(task, request, **more)


@dataclass
class Heard:
    """What somebody who waits was told."""

    stages: list[tuple[str, bool, bool]] = field(default_factory=list)
    """(stage, has ended, was done by an earlier compilation)."""
    lines: list[str] = field(default_factory=list)
    at: dict[str, asyncio.Event] = field(default_factory=dict)

    def told(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        self.stages.append((stage, duration_ms is not None, cached))
        self.at.setdefault(stage, asyncio.Event()).set()

    async def until(self, stage: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.at.setdefault(stage, asyncio.Event()).wait()


class World:
    def __init__(self, folder: Path, database: Database, workers: Watched) -> None:
        self.folder, self.workers = folder, workers
        self.database = database
        self.store = Store(folder, database)
        self.cache = Cache(self.store, database)
        self.start_compiler()

    def start_compiler(self, *, stage_deadline_s: float = WAIT_S, cache: Cache | None = None) -> None:
        """Start with a compiler that has listed no recipes, as after a restart of the server."""
        self.compiler = Compiler(
            self.workers, self.store, self.database, deadline_s=WAIT_S, stage_deadline_s=stage_deadline_s, threads=1, tasks=TASKS,
            cache=cache or self.cache,
        )  # fmt: skip

    async def model(self, orders: str = "", recipe: str = FP32, *, calibration: bytes = b"", **methods: str) -> Candidate:
        created = Candidate(name="net", recipe=recipe)
        created.model.name = "net"
        for name, text in {"forward": orders, **methods}.items():
            created.model.methods[name].exported_program.CopyFrom(await self.store.put(f"{name}\n{text}\n".encode(), "ann"))
        if calibration:
            created.model.methods["forward"].calibration.append(await self.store.put(calibration, "ann"))
        return created

    def compile(
        self,
        candidate: Candidate,
        received: Heard | None = None,
        *,
        fresh: bool = False,
        stop_after: str = "",
        project: str = "default",
    ) -> asyncio.Task[Outcome]:
        received = received or Heard()
        listener = Listener(received.told, received.lines.append)
        return asyncio.create_task(
            self.compiler.compile(candidate, owner="ann", project=project, fresh=fresh, listener=listener, stop_after=stop_after)
        )

    @property
    def ran(self) -> list[str]:
        """The compiling children that there were."""
        return [task for task in self.workers.ran if task != "list_recipes"]

    def folders(self) -> list[str]:
        return [path.name for path in (self.folder / "children").iterdir() if path.name.startswith("job-")]

    def bytes_of(self, artifact: common_pb2.Artifact) -> bytes:
        return self.store.path(artifact.digest).read_bytes()

    def lose(self, artifact: common_pb2.Artifact) -> None:
        self.store.path(artifact.digest).unlink()

    def gate(self) -> Gate:
        return Gate(self.folder / "gates" / "gate")


class Gate:
    """A file that children wait at until it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        self._file.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    limits = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1)
    gates = tmp_path / "gates"
    gates.mkdir()
    options = JailOptions(readable=(gates,))
    workers = Watched(preload=[MODULE], limits=limits, folder=tmp_path / "children", concurrency=3, options=options)
    workers.ran, workers.requests = [], []
    workers.start()
    database = Database(tmp_path / "farm.sqlite")
    await database.open()
    yield World(tmp_path, database, workers)
    await workers.stop()
    database.close()


def names(stages: Sequence[Any]) -> list[str]:
    return [stage.stage for stage in stages]


def of_compilation(**fields: Any) -> bytes:
    """The bytes of an answer with these fields of its compilation, which are merged into those of the answer before."""
    return child_pb2.CompileResult(compilation=compile_pb2.Compilation(**fields)).SerializeToString()


def error_of(outcome: Outcome) -> EtfarmError:
    assert outcome.error is not None
    return outcome.error


async def test_a_recipe_that_does_not_quantize_takes_one_child_and_gives_all_that_is_known(world: World) -> None:
    received = Heard()
    candidate = await world.model(encode="other")
    candidate.model.constant_methods["eos"].CopyFrom(await world.store.put(b"constant", "ann"))
    outcome = await world.compile(candidate, received)
    created = outcome.compilation
    assert world.ran == ["lower"]
    assert (outcome.cached, outcome.error) == (False, None)
    assert names(created.stages) == LOWERED
    assert {(stage.where, stage.cached, stage.methods["encode"]) for stage in created.stages} == {
        (common_pb2.ACTOR_SERVER, False, 1.0)
    }
    assert received.stages == [(stage, ended, False) for stage in LOWERED for ended in (False, True)]
    assert received.lines == [f"lower {stage}" for stage in LOWERED]
    assert world.bytes_of(created.program.pte) == b"pte encode\nother\n|forward\n\n|constant"
    assert world.bytes_of(created.program.data["weights"]) == b"ptd"
    assert created.exported_programs["encode"] == candidate.model.methods["encode"].exported_program
    assert created.delegation["forward"].operators[0].places[0].source.line == 3
    assert (created.sizes.delegate_bytes, created.sizes.data_bytes["weights"]) == (3, 3)
    assert (created.checks[0].outputs[0].max_abs_error, created.checks[0].outputs[0].HasField("sqnr_db")) == (0.5, False)
    assert set(created.facts.methods) == {"forward", "encode", "eos"}
    assert not created.stayed_fp32
    assert not world.folders()


async def test_a_recipe_that_quantizes_lowers_what_the_quantizing_child_made(world: World) -> None:
    received = Heard()
    created = (await world.compile(await world.model("x", INT8, calibration=b"sample"), received)).compilation
    assert world.ran == ["quantize", "lower"]
    assert received.lines == [*(f"quantize {stage}" for stage in QUANTIZED), *(f"lower {stage}" for stage in LOWERED)]
    assert names(created.stages) == [*QUANTIZED, *LOWERED]
    assert world.bytes_of(created.exported_programs["forward"]) == b"quantized sample\nforward\nx\n"
    assert world.bytes_of(created.program.pte) == b"pte quantized sample\nforward\nx\n"
    assert [warning.code for warning in created.warnings] == ["FEW"]
    assert created.stayed_fp32["forward"].operators[0].op == "aten.sin"


async def test_what_the_client_has_quantized_is_not_quantized_again(world: World) -> None:
    candidate = await world.model("x", INT8)
    for stage in QUANTIZED:
        candidate.stages_done.add(stage=stage)
    assert names((await world.compile(candidate)).compilation.stages) == LOWERED
    assert world.ran == ["lower"]


async def test_a_ready_program_is_only_described(world: World) -> None:
    candidate = Candidate(name="x.pte")
    candidate.program.pte.CopyFrom(await world.store.put(b"pte", "ann"))
    created = (await world.compile(candidate)).compilation
    assert world.ran == ["inspect"]
    assert (created.program.pte, list(created.facts.methods), len(created.stages)) == (candidate.program.pte, ["forward"], 0)


async def test_a_compilation_that_stops_has_the_stages_files_and_no_program(world: World) -> None:
    created = (await world.compile(await world.model("x", INT8), stop_after="TO_EDGE_TRANSFORM_AND_LOWER")).compilation
    assert not created.HasField("program")
    assert created.stopped_after == "TO_EDGE_TRANSFORM_AND_LOWER"
    assert world.bytes_of(created.stage_files["delegation.csv"]) == b"TO_EDGE_TRANSFORM_AND_LOWER"
    assert (await world.compile(await world.model("x", INT8))).compilation.HasField("program"), "another key"


async def test_the_second_time_the_cache_answers(world: World) -> None:
    first = await world.compile(await world.model("x", INT8))
    again = await world.compile(await world.model("x", INT8))
    assert again.cached
    assert again.compilation == first.compilation
    assert world.ran == ["quantize", "lower"]


async def test_a_cached_program_whose_file_is_gone_is_compiled_again(world: World) -> None:
    first = (await world.compile(await world.model("x", INT8))).compilation
    world.lose(first.program.data["weights"])
    assert not (await world.compile(await world.model("x", INT8))).cached
    assert world.ran == ["quantize", "lower", "lower"]


async def test_recipes_that_quantize_alike_share_it_and_the_report_and_the_progress_say_so(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    received = Heard()
    outcome = await world.compile(await world.model("x", PLANNED), received)
    assert world.ran == ["quantize", "lower", "lower"]
    assert not outcome.cached
    assert [(stage.stage, stage.cached) for stage in outcome.compilation.stages] == [
        *((stage, True) for stage in QUANTIZED),
        *((stage, False) for stage in LOWERED),
    ]
    assert outcome.compilation.stages[0].duration_ms == 1.5, "as long as it took then"
    assert received.stages[:2] == [(stage, True, True) for stage in QUANTIZED]
    assert [warning.code for warning in outcome.compilation.warnings] == ["FEW"]


async def test_a_shared_result_whose_file_is_gone_is_made_again(world: World) -> None:
    first = (await world.compile(await world.model("x", INT8))).compilation
    world.lose(first.exported_programs["forward"])
    assert (await world.compile(await world.model("x", PLANNED))).error is None
    assert world.ran == ["quantize", "lower", "quantize", "lower"]


async def test_no_cache_quantizes_and_lowers_again(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    again = await world.compile(await world.model("x", INT8), fresh=True)
    assert world.ran == ["quantize", "lower"] * 2
    assert not again.cached
    assert not any(stage.cached for stage in again.compilation.stages)


@pytest.mark.parametrize("fresh", [False, True])
async def test_equal_requests_at_one_time_compile_once_and_all_hear_of_it(world: World, fresh: bool) -> None:
    gate = world.gate()
    candidate = await world.model(f"lower wait {gate.path}")
    early, late = Heard(), Heard()
    first = world.compile(candidate, early, fresh=fresh)
    await early.until(LOWERED[0])
    second = world.compile(candidate, late, fresh=fresh)
    await late.until(LOWERED[0])
    assert late.stages == [(LOWERED[0], False, False)], "who comes late is told at once"
    gate.open()
    one, other = await asyncio.gather(first, second)
    assert one.compilation == other.compilation
    assert world.ran == ["lower"]
    assert late.stages == early.stages
    assert late.lines[-1] == "lower TO_EXECUTORCH"


class HeldCache(Cache):
    """A cache that keeps its first answer until `answered`."""

    def __init__(self, store: Store, database: Database) -> None:
        super().__init__(store, database)
        self.asked, self.answered = asyncio.Event(), asyncio.Event()

    async def compilation(self, key: str) -> compile_pb2.Compilation | None:
        known = await super().compilation(key)
        if not self.asked.is_set():
            self.asked.set()
            await self.answered.wait()
        return known


async def test_who_asked_the_cache_just_before_another_ended_does_not_compile_again(world: World) -> None:
    candidate, cache = await world.model("x"), HeldCache(world.store, world.database)
    world.start_compiler(cache=cache)
    late = world.compile(candidate)
    await cache.asked.wait()
    first = await world.compile(candidate)
    cache.answered.set()
    assert ((await late).compilation, (await late).cached) == (first.compilation, True)
    assert world.ran == ["lower"]


async def test_who_wants_no_cache_does_not_join_a_compilation_that_may_use_it(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    gate = world.gate()
    candidate = await world.model(f"lower wait {gate.path}", INT8)
    received = Heard()
    first = world.compile(candidate, received)
    await received.until(LOWERED[0])
    second = world.compile(candidate, again := Heard(), fresh=True)
    await again.until(LOWERED[0])
    gate.open()
    await asyncio.gather(first, second)
    assert world.ran[2:] == ["quantize", "lower"] * 2


async def test_a_quantization_outlives_the_cancel_of_one_of_the_two_that_wait_for_it(world: World) -> None:
    gate = world.gate()
    mine, theirs = Heard(), Heard()
    first = world.compile(await world.model(f"quantize wait {gate.path}", INT8), mine)
    await mine.until("QUANTIZE")
    second = world.compile(await world.model(f"quantize wait {gate.path}", PLANNED), theirs)
    await theirs.until("QUANTIZE")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    async with asyncio.timeout(WAIT_S):
        outcome = await second
    assert outcome.error is None
    assert world.ran == ["quantize", "lower"]
    assert mine.stages == [("QUANTIZE", False, False)]


@pytest.mark.parametrize("task", ["quantize", "lower"])
async def test_the_last_one_who_cancels_ends_the_child_and_nothing_of_it_stays(world: World, task: str) -> None:
    received, candidate = Heard(), await world.model(f"{task} hang", INT8)
    waiting = [world.compile(candidate, received), world.compile(candidate)]
    await received.until("QUANTIZE" if task == "quantize" else LOWERED[0])
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert len(world.folders()) == 1, "the other one still waits"
    async with asyncio.timeout(WAIT_S):
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
    assert not world.folders()
    assert not world.compiler.in_progress
    with pytest.raises(CompilationNotFound):
        await world.compiler.get(received.stages[0][0])


@pytest.mark.parametrize(("task", "ended"), [("quantize", ["QUANTIZE"]), ("lower", [*QUANTIZED, "TO_EDGE_TRANSFORM_AND_LOWER"])])
async def test_a_refused_model_is_refused_again_without_a_child_and_says_so(world: World, task: str, ended: list[str]) -> None:
    candidate = await world.model(f"{task} refuse", INT8)
    first = await world.compile(candidate)
    error = error_of(first)
    assert (error.reason, error.remedy, first.cached) == ("STAGE_FAILED", "Change it.", False)
    assert error.stage == ("TORCH_EXPORT" if task == "quantize" else "TO_EXECUTORCH")
    assert names(first.compilation.stages) == ended
    children = list(world.ran)
    again = await world.compile(candidate)
    assert world.ran == children
    assert again.cached
    assert error_of(again).remedy == f"Change it. {FOUND_EARLIER}"
    assert error_of(again).metadata["cached"] == "true"
    assert names(again.compilation.stages) == ended
    assert (await world.compiler.get(again.compilation.key)).error.remedy == "Change it."
    await world.compile(candidate, fresh=True)
    assert world.ran == children * 2


@pytest.mark.parametrize("task", ["quantize", "lower"])
async def test_what_was_printed_when_a_model_was_refused_is_told_again(world: World, task: str) -> None:
    refused = await world.model(f"{task} refuse", INT8)
    await world.compile(refused)
    planned = await world.model(f"{task} refuse", PLANNED)
    for candidate in [refused] if task == "lower" else [refused, planned]:
        received = Heard()
        outcome = await world.compile(candidate, received)
        stage = "TORCH_EXPORT" if task == "quantize" else "TO_EXECUTORCH"
        assert outcome.cached
        assert received.lines[-1] == f"{task} {stage}" and "failed with this error" in received.lines[0]
    fine, received = await world.model("x"), Heard()
    await world.compile(fine)
    await world.compile(fine, received)
    assert not received.lines


async def test_another_recipe_is_told_that_the_shared_stages_failed_before(world: World) -> None:
    await world.compile(await world.model("quantize refuse", INT8))
    other = await world.compile(await world.model("quantize refuse", PLANNED))
    assert world.ran == ["quantize"]
    assert other.cached and FOUND_EARLIER in error_of(other).remedy
    assert [(stage.stage, stage.cached) for stage in other.compilation.stages] == [("QUANTIZE", True)]


@pytest.mark.parametrize(("orders", "reason"), [("lower die", "COMPILER_CRASHED"), ("lower escape", "BAD_WORKER_ANSWER")])
async def test_what_may_not_come_again_is_not_kept(world: World, orders: str, reason: str) -> None:
    candidate = await world.model(orders)
    first = await world.compile(candidate)
    assert error_of(first).reason == reason
    with pytest.raises(CompilationNotFound):
        await world.compiler.get(first.compilation.key)
    assert not (await world.compile(candidate)).cached
    assert world.ran == ["lower", "lower"]


@pytest.mark.parametrize(
    "orders",
    [
        "quantize say programs {}",
        'quantize say programs {"other":"forward.pt2"}',
        'quantize say programs {"forward":""}',
        'quantize say stages [{"stage":"REST","duration_ms":1,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":null,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":-1,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":NaN,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":Infinity,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1e300,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1,"methods":{"forward":NaN}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1,"methods":{"forward":-1}}]',
        'quantize say warnings [{"code":"A","message":"\\u0000"}]',
        'quantize say delegation {"forward":{"subgraphs":1,"delegated_nodes":0,"non_delegated_nodes":0,"operators":[]}}',
        f"quantize add {of_compilation(warnings=[{'code': 'A', 'message': 'X'}]).replace(b'X', bytes([0xFF])).hex()}",
        f"quantize add {of_compilation(stages=[{'stage': 'QUANTIZE', 'duration_ms': 1, 'where': 77}]).hex()}",
        f"quantize add {of_compilation(key='k').hex()}",
        f"quantize add {of_compilation(exported_programs={'forward': common_pb2.Artifact(digest='0' * 64)}).hex()}",
        "quantize answer 00",
        f"quantize answer {b'{}'.hex()}",
        "quantize flood",
        "lower say program null",
        "lower say facts null",
        'lower say program {"pte":"..","data":{}}',
        'lower say program {"pte":"' + "a" * 300 + '","data":{}}',
        'lower say program {"pte":"model.pte","data":{"weights":"/etc/passwd"}}',
        f"lower add {of_compilation(program=compile_pb2.Program(digest='0' * 64)).hex()}",
        f"lower add {of_compilation(etrecord=common_pb2.Artifact(digest='0' * 64)).hex()}",
        f"lower add {of_compilation(error=common_pb2.Error(reason='STAGE_FAILED')).hex()}",
        f"lower add {of_compilation(checks=[{'method': 'forward', 'inputs': 4}]).hex()}",
        f"lower add {of_compilation(delegation={chr(0): compile_pb2.Delegation()}).hex()}",
    ],
)
async def test_an_answer_that_cannot_be_right_is_refused_and_not_kept(world: World, orders: str) -> None:
    outcome = await world.compile(await world.model(orders, INT8))
    assert error_of(outcome).reason == "BAD_WORKER_ANSWER"
    assert len(error_of(outcome).message) < 1000
    assert not outcome.lasting
    assert not outcome.compilation.HasField("program")


async def test_fields_that_no_version_has_are_dropped(world: World) -> None:
    unknown = child_pb2.CompileResult(compilation=compile_pb2.Compilation.FromString(b"\xfa\x7f\x03abc")).SerializeToString()
    assert b"abc" in unknown
    created = (await world.compile(await world.model(f"lower add {unknown.hex()}"))).compilation
    assert created.HasField("program") and b"abc" not in created.SerializeToString()


async def test_a_child_cannot_put_another_folder_in_place_of_its_own(world: World) -> None:
    outcome = await world.compile(await world.model("lower move", INT8))
    assert "Device or resource busy" in error_of(outcome).message or "Permission denied" in error_of(outcome).message
    assert not outcome.lasting
    assert not outcome.compilation.HasField("program")


async def test_a_stage_that_hangs_ends_by_its_own_clock_and_is_not_kept(world: World) -> None:
    world.start_compiler(stage_deadline_s=3.0)  # so late that the child is in the stage
    outcome = await world.compile(await world.model("quantize hang", INT8))
    error = error_of(outcome)
    assert (error.reason, error.stage, error.metadata["clock"]) == ("CHILD_TIMED_OUT", "QUANTIZE", "stage")
    assert not outcome.lasting
    assert not world.folders()


async def test_a_model_that_is_gone_from_the_store_is_no_failure_to_keep(world: World) -> None:
    candidate = await world.model("x")
    world.lose(candidate.model.methods["forward"].exported_program)
    outcome = await world.compile(candidate)
    assert error_of(outcome).reason == "ARTIFACT_NOT_FOUND"
    assert not outcome.lasting


async def test_a_failure_does_not_take_the_place_of_a_program(world: World) -> None:
    good = (await world.compile(await world.model("x"))).compilation
    bad = type(good)(key=good.key)
    bad.error.reason = "STAGE_FAILED"
    await world.cache.keep_compilation(bad)
    assert await world.compiler.get(good.key) == good
    for artifact in artifacts_of(good):
        world.lose(artifact)
    await world.cache.keep_compilation(bad)
    assert await world.compiler.get(good.key) == bad


async def test_a_recipe_whose_tools_are_missing_is_refused_by_name(world: World) -> None:
    coreml = recipes.parse("coreml_fp16")
    await world.compiler.check(coreml)
    await world.compiler.recipes()
    with pytest.raises(RecipeUnavailable, match="coremltools"):
        await world.compiler.check(coreml)
    world.start_compiler()
    outcome = await world.compile(await world.model("x", coreml.json))
    assert error_of(outcome).reason == "RECIPE_UNAVAILABLE"
    assert not outcome.lasting


async def test_a_recipe_that_needs_nothing_does_not_wait_for_the_list_of_what_is_missing(world: World) -> None:
    await world.compile(await world.model("x"))
    assert world.workers.ran == ["lower"]


async def test_plug_ins_that_are_not_installed_are_refused_with_what_there_is(world: World) -> None:
    with pytest.raises(UnknownRecipe, match=r"acme\.plain"):
        await world.compiler.check(recipes.parse("acme.plane"))
    await world.compiler.check(recipes.parse("acme.plain"))
    replaced = recipes.from_toml('recipe = "portable"\n[replace]\nTO_EXECUTORCH = "acme.stage"\n')
    with pytest.raises(UnknownStage, match=r"acme\.stage"):
        await world.compiler.check(replaced)


async def test_what_a_plug_ins_recipe_does_to_numbers_its_server_knows(world: World) -> None:
    created = (await world.compile(await world.model("x", recipes.parse("acme.static").json))).compilation
    assert names(created.stages) == [*QUANTIZED, *LOWERED]
    assert names((await world.compile(await world.model("x", recipes.parse("acme.plain").json))).compilation.stages) == LOWERED


async def test_a_project_holds_what_it_asked_for_whoever_had_it_compiled_first(world: World) -> None:
    vision, audio = Scope(frozenset({"vision"})), Scope(frozenset({"audio"}))
    first = (await world.compile(await world.model("x", INT8), project="vision")).compilation
    files = [artifact.digest for artifact in artifacts_of(first)]
    assert files
    assert await world.store.missing(files, "vision") == []
    assert await world.store.missing(files, "audio") == files
    assert await world.compiler.get_visible(first.key, vision) == first
    with pytest.raises(CompilationNotFound) as refused:
        await world.compiler.get_visible(first.key, audio)
    with pytest.raises(CompilationNotFound) as absent:
        await world.compiler.get_visible("0" * 64, audio)
    assert str(refused.value).replace(first.key[:12], "K") == str(absent.value).replace("0" * 12, "K")
    assert (await world.compile(await world.model("x", INT8), project="audio")).cached
    assert await world.store.missing(files, "audio") == []
    assert await world.compiler.get_visible(first.key, audio) == first


async def test_a_compilation_that_another_project_has_replaced_is_still_readable(world: World) -> None:
    await world.compile(await world.model("x", INT8), project="vision")
    other = (await world.compile(await world.model("x", INT8), project="audio", fresh=True)).compilation
    created = await world.compiler.get_visible(other.key, Scope(frozenset({"vision"})))
    assert created == other
    assert await world.store.missing([artifact.digest for artifact in artifacts_of(created)], "vision") == []


async def test_children_whose_findings_serve_every_project_do_not_learn_what_this_one_calls_its_model(world: World) -> None:
    candidate = await world.model("quantize refuse", INT8)
    candidate.name = candidate.model.name = "the-name-that-vision-gave"
    await world.compile(candidate, project="vision")
    assert world.workers.requests and "the-name" not in "".join(world.workers.requests)
    again = await world.compile(await world.model("quantize refuse", INT8), project="audio")
    assert again.cached and again.error is not None
    assert (await world.compiler.get_visible(again.compilation.key, Scope(frozenset({"audio"})))).HasField("error")


class NoScreening(Screening):
    async def screen_pt2(self, digest: str) -> None:
        pass


@pytest.mark.parametrize("padding", ["", "a" * 5000], ids=["small", "large"])
async def test_a_recipe_is_parsed_once_for_a_submission_and_all_of_its_cells(
    world: World, monkeypatch: pytest.MonkeyPatch, padding: str
) -> None:
    parsed = []

    def counted(text: str) -> recipes.Recipe:
        parsed.append(text)
        return original(text)

    original = recipes.from_json
    # A file that only this test has, since recipes stay parsed for the life of a process.
    operators = ", ".join(f'"aten.linear.once{index}"' for index in range(1 + len(padding) // 20))
    recipe = recipes.from_toml(f'recipe = "xnnpack_fp32"\n[edge]\npreserve_ops = [{operators}]\n').json
    monkeypatch.setattr(recipes, "from_json", counted)
    candidate = await world.model(recipe=recipe)
    submission = Submission(
        world.store, list, world.compiler.check, iter(map(str, range(9))).__next__, screening=NoScreening(world.store.path)
    )
    spec = JobSpec(candidates=[candidate])
    await submission.make(spec, owner="ann", project="default", at=datetime(2026, 1, 1, tzinfo=UTC))
    for _ in range(3):
        assert (await world.compile(candidate)).error is None
    assert candidate_of(candidate) is not None
    assert parsed == [recipe]
