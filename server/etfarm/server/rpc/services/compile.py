"""CompileService: recipes, finished compilations, and descriptions of uploads."""

from __future__ import annotations

from typing import Final

from etfarm.server.artifacts.errors import artifact_not_found
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.upload_screening import Screening
from etfarm.server.rpc.door.caller import caller, scope
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.server.rpc.services.artifacts import readable_holders
from etfarm.server.state.paging import page_of
from etfarm.v1 import compile_pb2, compile_pb2_grpc
from etfarm.v1.compile_pb2 import ModelFormat

_IS_PROGRAM: Final = {
    ModelFormat.MODEL_FORMAT_UNSPECIFIED: None, ModelFormat.MODEL_FORMAT_PT2: False, ModelFormat.MODEL_FORMAT_PTE: True,
}  # fmt: skip


class CompileService(compile_pb2_grpc.CompileServiceServicer):
    """The servicer of CompileService; see compile.proto."""

    def __init__(self, compiler: Compiler, screening: Screening, store: Store) -> None:
        self._compiler = compiler
        self._screening = screening
        self._store = store

    async def ListRecipes(self, request: compile_pb2.ListRecipesRequest, context: object) -> compile_pb2.ListRecipesResponse:
        listed = await self._compiler.recipes()
        recipes, following = page_of(listed.recipes, request.page_size, request.page_token)
        return compile_pb2.ListRecipesResponse(recipes=recipes, next_page_token=following)

    async def GetCompilation(self, request: compile_pb2.GetCompilationRequest, context: object) -> compile_pb2.Compilation:
        return await self._compiler.get_visible(request.key, scope())

    async def Inspect(self, request: compile_pb2.InspectRequest, context: object) -> compile_pb2.Inspection:
        principal, digest = caller(), request.digest
        self._store.place(digest)  # refuses what is no digest
        if principal.role != ADMIN and not await self._store.holds(digest, readable_holders(principal)):
            raise artifact_not_found(digest)
        await self._store.require_whole([digest])
        return await self._screening.inspect(digest, principal.project, is_program=_IS_PROGRAM.get(request.format))
