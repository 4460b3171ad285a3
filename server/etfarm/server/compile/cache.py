"""The cache of compilations: whole ones, and results of stages that several compilations share; failures included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, Table, bindparam, select

from etfarm.server.access.scope import FARM_HOLDER, Scope
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.errors import StageFailed
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1 import common_pb2
from etfarm.v1.compile_pb2 import Compilation
from etfarm.wire.errors import EtfarmError, Fault, Kind, UserError
from etfarm.wire.status import from_proto

FOUND_EARLIER = "This error comes from an earlier compilation; --no-cache compiles again."
"""Remedy of a cached error that refers to the job's log, which only the job that compiled has."""

_LASTING = (Kind.INVALID_ARGUMENT, Kind.PERMISSION_DENIED, Kind.OUT_OF_RANGE, Kind.UNIMPLEMENTED)
"""Kinds of errors that refuse the model itself. Other errors depend on the server's current state."""


_BODIES: Final = {
    table.name: select(table.c.body).where(table.c.key == bindparam("of_key"))
    for table in (schema.compilations, schema.stage_results)
}

_NAMES: Final = {schema.compilations.name: "the compilation", schema.stage_results.name: "the shared stages"}

_MAX_GRANTED: Final = 10_000
"""Number of compilations that a process remembers to have given to projects."""


class CompilationNotFound(UserError):
    """No compilation has a key."""

    reason = "COMPILATION_NOT_FOUND"
    kind = Kind.NOT_FOUND


@dataclass(frozen=True)
class Outcome:
    """The outcome of a compilation, or of stages that several compilations share."""

    compilation: Compilation
    """The compilation; has `error` if it failed."""
    cached: bool = False
    """Whether the whole outcome comes from the cache."""
    lasting: bool = True
    """Whether the same request would have the same outcome again; the cache keeps no other outcomes."""

    @property
    def error(self) -> EtfarmError | None:
        """The error for the current requester; None after a success."""
        if not self.compilation.HasField("error"):
            return None
        error = from_proto(self.compilation.error)
        if not self.cached:
            return error
        if StageFailed.UNKNOWN in error.remedy:
            error.remedy = f"{error.remedy} {FOUND_EARLIER}"
        error.metadata["cached"] = "true"
        return error


def is_lasting(error: EtfarmError) -> bool:
    """Return whether the same model with the same recipe would fail again with the same error."""
    return error.fault is Fault.USER and error.kind in _LASTING


class Cache:
    """Outcomes by key, in the database. An outcome that is damaged there, or has missing files, counts as missing."""

    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._database = database
        self._granted: dict[tuple[str, ...], int] = {}
        """The compilations that this process has given: project, key and digests, with the losses of holdings at that time."""

    async def get(self, key: str) -> Compilation:
        """Return a compilation, whether or not its files are still stored.

        Raises:
            CompilationNotFound: no compilation has the key.
        """
        if (compilation := await self._read(schema.compilations, key)) is None:
            raise _not_found(key)
        return compilation

    async def get_visible(self, key: str, scope: Scope) -> Compilation:
        """Return a compilation that one of the scope's projects requested.

        That project holds the compilation's files from then on, even if another project has compiled it again since.

        Raises:
            CompilationNotFound: no compilation has the key, or only other projects requested it.
        """
        table = schema.project_compilations.c
        query = select(table.project).where(table.key == key, scope.clause(table.project)).order_by(table.project).limit(1)
        project = await self._database.read(lambda connection: connection.execute(query).scalar())
        if project is None and scope.projects is not None:
            raise _not_found(key)
        compilation = await self.get(key)
        if project is not None:
            await self._store.hold(project, digests_of(compilation), FARM_HOLDER)
        return compilation

    async def give(self, project: str, compilation: Compilation, owner: str) -> None:
        """Let a project read a compilation that it requested, and all of its files."""
        self._store.uses.mark(compilation.key, "compilation")
        grant, losses = (project, compilation.key, *digests_of(compilation)), self._store.holdings.losses
        if self._granted.get(grant) == losses:
            return  # as for an earlier cell or job, and nothing was deleted since
        row = insert(schema.project_compilations).values(project=project, key=compilation.key).on_conflict_do_nothing()
        await self._store.hold(project, digests_of(compilation), owner, also=lambda connection: connection.execute(row))
        if len(self._granted) >= _MAX_GRANTED:
            self._granted.clear()
        self._granted[grant] = losses

    async def compilation(self, key: str) -> Compilation | None:
        """Return a compilation that can answer a new job, or None."""
        return await self._without_incomplete(await self._read(schema.compilations, key))

    async def stages(self, key: str) -> Compilation | None:
        """Return the outcome of shared stages, or None.

        It has `stages`, `exported_programs`, `warnings` and `stayed_fp32`, or `error`.
        """
        self._store.uses.mark(key, "stages")
        return await self._without_incomplete(await self._read(schema.stage_results, key))

    async def keep_compilation(self, compilation: Compilation) -> None:
        """Store a compilation under its key. A failure does not replace a program that may be in use."""
        if compilation.HasField("error"):
            known = await self.compilation(compilation.key)
            if known is not None and not known.HasField("error"):
                return
        await self._write(schema.compilations, compilation, "compiled_at")

    async def keep_stages(self, compilation: Compilation) -> None:
        """Store the outcome of shared stages under its key."""
        await self._write(schema.stage_results, compilation, "made_at")

    async def _without_incomplete(self, outcome: Compilation | None) -> Compilation | None:
        """Return the outcome if all of its files are stored and undamaged, else None, so that it is compiled again."""
        if outcome is None or await self._store.absent(digests_of(outcome)):
            return None
        return outcome

    async def _read(self, table: Table, key: str) -> Compilation | None:
        rows = await self._database.query(_BODIES[table.name], {"of_key": key})
        return unseal_or_none(Compilation, rows[0].body, f"{_NAMES[table.name]} {key}") if rows else None

    async def _write(self, table: Table, compilation: Compilation, time_column: str) -> None:
        values = {"body": seal(compilation), time_column: datetime.now(UTC)}

        def write(connection: Connection) -> None:
            row = insert(table).values({"key": compilation.key, **values})
            connection.execute(row.on_conflict_do_update(index_elements=["key"], set_=values))

        await self._database.write(write, durable=True)


def _not_found(key: str) -> CompilationNotFound:
    return CompilationNotFound(f"Nothing was compiled under the key {key[:12]}.", key=key)


def digests_of(compilation: Compilation) -> list[str]:
    """Return the digests of all files of a compilation."""
    return [artifact.digest for artifact in artifacts_of(compilation)]


def artifacts_of(compilation: Compilation) -> Iterator[common_pb2.Artifact]:
    """Yield all files of a compilation."""
    if compilation.HasField("program"):
        yield compilation.program.pte
        yield from compilation.program.data.values()
    if compilation.HasField("etrecord"):
        yield compilation.etrecord
    for files in (compilation.example_inputs, compilation.exported_programs, compilation.stage_files):
        yield from files.values()
