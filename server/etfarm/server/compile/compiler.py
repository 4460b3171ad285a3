"""The daemon's side of compiling: one compilation a key, answered from the cache where it was done before."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.request import CompileRequest
from etfarm.server.compile.result import DimRange, MethodFacts, ValueFacts
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.workers.pool import Finished, Workers
from etfarm.v1 import compile_pb2, job_pb2
from etfarm.wire import digest as digests
from etfarm.wire import recipes
from etfarm.wire.errors import FarmError, Kind, UserError
from etfarm.wire.names import STAGES

COMPILE_TASK: Final = "etfarm.server.compile.pipeline:compile_model"
INSPECT_TASK: Final = "etfarm.server.compile.facts:inspect_pte"
RECIPES_TASK: Final = "etfarm.server.compile.available:list_recipes"

StageTold = Callable[[str, float | None], None]
"""Told (stage, None) when a stage starts and (stage, milliseconds) when it has ended."""


_Told = tuple[StageTold, Callable[[str], None]]


class CompilationNotFound(UserError):
    """Nothing was compiled under a key."""

    reason = "COMPILATION_NOT_FOUND"
    kind = Kind.NOT_FOUND


class RecipeUnavailable(UserError):
    """This server lacks what a recipe needs."""

    reason = "RECIPE_UNAVAILABLE"
    kind = Kind.FAILED_PRECONDITION


class BadWorkerAnswer(FarmError):
    """A worker's answer cannot be read. It ran user bytes: it is not trusted to be well-formed."""

    reason = "BAD_WORKER_ANSWER"


@dataclass
class _Flight:
    """One compilation under way and who waits for it."""

    task: asyncio.Task[compile_pb2.Compilation]
    told: list[_Told]
    waiting: int = 0


def toolchain() -> compile_pb2.Toolchain:
    """The versions that take part in a compilation; read from the installed packages, nothing is imported."""
    return compile_pb2.Toolchain(
        torch=version("torch"), executorch=version("executorch"), torchao=version("torchao"), etfarm=version("etfarm")
    )


class Compiler:
    """Turns candidates into programs.

    Args:
        deadline_s: of one compilation, wall clock.
        threads: that a child may use.
    """

    def __init__(self, workers: Workers, store: Store, database: Database, *, deadline_s: float, threads: int) -> None:
        self._workers = workers
        self._store = store
        self._database = database
        self._deadline_s = deadline_s
        self._threads = threads
        self._toolchain = toolchain()
        self._flights: dict[str, _Flight] = {}
        self._recipes: compile_pb2.ListRecipesResponse | None = None

    def key(self, candidate: job_pb2.Candidate) -> str:
        """The compilation's key: all that its outcome depends on. Shapes, dtypes and dim orders are in the model's bytes."""
        if candidate.WhichOneof("source") == "program":
            return digests.of_value(
                {"schema": "etfarm.inspection/1", "program": _program_digest(candidate.program), **self._versions()}
            )
        methods = {
            name: {
                "exported_program": method.exported_program.digest,
                "calibration": [artifact.digest for artifact in method.calibration],
            }
            for name, method in candidate.model.methods.items()
        }
        recipe_digest = digests.of_bytes(candidate.recipe.encode())
        stages = [stage.stage for stage in candidate.stages_done]
        return digests.of_value(
            {
                "schema": "etfarm.compilation/1",
                "methods": methods,
                "recipe": recipe_digest,
                "stages_done": stages,
                **self._versions(),
            }
        )

    def _versions(self) -> dict[str, str]:
        tools = self._toolchain
        return {"torch": tools.torch, "executorch": tools.executorch, "torchao": tools.torchao, "etfarm": tools.etfarm}

    async def get(self, key: str) -> compile_pb2.Compilation:
        """A finished compilation.

        Raises:
            CompilationNotFound: there is none under the key.
        """
        query = select(schema.compilations.c.body).where(schema.compilations.c.key == key)
        body = await self._database.read(lambda connection: connection.execute(query).scalar())
        if body is None:
            raise CompilationNotFound(f"Nothing was compiled under the key {key[:12]}.", key=key)
        return compile_pb2.Compilation.FromString(body)

    async def cached(self, key: str) -> compile_pb2.Compilation | None:
        """A finished compilation whose artifacts are all still stored."""
        try:
            compilation = await self.get(key)
        except CompilationNotFound:
            return None
        needed = [compilation.program.pte, *compilation.example_inputs.values()]
        if compilation.HasField("etrecord"):
            needed.append(compilation.etrecord)
        return None if self._store.missing(artifact.digest for artifact in needed) else compilation

    async def compile(
        self, candidate: job_pb2.Candidate, *, owner: str, fresh: bool, on_stage: StageTold, on_log: Callable[[str], None]
    ) -> tuple[compile_pb2.Compilation, bool]:
        """The candidate's compilation, and whether the cache had it. Equal ones that come at one time are done once; a
        cancelled caller ends the child when nobody else waits for it.

        Raises:
            EtfarmError: what the worker or the stage says.
        """
        key = self.key(candidate)
        if not fresh and (known := await self.cached(key)) is not None:
            return known, True
        flight = self._flights.get(key)
        if flight is None:
            told: list[_Told] = []
            flight = _Flight(asyncio.create_task(self._work(key, candidate, owner, told), name=f"compile-{key[:12]}"), told)
            self._flights[key] = flight
        flight.waiting += 1
        flight.told.append((on_stage, on_log))
        try:
            return await asyncio.shield(flight.task), False
        finally:
            flight.waiting -= 1
            flight.told.remove((on_stage, on_log))
            if not flight.waiting:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                if not flight.task.done():
                    flight.task.cancel()
                    await asyncio.wait([flight.task])

    async def _work(
        self, key: str, candidate: job_pb2.Candidate, owner: str, listeners: Sequence[_Told]
    ) -> compile_pb2.Compilation:
        is_program = candidate.WhichOneof("source") == "program"
        if not is_program:
            await self.recipes()
            self.check_available(recipes.from_json(candidate.recipe).name)

        def on_event(data: bytes) -> None:
            stage, duration_ms = _stage_event(data)
            for on_stage, _ in listeners:
                on_stage(stage, duration_ms)

        def on_log(line: str) -> None:
            for _, told in listeners:
                told(line)

        finished = await self._workers.run(
            INSPECT_TASK if is_program else COMPILE_TASK, self._request(candidate),
            deadline_s=self._deadline_s, on_event=on_event, on_log=on_log,
        )  # fmt: skip
        async with finished:
            compilation = await self._gather(key, candidate, finished, owner)
        row = {"key": key, "body": compilation.SerializeToString(), "compiled_at": datetime.now(UTC)}

        def write(connection: Connection) -> None:
            again = {"body": row["body"], "compiled_at": row["compiled_at"]}
            connection.execute(insert(schema.compilations).values(row).on_conflict_do_update(index_elements=["key"], set_=again))

        await self._database.write(write, durable=True)
        return compilation

    def _request(self, candidate: job_pb2.Candidate) -> CompileRequest:
        if candidate.WhichOneof("source") == "program":
            return CompileRequest(
                model=None, pte=self._store.path(candidate.program.pte.digest), model_name=candidate.name, threads=self._threads
            )
        (name, method), *_ = candidate.model.methods.items()
        return CompileRequest(
            model=self._store.path(method.exported_program.digest),
            pte=None,
            model_name=candidate.model.name,
            recipe_json=candidate.recipe,
            calibration={name: [self._store.path(artifact.digest) for artifact in method.calibration]},
            threads=self._threads,
            method=name,
        )

    async def _gather(self, key: str, candidate: job_pb2.Candidate, finished: Finished, owner: str) -> compile_pb2.Compilation:
        """Takes a child's files into the store and its words into a message. Nothing of it is trusted to be well-formed."""
        answer = _parse(finished.result)
        try:
            compilation = compile_pb2.Compilation(key=key, toolchain=self._toolchain)
            if candidate.WhichOneof("source") == "program":
                compilation.program.CopyFrom(candidate.program)
            else:
                pte = await self._store.adopt(_inside(finished.folder, answer["program"]["pte"]), owner)
                compilation.program.pte.CopyFrom(pte)
            compilation.program.digest = _program_digest(compilation.program)
            if answer.get("etrecord"):
                compilation.etrecord.CopyFrom(await self._store.adopt(_inside(finished.folder, answer["etrecord"]), owner))
            for method, file in answer.get("inputs", {}).items():
                artifact = await self._store.adopt(_inside(finished.folder, file), owner)
                compilation.example_inputs[method].CopyFrom(artifact)
            compilation.stages.extend(compile_pb2.Stage(**stage) for stage in answer["stages"])
            compilation.warnings.extend(compile_pb2.Warning(**warning) for warning in answer["warnings"])
            for method, delegation in answer["delegation"].items():
                compilation.delegation[method].CopyFrom(_delegation(delegation))
            for method, facts in answer["facts"]["methods"].items():
                compilation.facts.methods[method].CopyFrom(_method_facts(facts))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadWorkerAnswer(f"The compile worker's answer cannot be read: {error!r}.") from error
        return compilation

    def check_available(self, name: str) -> None:
        """Refuses a recipe that cannot work here; says nothing before `recipes` was asked once.

        Raises:
            RecipeUnavailable: the sentence says what is missing.
        """
        for recipe in self._recipes.recipes if self._recipes else ():
            if recipe.name == name and not recipe.available:
                raise RecipeUnavailable(
                    f"This server cannot compile with {name}: {recipe.missing.rstrip('.')}.",
                    "Install it there, or choose one of `etfarm recipes list`.", recipe=name, missing=recipe.missing,
                )  # fmt: skip

    async def recipes(self) -> compile_pb2.ListRecipesResponse:
        """All recipes with what is missing for those that cannot run here; asked of a child once."""
        if self._recipes is None:
            finished = await self._workers.run(RECIPES_TASK, None, deadline_s=self._deadline_s)
            async with finished:
                rows = _parse(finished.result)["recipes"]
            self._recipes = compile_pb2.ListRecipesResponse(recipes=[compile_pb2.RecipeInfo(**row) for row in rows])
        return self._recipes


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadWorkerAnswer(f"The compile worker's answer is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadWorkerAnswer("The compile worker's answer is no JSON object.")
    return value


def _stage_event(data: bytes) -> tuple[str, float | None]:
    event = _parse(data)
    stage, duration_ms = event.get("stage"), event.get("duration_ms")
    if stage not in STAGES or event.get("phase") not in ("START", "END"):
        raise BadWorkerAnswer("The compile worker tells of a stage that there is not.")
    if event["phase"] == "START":
        return stage, None
    if not isinstance(duration_ms, int | float) or not 0 <= duration_ms < math.inf:
        raise BadWorkerAnswer("The compile worker tells of a stage without its duration.")
    return stage, float(duration_ms)


def _inside(folder: Path, name: str) -> Path:
    """The child's own file: a name, never a way out of its folder, never a link."""
    path = folder / name
    if "/" in name or path.is_symlink() or not path.is_file():
        raise BadWorkerAnswer(f"The compile worker names {name!r}, which is no file of its folder.")
    return path


def _program_digest(program: compile_pb2.Program) -> str:
    return digests.of_program(program.pte.digest, {name: artifact.digest for name, artifact in program.data.items()})


def _delegation(value: Mapping[str, Any]) -> compile_pb2.Delegation:
    return compile_pb2.Delegation(
        subgraphs=value["subgraphs"], delegated_nodes=value["delegated_nodes"], non_delegated_nodes=value["non_delegated_nodes"],
        operators=[compile_pb2.OperatorDelegation(**row) for row in value["operators"]],
    )  # fmt: skip


def _method_facts(value: Mapping[str, Any]) -> compile_pb2.MethodFacts:
    return compile_pb2.MethodFacts(
        inputs=[_value_spec(spec) for spec in value["inputs"]], outputs=[_value_spec(spec) for spec in value["outputs"]],
        operators=value["operators"], backends=value["backends"], planned_bytes=value["planned_bytes"],
    )  # fmt: skip


def _value_spec(value: Mapping[str, Any]) -> compile_pb2.ValueSpec:
    spec = compile_pb2.ValueSpec(name=value.get("name") or "", kind=value["kind"], dtype=value.get("dtype") or "")
    for dim in value.get("dims") or ():
        low, high = (dim, dim) if isinstance(dim, int) else (dim["min"], dim["max"])
        spec.dims.add(min=low, max=high)
    spec.dim_order.extend(value.get("dim_order") or ())
    if "value" in value:
        spec.value = json.dumps(value["value"])
    return spec


def facts_of(facts: compile_pb2.MethodFacts) -> MethodFacts:
    """A method's facts as `compile.inputs` reads them."""
    return {
        "inputs": [_value_facts(spec) for spec in facts.inputs], "outputs": [_value_facts(spec) for spec in facts.outputs],
        "operators": list(facts.operators), "backends": list(facts.backends), "planned_bytes": list(facts.planned_bytes),
    }  # fmt: skip


def _value_facts(spec: compile_pb2.ValueSpec) -> ValueFacts:
    is_tensor = spec.kind == "tensor"
    dims: list[int | DimRange] = [dim.min if dim.min == dim.max else {"min": dim.min, "max": dim.max} for dim in spec.dims]
    facts: ValueFacts = {
        "name": spec.name or None, "kind": cast(Any, spec.kind), "dtype": spec.dtype or None,
        "dims": dims if is_tensor else None, "dim_order": list(spec.dim_order) if is_tensor else None,
    }  # fmt: skip
    if spec.HasField("value"):
        facts["value"] = json.loads(spec.value)
    return facts
