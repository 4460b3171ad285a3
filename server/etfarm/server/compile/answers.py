"""Conversion of children's answers to protobuf messages.

A child has loaded a user's bytes, so no answer is trusted to be well-formed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.keys import program_digest
from etfarm.server.compile.result import DimRange, MethodFacts, ValueFacts
from etfarm.server.workers import output_files
from etfarm.v1 import common_pb2, compile_pb2
from etfarm.v1.compile_pb2 import Compilation
from etfarm.wire.errors import FarmError
from etfarm.wire.messages import fill, from_scalar, to_scalar
from etfarm.wire.stages import STAGES
from etfarm.wire.words import word_of

MAX_ANSWER_BYTES: Final = 16 << 20
"""Maximum size of an answer; 20 places of each of 150 operators take half a MiB per method. Large data is sent as files."""

MAX_FILES: Final = 10_000
"""Maximum number of files of one child: several for each of at most 1,000 methods."""

_GREATEST_MS: Final = 1 << 53


class BadWorkerAnswer(FarmError):
    """A worker's answer cannot be read. The worker ran user bytes, so its answers are not trusted to be well-formed."""

    reason = "BAD_WORKER_ANSWER"


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        BadWorkerAnswer: the answer is not a JSON object, or exceeds MAX_ANSWER_BYTES.
    """
    if len(data) > MAX_ANSWER_BYTES:
        raise BadWorkerAnswer(f"The compile worker's answer has {len(data)} bytes, above {MAX_ANSWER_BYTES}.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadWorkerAnswer(f"The compile worker's answer is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadWorkerAnswer("The compile worker's answer is not a JSON object.")
    return value


def stage_event(data: bytes) -> tuple[str, float | None]:
    """Return a StageEvent's stage, and its duration in milliseconds if the stage has ended.

    Raises:
        BadWorkerAnswer: the data is not a valid StageEvent.
    """
    event = parse(data)
    if event.get("phase") not in ("START", "END"):
        raise BadWorkerAnswer("The compile worker reported a stage that neither starts nor ends.")
    stage = _stage_name(event.get("stage"))
    return stage, None if event["phase"] == "START" else _milliseconds(event.get("duration_ms"))


def _stage_name(value: object) -> str:
    if not isinstance(value, str) or value not in STAGES:
        raise BadWorkerAnswer("The compile worker reported an unknown stage.")
    return value


def _milliseconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < _GREATEST_MS:
        raise BadWorkerAnswer("The compile worker reported a stage without its duration.")
    return float(value)


class Files:
    """A child's output files, which are moved into the store.

    Args:
        folder: the child's output folder.
        owner: the recorded owner of the stored files.
        project: the project that holds the files.
    """

    def __init__(self, store: Store, folder: Path, owner: str, project: str) -> None:
        self._store = store
        self._folder = folder
        self._owner = owner
        self._project = project
        self._remaining = MAX_FILES

    async def adopt(self, name: str) -> common_pb2.Artifact:
        """Move one file into the store. Refuse names that lead out of the folder, links, and anything but a regular file.

        Raises:
            BadWorkerAnswer: the file is refused, or the child has named too many files.
            QuotaExceeded: the project's storage quota has no room for the file.
        """
        if self._remaining == 0:
            raise BadWorkerAnswer(f"The compile worker returned more than {MAX_FILES} files.")
        self._remaining -= 1
        try:
            path = await asyncio.to_thread(output_files.claim, self._folder, name)
        except output_files.BadOutputFile as error:
            raise BadWorkerAnswer(error.message) from None
        # A child may have written anything, so its files count against the project's quota like uploads.
        await self._store.require_quota(self._project, path.stat().st_size)
        return await self._store.adopt(path, self._owner, holder=self._project)

    async def adopt_all(self, names: Mapping[str, str], into: Mapping[str, common_pb2.Artifact]) -> None:
        """Move the files of a dict into the store and add them to a message's map."""
        for key, name in names.items():
            into[key].CopyFrom(await self.adopt(name))


@contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise BadWorkerAnswer(f"The compile worker's answer cannot be read: {repr(error)[:500]}.") from error


async def quantized(answer: Mapping[str, Any], files: Files, methods: Collection[str]) -> Compilation:
    """Return a QuantizeResult as a Compilation, with its files in the store.

    Args:
        methods: all requested methods.

    Raises:
        BadWorkerAnswer: the answer is not a QuantizeResult, or has other methods.
    """
    with _convert_errors():
        compilation = await asyncio.to_thread(_convert_quantized, answer)
        if set(answer["programs"]) != set(methods):
            raise BadWorkerAnswer("The compile worker returned other methods than were requested.")
        await files.adopt_all(answer["programs"], compilation.exported_programs)
    return compilation


async def lowered(answer: Mapping[str, Any], files: Files, stop_after: str = "") -> Compilation:
    """Return a LowerResult as a Compilation, with its files in the store.

    Args:
        stop_after: the last requested stage; empty for a program.

    Raises:
        BadWorkerAnswer: the answer is not a LowerResult, or lacks the requested program.
    """
    with _convert_errors():
        if (answer["program"] is None or answer["facts"] is None) is not bool(stop_after):
            raise BadWorkerAnswer("The compile worker returned another kind of result than was requested.")
        # In a thread: an answer may have a hundred thousand rows.
        compilation = await asyncio.to_thread(_convert_lowered, answer)
        # Concurrent: each task waits for the disk.
        tasks = (_add_program(compilation, answer["program"], files), _add_etrecord(compilation, answer["etrecord"], files))
        inputs, stage_files = answer["inputs"], answer["stage_files"]
        transfers = (files.adopt_all(inputs, compilation.example_inputs), files.adopt_all(stage_files, compilation.stage_files))
        for failed in await asyncio.gather(*tasks, *transfers, return_exceptions=True):
            if failed is not None:
                raise failed
    return compilation


def _convert_quantized(answer: Mapping[str, Any]) -> Compilation:
    """Return a QuantizeResult's contents without its files."""
    compilation = Compilation(stages=_stages(answer["stages"]), warnings=_warnings(answer["warnings"]))
    _add_fp32(compilation, answer["stayed_fp32"])
    return compilation


def _convert_lowered(answer: Mapping[str, Any]) -> Compilation:
    """Return a LowerResult's contents without its files."""
    compilation = Compilation(stages=_stages(answer["stages"]), warnings=_warnings(answer["warnings"]))
    for method, delegation in answer["delegation"].items():
        compilation.delegation[method].CopyFrom(_delegation(delegation))
    _add_description(compilation, answer)
    compilation.modules.extend(compile_pb2.ModuleFootprint(**row) for row in answer["modules"])
    compilation.checks.extend(_check(check) for check in answer["checks"])
    _add_fp32(compilation, answer["stayed_fp32"])
    return compilation


def _convert_inspected(answer: Mapping[str, Any]) -> Compilation:
    """Return the description of an uploaded program."""
    compilation = Compilation(warnings=_warnings(answer["warnings"]))
    _add_description(compilation, answer)
    return compilation


async def _add_program(compilation: Compilation, program: Mapping[str, Any] | None, files: Files) -> None:
    if program is not None:
        compilation.program.pte.CopyFrom(await files.adopt(program["pte"]))
        await files.adopt_all(program["data"], compilation.program.data)
        compilation.program.digest = program_digest(compilation.program)


async def _add_etrecord(compilation: Compilation, name: str | None, files: Files) -> None:
    if name is not None:
        compilation.etrecord.CopyFrom(await files.adopt(name))


async def inspected(answer: Mapping[str, Any], files: Files) -> Compilation:
    """Return the LowerResult of an uploaded program, which only describes the program.

    Raises:
        BadWorkerAnswer: the answer is not a LowerResult.
    """
    with _convert_errors():
        return await asyncio.to_thread(_convert_inspected, answer)


def recipes(answer: Mapping[str, Any]) -> compile_pb2.ListRecipesResponse:
    """Return a RecipesResult as a ListRecipesResponse.

    Raises:
        BadWorkerAnswer: the answer is not a RecipesResult.
    """
    with _convert_errors():
        return compile_pb2.ListRecipesResponse(recipes=[fill(compile_pb2.RecipeInfo(), row) for row in answer["recipes"]])


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[compile_pb2.Stage]:
    # The child does not decide where a stage ran.
    return [
        compile_pb2.Stage(
            stage=_stage_name(row["stage"]),
            duration_ms=_milliseconds(row["duration_ms"]),
            where=common_pb2.ACTOR_SERVER,
            methods={method: _milliseconds(duration_ms) for method, duration_ms in row["methods"].items()},
        )
        for row in rows
    ]


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[compile_pb2.Warning]:
    return [compile_pb2.Warning(**row) for row in rows]


def _add_fp32(compilation: Compilation, rows_by_method: Mapping[str, Any]) -> None:
    for method, rows in rows_by_method.items():
        operators = [
            compile_pb2.Fp32Operator(op=row["op"], count=row["count"], places=map(_place, row["places"])) for row in rows
        ]
        compilation.stayed_fp32[method].operators.extend(operators)


def _add_description(compilation: Compilation, answer: Mapping[str, Any]) -> None:
    if (facts := answer["facts"]) is not None:
        for method, described in facts["methods"].items():
            compilation.facts.methods[method].CopyFrom(_method_facts(described))
    if (sizes := answer["sizes"]) is not None:
        compilation.sizes.CopyFrom(
            compile_pb2.ProgramSizes(
                program_bytes=sizes["program_bytes"], constant_bytes=sizes["constant_bytes"],
                delegate_bytes=sizes["delegate_bytes"], data_bytes=sizes["data_bytes"],
                methods={name: compile_pb2.MethodSizes(**described) for name, described in sizes["methods"].items()},
            )
        )  # fmt: skip


def _place(value: Mapping[str, Any]) -> compile_pb2.Place:
    source = compile_pb2.SourceLine(**value["source"]) if value["source"] is not None else None
    return compile_pb2.Place(source=source, module=value["module"], count=value["count"])


def _delegation(value: Mapping[str, Any]) -> compile_pb2.Delegation:
    operators = [
        compile_pb2.OperatorDelegation(
            op=row["op"], delegated=row["delegated"], non_delegated=row["non_delegated"], places=map(_place, row["places"])
        )
        for row in value["operators"]
    ]
    return compile_pb2.Delegation(
        subgraphs=value["subgraphs"], delegated_nodes=value["delegated_nodes"], non_delegated_nodes=value["non_delegated_nodes"],
        operators=operators,
    )  # fmt: skip


def _check(value: Mapping[str, Any]) -> compile_pb2.HostCheck:
    return fill(compile_pb2.HostCheck(), value)


def _method_facts(value: Mapping[str, Any]) -> compile_pb2.MethodFacts:
    return compile_pb2.MethodFacts(
        inputs=[_value_spec(spec) for spec in value["inputs"]], outputs=[_value_spec(spec) for spec in value["outputs"]],
        operators=value["operators"], backends=value["backends"], planned_bytes=value["planned_bytes"],
    )  # fmt: skip


def _value_spec(value: Mapping[str, Any]) -> compile_pb2.ValueSpec:
    spec = fill(compile_pb2.ValueSpec(), {key: value.get(key) for key in ("name", "kind", "dtype", "dim_order")})
    for dim in value.get("dims") or ():
        low, high = (dim, dim) if isinstance(dim, int) else (dim["min"], dim["max"])
        spec.dims.add(min=low, max=high)
    if "value" in value:
        spec.value.CopyFrom(to_scalar(value["value"]))
    return spec


def facts_of(facts: compile_pb2.MethodFacts) -> MethodFacts:
    """Return a method's facts in the form that `compile.inputs` reads."""
    return {
        "inputs": [_value_facts(spec) for spec in facts.inputs], "outputs": [_value_facts(spec) for spec in facts.outputs],
        "operators": list(facts.operators), "backends": list(facts.backends), "planned_bytes": list(facts.planned_bytes),
    }  # fmt: skip


def _value_facts(spec: compile_pb2.ValueSpec) -> ValueFacts:
    is_tensor = spec.kind == common_pb2.VALUE_KIND_TENSOR
    kind = cast(Any, word_of(common_pb2.ValueKind.DESCRIPTOR, spec.kind) or "none")
    dims: list[int | DimRange] = [dim.min if dim.min == dim.max else {"min": dim.min, "max": dim.max} for dim in spec.dims]
    facts: ValueFacts = {
        "name": spec.name or None, "kind": kind, "dtype": spec.dtype or None,
        "dims": dims if is_tensor else None, "dim_order": list(spec.dim_order) if is_tensor else None,
    }  # fmt: skip
    if spec.HasField("value"):
        facts["value"] = from_scalar(spec.value)
    return facts
