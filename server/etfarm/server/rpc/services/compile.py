"""CompileService: recipes and finished compilations."""

from __future__ import annotations

from etfarm.server.compile.compiler import Compiler
from etfarm.server.rpc.door.caller import scope
from etfarm.server.state.paging import page_of
from etfarm.v1 import compile_pb2, compile_pb2_grpc


class CompileService(compile_pb2_grpc.CompileServiceServicer):
    """The servicer of CompileService; see compile.proto."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    async def ListRecipes(self, request: compile_pb2.ListRecipesRequest, context: object) -> compile_pb2.ListRecipesResponse:
        listed = await self._compiler.recipes()
        recipes, following = page_of(listed.recipes, request.page_size, request.page_token)
        return compile_pb2.ListRecipesResponse(recipes=recipes, next_page_token=following)

    async def GetCompilation(self, request: compile_pb2.GetCompilationRequest, context: object) -> compile_pb2.Compilation:
        return await self._compiler.get_visible(request.key, scope())
