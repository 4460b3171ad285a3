"""The program of a session: a ready program in the server's store, or a model that is compiled first."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import Cell
from etfarm.client.submit.early_checks import check_source, is_program, require_accepted
from etfarm.client.submit.preparation import ExampleInputs, Model, Say, prepare
from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe
from etfarm.client.submit.value_names import ValueNames
from etfarm.client.transport import transfers
from etfarm.client.transport.daemon_thread import in_thread
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import common_pb2, compile_pb2, job_pb2
from etfarm.wire import chunks, digest
from etfarm.wire.recipes import Recipe

_log = logging.getLogger(__name__)

CompileModel = Callable[[PreparedModel, Recipe], Awaitable[AsyncJob]]
"""Callback that submits the compilation of a model with a recipe."""


@dataclass(frozen=True)
class StoredProgram:
    """A session's program in the farm's store."""

    program: compile_pb2.Program
    names: ValueNames
    """Names of its inputs and outputs, as far as known."""
    compilation_key: str = ""
    """Key of its compilation; empty for a ready program."""


@dataclass(frozen=True)
class ServedModel:
    """A session's program in the form that the caller passed."""

    model: Model
    recipe: str | Recipe = DEFAULT_RECIPE
    """Recipe that a model is compiled with; unused for a ready program."""
    example_inputs: ExampleInputs | None = None
    data: Sequence[str | Path] = field(default=())
    """Named data files (.ptd) of a ready program."""

    def prepared(self, folder: Path, methods: Sequence[str] = (), say: Say | None = None) -> PreparedModel:
        """Return the program as bytes and files, creating files in `folder`.

        This blocks while a model is exported.

        Args:
            methods: methods that the model must have.
            say: called with a sentence about slow work.

        Raises:
            EtfarmError: it is not a model, cannot be exported, or lacks a method.
        """
        return prepare(
            self.model,
            recipes=[self.recipe],
            example_inputs=self.example_inputs,
            data=self.data,
            folder=folder,
            say=say,
            # A list, as a factory in a process of its own gets the check by pickle, which takes no repeated field of a message.
            check=partial(check_source, methods=[*methods], inputs=None),
        )

    async def on_farm(
        self,
        stubs: Stubs,
        spec: job_pb2.JobSpec,
        compile_model: CompileModel,
        *,
        on_upload: transfers.Moved | None,
        on_status: Say | None,
    ) -> StoredProgram:
        """Put the program into the farm's store.

        Args:
            spec: a job with the session's requirements. The server checks it before a model is exported.
            compile_model: submits a compilation.
            on_upload: called with the number of bytes sent and their total.
            on_status: called with one sentence about slow work, and with the compilation's warnings, which are logged without it.

        Raises:
            EtfarmError: the server would refuse the job, it is not a model, or its compilation fails; this is the compilation's
                error.
        """
        recipe = read_recipe(self.recipe)
        served = replace(self, recipe=recipe)
        if not is_program(self.model):
            await require_accepted(stubs, spec, [self.model], [recipe])
        with tempfile.TemporaryDirectory(prefix="etfarm-session-", ignore_cleanup_errors=True) as folder:
            model = await in_thread(lambda: served.prepared(Path(folder), spec.methods, on_status))
            if model.program is not None:
                sent = await send_program(stubs, model, on_upload=on_upload)
                return StoredProgram(sent, model.names)
            job = await compile_model(model, recipe)
        if on_status is not None:
            on_status(f"Compiling {model.name}.")
        try:
            await job.wait()
        except asyncio.CancelledError:
            # A cancelled session does not need the program: cancel its compilation.
            await job.cancel()
            raise
        request = job_pb2.GetJobRequest(job_id=job.id)
        (cell,) = (await stubs.jobs.Get(request)).cells
        if (error := decoded(Cell, cell).error) is not None:
            raise error
        for report in (await job.result()).reports:
            for warning in report.compile.warnings if report.compile is not None else ():
                (on_status or _log.warning)(f"warning: {warning.code}: {warning.message}")
        return StoredProgram(cell.program, model.names, cell.compilation_key)


class SharedModel:
    """A model for several sessions of one farm, which is uploaded or compiled once."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._making: asyncio.Task[StoredProgram] | None = None

    async def on_farm(
        self,
        stubs: Stubs,
        spec: job_pb2.JobSpec,
        compile_model: CompileModel,
        *,
        on_upload: transfers.Moved | None,
        on_status: Say | None,
    ) -> StoredProgram:
        """See `ServedModel.on_farm`.

        A caller that is cancelled while it waits does not affect the others.
        """
        if self._making is None:
            making = self._served.on_farm(stubs, spec, compile_model, on_upload=on_upload, on_status=on_status)
            self._making = asyncio.create_task(making, name="program for several sessions")
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Cancel the work; no session needs the program any more."""
        making, self._making = self._making, None
        if making is not None:
            making.cancel()
            await asyncio.wait([making])


async def send_program(stubs: Stubs, model: PreparedModel, *, on_upload: transfers.Moved | None = None) -> compile_pb2.Program:
    """Upload the files of a ready program that the store lacks, and return the program."""
    assert model.program is not None
    pte = await chunks.artifact_of_file(model.program)
    data = {name: await chunks.artifact_of_file(path) for name, path in model.data.items()}
    blobs: dict[str, tuple[common_pb2.Artifact, Any]] = {pte.digest: (pte, model.program)}
    blobs |= {artifact.digest: (artifact, model.data[name]) for name, artifact in data.items()}
    await transfers.upload_missing(stubs, blobs, on_progress=on_upload)
    whole = digest.of_program(pte.digest, {name: artifact.digest for name, artifact in data.items()})
    return compile_pb2.Program(pte=pte, data=data, digest=whole)
