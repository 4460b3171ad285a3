"""The conversion of compiling children's answers to compilations, with their files in the store.

`etfarm.server.workers.answers` has validated each value; here they are validated together, against the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.keys import program_digest
from etfarm.server.workers import answers, output_files
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import child_pb2, common_pb2, compile_pb2
from etfarm.v1.compile_pb2 import Compilation
from etfarm.wire.stages import STAGES

MAX_FILES: Final = 10_000
"""Maximum number of files of one child: several for each of at most 1,000 methods."""

_QUANTIZED: Final = ("compilation.stages", "compilation.warnings", "compilation.stayed_fp32", "compilation.selected",
                     "exported_programs")  # fmt: skip
_INSPECTED: Final = ("compilation.warnings", "compilation.facts", "compilation.sizes", "compilation.toolchain")
_LOWERED: Final = (
    "compilation.stages", "compilation.stayed_fp32", "compilation.delegation", "compilation.modules", "compilation.checks",
    "compilation.located_operators", "compilation.shared_buffers", "compilation.stateful_methods",
    *_INSPECTED, "pte", "data", "etrecord", "example_inputs", "stage_files",
)  # fmt: skip
"""The fields of a CompileResult that each task may set."""

_GREATEST_MS: Final = 1 << 53


def stage_event(data: bytes) -> tuple[str, float | None]:
    """Return the stage of an event of `lowering.Stages`, and its duration in milliseconds if the stage has ended.

    Raises:
        BadWorkerAnswer: the data is no such event.
    """
    try:
        event = json.loads(data)
        phase, stage, duration_ms = event.get("phase"), event.get("stage"), event.get("duration_ms")
    except (ValueError, RecursionError, AttributeError) as error:
        raise BadWorkerAnswer(f"A compile child's event cannot be read: {repr(error)[:200]}.") from None
    if phase not in ("START", "END"):
        raise BadWorkerAnswer("A compile child reports a stage that neither starts nor ends.")
    _validate_stage(stage)
    if phase == "START":
        return stage, None
    _validate_ms(duration_ms)
    return stage, float(duration_ms)


def _validate_stage(value: object) -> None:
    if not isinstance(value, str) or value not in STAGES:
        raise BadWorkerAnswer("A compile child reports an unknown stage.")


def _validate_ms(value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < _GREATEST_MS:
        raise BadWorkerAnswer("A compile child reports a stage without its duration.")


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
            QUOTA_EXCEEDED: the project's storage quota has no room for the file.
        """
        if self._remaining == 0:
            raise BadWorkerAnswer(f"A compile child names more than {MAX_FILES} files.")
        self._remaining -= 1
        path = await asyncio.to_thread(output_files.claim, self._folder, name)
        # A child may have written anything, so its files count against the project's quota like uploads.
        await self._store.quotas.require(self._project, path.stat().st_size)
        return await self._store.adopt(path, self._owner, holder=self._project)

    async def adopt_all(self, names: Mapping[str, str], into: Mapping[str, common_pb2.Artifact]) -> None:
        """Move the files of a dict into the store and add them to a message's map."""
        for key, name in names.items():
            into[key].CopyFrom(await self.adopt(name))


async def quantized(data: bytes, files: Files, methods: Collection[str]) -> Compilation:
    """Return the answer of a child that quantizes, with its files in the store.

    Args:
        methods: all requested methods.

    Raises:
        BadWorkerAnswer: the answer is not valid, or has other methods.
    """
    answer = await _decode(data, _QUANTIZED)
    if set(answer.exported_programs) != set(methods):
        raise BadWorkerAnswer("A compile child answers with other methods than were requested.")
    await files.adopt_all(answer.exported_programs, answer.compilation.exported_programs)
    return answer.compilation


async def lowered(data: bytes, files: Files, stop_after: str = "") -> Compilation:
    """Return the answer of a child that lowers, with its files in the store.

    Args:
        stop_after: the last requested stage; empty for a program.

    Raises:
        BadWorkerAnswer: the answer is not valid, or lacks the requested program.
    """
    answer = await _decode(data, _LOWERED)
    compilation = answer.compilation
    if (answer.HasField("pte") and compilation.HasField("facts")) is bool(stop_after):
        raise BadWorkerAnswer("A compile child answers with something else than was requested.")
    # Concurrent: each task waits for the disk.
    tasks = (
        _add_program(compilation, answer, files),
        _add_etrecord(compilation, answer, files),
        files.adopt_all(answer.example_inputs, compilation.example_inputs),
        files.adopt_all(answer.stage_files, compilation.stage_files),
    )
    for failed in await asyncio.gather(*tasks, return_exceptions=True):
        if failed is not None:
            raise failed
    return compilation


async def inspected(data: bytes, files: Files) -> Compilation:
    """Return the description of an uploaded program.

    Raises:
        BadWorkerAnswer: the answer is not valid.
    """
    return (await _decode(data, _INSPECTED)).compilation


def recipes(data: bytes) -> compile_pb2.ListRecipesResponse:
    """Return the answer of a child that lists recipes.

    Raises:
        BadWorkerAnswer: the answer is not valid.
    """
    return answers.decode(data, compile_pb2.ListRecipesResponse, ["recipes"])


async def _decode(data: bytes, fields: Collection[str]) -> child_pb2.CompileResult:
    # In a thread: an answer may have a hundred thousand rows.
    answer = await asyncio.to_thread(answers.decode, data, child_pb2.CompileResult, fields)
    answer.compilation.ClearField("toolchain")  # the server states its own
    for stage in answer.compilation.stages:
        _validate_stage(stage.stage)
        _validate_ms(stage.duration_ms if stage.HasField("duration_ms") else None)
        for duration_ms in stage.methods.values():
            _validate_ms(duration_ms)
        # The child does not decide where a stage ran.
        stage.where, stage.cached = common_pb2.ACTOR_SERVER, False
    return answer


async def _add_program(compilation: Compilation, answer: child_pb2.CompileResult, files: Files) -> None:
    if answer.HasField("pte"):
        compilation.program.pte.CopyFrom(await files.adopt(answer.pte))
        await files.adopt_all(answer.data, compilation.program.data)
        compilation.program.digest = program_digest(compilation.program)


async def _add_etrecord(compilation: Compilation, answer: child_pb2.CompileResult, files: Files) -> None:
    if answer.HasField("etrecord"):
        compilation.etrecord.CopyFrom(await files.adopt(answer.etrecord))
