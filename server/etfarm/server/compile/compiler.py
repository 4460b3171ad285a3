"""The compiler of candidates: at most two children per candidate, one compilation per key, and answers from the cache."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from etfarm.server.access.scope import Scope
from etfarm.server.artifacts.store import Store
from etfarm.server.compile import answers
from etfarm.server.compile.cache import Cache, Outcome, is_lasting
from etfarm.server.compile.keys import Plan, original_of, plan, toolchain
from etfarm.server.compile.parsed_recipes import parse_recipe
from etfarm.server.compile.recipe_catalog import RecipeCatalog
from etfarm.server.compile.request import InspectRequest, LowerRequest, QuantizeRequest
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.compile.single_flight import Listener, SingleFlight, Subscribers
from etfarm.server.state.engine import Database
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import common_pb2, compile_pb2, job_pb2
from etfarm.v1.compile_pb2 import Compilation
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import Recipe
from etfarm.wire.status import to_proto

_ANY_MODEL: Final = "model"
"""Name of every model in children: a compilation may serve several projects, which must not learn each other's model names."""

_LARGE_CANDIDATE: Final = 64 << 10
_KEPT_KEYS: Final = 1_000

_LOG_LINES: Final = 60
_LOG_CHARACTERS: Final = 6000
"""Maximum length of the log that is kept of a failed compilation: the end of the log, which has the original error."""


class OnCompiled(Protocol):
    """A callback for the outcomes of compilations."""

    def __call__(self, compilation: Compilation, *, cached: bool) -> None:
        """Handle an outcome, which may be a failure."""


@dataclass(frozen=True)
class Tasks:
    """The children's entry points, `module:function`."""

    quantize: str = "etfarm.server.compile.lower.tasks:quantize_model"
    lower: str = "etfarm.server.compile.lower.tasks:lower_model"
    inspect: str = "etfarm.server.compile.inspect.facts:inspect_pte"
    recipes: str = "etfarm.server.compile.lower.available:list_recipes"


class Compiler:
    """The compiler of the server's candidates.

    Args:
        deadline_s: wall-clock deadline of each child.
        stage_deadline_s: wall-clock deadline of each stage.
        threads: number of threads that a child may use.
        operators: operators that programs may use.
        cache: finished compilations; those of the database by default.
    """

    def __init__(
        self,
        workers: ChildPool,
        store: Store,
        database: Database,
        *,
        deadline_s: float,
        stage_deadline_s: float,
        threads: int,
        tasks: Tasks | None = None,
        operators: Operators | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._workers = workers
        self._store = store
        self._cache = cache or Cache(store, database)
        self._deadline_s = deadline_s
        self._stage_deadline_s = stage_deadline_s
        self._threads = threads
        self._tasks = tasks or Tasks()
        self._operators = operators or Operators()
        self._toolchain = toolchain()
        self._compilations: SingleFlight[Outcome] = SingleFlight("compile")
        self._quantizations: SingleFlight[Outcome] = SingleFlight("quantize")
        self._catalog = RecipeCatalog(workers, self._tasks.recipes, deadline_s=deadline_s)
        self._planning = asyncio.Lock()
        self.on_compiled: OnCompiled = lambda compilation, *, cached: None
        """Called with each outcome: once for those who shared the work, and for each answer from the cache."""
        self._keys: OrderedDict[tuple[bytes, str], tuple[str, str]] = OrderedDict()
        """Keys of the compilation and the quantization of large candidates, by the candidate's bytes and the last stage."""

    @property
    def in_progress(self) -> tuple[str, ...]:
        """The keys of compilations and quantizations in progress."""
        return self._compilations.keys + self._quantizations.keys

    async def get(self, key: str) -> Compilation:
        """Return a finished compilation, which may have failed.

        Raises:
            CompilationNotFound: no compilation has the key.
        """
        return await self._cache.get(key)

    async def get_visible(self, key: str, scope: Scope) -> Compilation:
        """Return a finished compilation that one of the scope's projects requested, and whose files it may read.

        Raises:
            CompilationNotFound: no compilation has the key, or only other projects requested it.
        """
        return await self._cache.get_visible(key, scope)

    async def compile(
        self,
        candidate: job_pb2.Candidate,
        *,
        owner: str,
        project: str,
        fresh: bool,
        listener: Listener,
        stop_after: str = "",
        quantize_again: bool = True,
    ) -> Outcome:
        """Compile a candidate and return the outcome, which may be a failure.

        Equal candidates that arrive at the same time are compiled once; the cancellation of the last waiting caller ends the
        children. The project holds the outcome, whichever project had it compiled first.

        Args:
            project: the requesting project, which may read the compilation and its files from then on.
            fresh: compile again although the cache has an answer.
            stop_after: a stage of the candidate's recipe; empty for a whole program.
            quantize_again: with `fresh`, the shared stages too.
        """
        todo = await self._plan(candidate, stop_after)
        outcome = await self._compile_once(todo, owner, project, fresh, quantize_again, listener)
        if outcome.cached:
            self.on_compiled(outcome.compilation, cached=True)
        await self._cache.give(project, outcome.compilation, owner)
        return outcome

    async def _plan(self, candidate: job_pb2.Candidate, stop_after: str) -> Plan:
        """Plan the work for a candidate.

        The keys of a large candidate, a digest of up to a hundred thousand calibration samples, are computed in a thread, one
        at a time, and once for all cells of a job.
        """
        recipe = await self._recipe_of(candidate)
        if candidate.ByteSize() < _LARGE_CANDIDATE:
            return plan(candidate, recipe, stop_after, self._operators)

        def large() -> Plan:
            content_digest = hashlib.sha256(candidate.SerializeToString(deterministic=True)).digest()
            if (keys := self._keys.get((content_digest, stop_after))) is not None:
                self._keys.move_to_end((content_digest, stop_after))
                shortened = job_pb2.Candidate()
                shortened.CopyFrom(candidate)
                for method in shortened.model.methods.values():
                    method.ClearField("calibration")
                return replace(
                    plan(shortened, recipe, stop_after, self._operators),
                    candidate=candidate,
                    key=keys[0],
                    quantization_key=keys[1],
                )
            todo = plan(candidate, recipe, stop_after, self._operators)
            self._keys[content_digest, stop_after] = todo.key, todo.quantization_key
            if len(self._keys) > _KEPT_KEYS:
                self._keys.popitem(last=False)
            return todo

        async with self._planning:
            return await asyncio.to_thread(large)

    async def _compile_once(
        self, todo: Plan, owner: str, project: str, fresh: bool, quantize_again: bool, listener: Listener
    ) -> Outcome:
        if not fresh and (known := await self._cache.compilation(todo.key)) is not None:
            _replay_log(known, listener)
            return Outcome(known, cached=True)

        async def work(subscribers: Subscribers) -> Outcome:
            # An equal compilation may have ended since the cache was read.
            if not fresh and (known := await self._cache.compilation(todo.key)) is not None:
                return Outcome(known, cached=True)
            outcome = await self._compile_stages(todo, owner, project, fresh and quantize_again, subscribers)
            self.on_compiled(outcome.compilation, cached=False)
            if outcome.lasting:
                await self._cache.keep_compilation(outcome.compilation)
            return outcome

        return await self._compilations.join(_shared_keys(todo.key, fresh), work, listener)

    async def _compile_stages(self, todo: Plan, owner: str, project: str, fresh: bool, subscribers: Subscribers) -> Outcome:
        compilation = Compilation(key=todo.key, toolchain=self._toolchain, stopped_after=todo.stop_after)
        try:
            if todo.recipe is None:
                return await self._inspect(todo, compilation, owner, project, subscribers)
            await self._catalog.require_available(todo.recipe)
            sources = {name: method.exported_program for name, method in todo.candidate.model.methods.items()}
            lowered_from = sources
            if todo.quantization_key:
                quantized = await self._quantize(todo, owner, project, fresh, subscribers.listener)
                _add_shared(compilation, quantized)
                if compilation.HasField("error"):
                    return replace(quantized, compilation=compilation)
                lowered_from = dict(quantized.compilation.exported_programs)
            for name, artifact in lowered_from.items():
                compilation.exported_programs[name].CopyFrom(artifact)
            model = todo.candidate.model
            await self._require_whole(lowered_from, model.constant_methods)
            await self._store.require_whole(call.inputs.digest for call in model.calls if call.HasField("inputs"))
            await self._store.require_whole(original_of(method).digest for method in model.methods.values())
            request = LowerRequest(
                models=self._paths(lowered_from),
                originals=self._paths({name: original_of(method) for name, method in model.methods.items()}),
                quantized_here=lowered_from is not sources, model_name=_ANY_MODEL,
                recipe_json=todo.candidate.recipe, constant_methods=self._paths(model.constant_methods),
                stop_after=todo.stop_after or None, threads=self._threads, operators=self._operators,
                calls=[
                    (call.method, self._store.path(call.inputs.digest) if call.HasField("inputs") else None)
                    for call in model.calls
                ],
            )  # fmt: skip
        except EtfarmError as error:
            return _failure(compilation, error)
        read = partial(answers.lowered, stop_after=todo.stop_after)
        return await self._run_child(self._tasks.lower, request, compilation, owner, project, subscribers, read)

    async def _quantize(self, todo: Plan, owner: str, project: str, fresh: bool, listener: Listener) -> Outcome:
        """Return the outcome of QUANTIZE and the export after it, which all compilations that lower it share."""
        if not fresh and (known := await self._cache.stages(todo.quantization_key)) is not None:
            for stage in known.stages:
                listener.on_stage(stage.stage, stage.duration_ms, cached=True)
            _replay_log(known, listener)
            return Outcome(known, cached=True)

        async def work(subscribers: Subscribers) -> Outcome:
            compilation = Compilation(key=todo.quantization_key)
            try:
                model = todo.candidate.model
                # There may be tens of thousands of calibration samples.
                await self._store.require_whole(
                    artifact.digest
                    for method in model.methods.values()
                    for artifact in (method.exported_program, *method.calibration)
                )
                request = await asyncio.to_thread(self._quantize_request, todo)
            except EtfarmError as error:
                return _failure(compilation, error)
            read = partial(answers.quantized, methods=todo.candidate.model.methods)
            outcome = await self._run_child(self._tasks.quantize, request, compilation, owner, project, subscribers, read)
            if outcome.lasting:
                await self._cache.keep_stages(outcome.compilation)
            return outcome

        return await self._quantizations.join(_shared_keys(todo.quantization_key, fresh), work, listener)

    def _quantize_request(self, todo: Plan) -> QuantizeRequest:
        model = todo.candidate.model
        samples = {name: [artifact.digest for artifact in method.calibration] for name, method in model.methods.items()}
        return QuantizeRequest(
            models=self._paths({name: method.exported_program for name, method in model.methods.items()}),
            model_name=_ANY_MODEL, recipe_json=todo.candidate.recipe,
            calibration={name: [self._store.path(digest) for digest in digests] for name, digests in samples.items()},
            threads=self._threads, operators=self._operators,
        )  # fmt: skip

    async def _inspect(self, todo: Plan, compilation: Compilation, owner: str, project: str, subscribers: Subscribers) -> Outcome:
        program = todo.candidate.program
        compilation.program.CopyFrom(program)
        await self._store.require_whole([program.pte.digest])
        request = InspectRequest(pte=self._store.path(program.pte.digest), model_name=_ANY_MODEL, threads=self._threads)
        return await self._run_child(self._tasks.inspect, request, compilation, owner, project, subscribers, answers.inspected)

    async def _run_child(
        self,
        task: str,
        request: object,
        compilation: Compilation,
        owner: str,
        project: str,
        subscribers: Subscribers,
        read: Callable[[bytes, answers.Files], Awaitable[Compilation]],
    ) -> Outcome:
        """Run one child and add its answer to `compilation`; if it fails, add the stages that ended and the error."""
        ended: list[compile_pb2.Stage] = []
        reported: set[tuple[str, bool]] = set()
        lines: deque[str] = deque(maxlen=_LOG_LINES)

        def on_log(line: str) -> None:
            lines.append(line)
            subscribers.on_log(line)

        def on_event(data: bytes) -> None:
            stage, duration_ms = answers.stage_event(data)
            if (stage, duration_ms is None) in reported:
                raise BadWorkerAnswer(f"A compile child reports {stage} twice.")
            reported.add((stage, duration_ms is None))
            if duration_ms is not None:
                ended.append(compile_pb2.Stage(stage=stage, duration_ms=duration_ms, where=common_pb2.ACTOR_SERVER))
            subscribers.on_stage(stage, duration_ms)

        def on_restart() -> None:
            for events in (ended, reported, lines):
                events.clear()

        try:
            finished = await self._workers.run(
                task, request, deadline_s=self._deadline_s, stage_deadline_s=self._stage_deadline_s,
                light=task == self._tasks.inspect, whose=project, on_event=on_event, on_log=on_log,
                on_restart=on_restart, on_turn=subscribers.on_turn,
            )  # fmt: skip
            async with finished:
                files = answers.Files(self._store, finished.folder, owner, project)
                compilation.MergeFrom(await read(finished.result, files))
        except EtfarmError as error:
            compilation.stages.extend(ended)
            if lines and is_lasting(error):
                error.metadata.setdefault("log", "\n".join(lines)[-_LOG_CHARACTERS:])
            return _failure(compilation, error)
        return Outcome(compilation)

    async def _require_whole(self, *artifacts: Mapping[str, common_pb2.Artifact]) -> None:
        await self._store.require_whole(artifact.digest for named in artifacts for artifact in named.values())

    def _paths(self, artifacts: Mapping[str, common_pb2.Artifact]) -> dict[str, Path]:
        return {name: self._store.path(artifact.digest) for name, artifact in artifacts.items()}

    async def check(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the specifications of its plug-ins, as `RecipeCatalog.check`.

        Raises:
            RECIPE_UNAVAILABLE, UNKNOWN_RECIPE, UNKNOWN_STAGE: this server cannot compile with it.
        """
        return await self._catalog.check(recipe)

    async def _recipe_of(self, candidate: job_pb2.Candidate) -> Recipe | None:
        if candidate.WhichOneof("source") == "program":
            return None
        return await self._catalog.resolve(parse_recipe(candidate.recipe))

    async def recipes(self) -> compile_pb2.ListRecipesResponse:
        """Return all recipes with what is missing for those that cannot run here, as `RecipeCatalog.recipes`."""
        return await self._catalog.recipes()


def _shared_keys(key: str, fresh: bool) -> list[str]:
    """Return the keys of work that a request may join: a fresh request must not join work that may use cached parts."""
    fresh_key = f"{key} again"
    return [fresh_key] if fresh else [key, fresh_key]


def _add_shared(compilation: Compilation, shared: Outcome) -> None:
    """Add the results of shared stages to a compilation."""
    for stage in shared.compilation.stages:
        compilation.stages.add().CopyFrom(stage)
        compilation.stages[-1].cached = shared.cached
    compilation.warnings.extend(shared.compilation.warnings)
    for method, operators in shared.compilation.stayed_fp32.items():
        compilation.stayed_fp32[method].CopyFrom(operators)
    for method, names in shared.compilation.selected.items():
        compilation.selected[method].CopyFrom(names)
    if shared.compilation.HasField("error"):
        compilation.error.CopyFrom(shared.compilation.error)


def _replay_log(known: Compilation, listener: Listener) -> None:
    """Replay the log of a cached failure for a job that receives the failure later."""
    if (log := known.error.metadata.get("log", "")) and known.HasField("error"):
        listener.on_log("The last lines of the compilation that failed with this error:")
        for line in log.splitlines():
            listener.on_log(line)


def _failure(compilation: Compilation, error: EtfarmError) -> Outcome:
    compilation.error.CopyFrom(to_proto(error))
    return Outcome(compilation, lasting=is_lasting(error))
