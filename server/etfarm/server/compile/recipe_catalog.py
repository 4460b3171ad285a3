"""The recipes of this server: which of them it can compile, and how installed plug-ins describe theirs."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from typing import Final

from etfarm.server.compile import answers
from etfarm.server.compile.errors import recipe_unavailable
from etfarm.server.workers.child_pool import ChildPool
from etfarm.v1 import common_pb2, compile_pb2
from etfarm.wire import recipes
from etfarm.wire.errors import error_for
from etfarm.wire.recipes import Quantization, Recipe, Specification, unknown_recipe

_QUANTIZATIONS: Final = {
    common_pb2.QUANTIZATION_PT2E_STATIC: Quantization.PT2E_STATIC,
    common_pb2.QUANTIZATION_PT2E_DYNAMIC: Quantization.PT2E_DYNAMIC,
    common_pb2.QUANTIZATION_TORCHAO: Quantization.TORCHAO_SOURCE,
}
"""Quantizations by RecipeInfo.quantization."""


class RecipeCatalog:
    """The recipes that a child listed, once for the server's life.

    Args:
        task: the child's entry point, `module:function`.
        deadline_s: wall-clock seconds of the child.
    """

    def __init__(self, workers: ChildPool, task: str, *, deadline_s: float) -> None:
        self._workers = workers
        self._task = task
        self._deadline_s = deadline_s
        self._listed: compile_pb2.ListRecipesResponse | None = None
        self._lock = asyncio.Lock()

    async def recipes(self) -> compile_pb2.ListRecipesResponse:
        """Return all recipes with what is missing for those that cannot run here; a child lists them once."""
        async with self._lock:
            if self._listed is None:
                finished = await self._workers.run(self._task, None, deadline_s=self._deadline_s)
                async with finished:
                    self._listed = answers.recipes(finished.result)
        return self._listed

    async def check(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the specifications of its plug-ins, if it can be compiled here.

        Raises:
            RECIPE_UNAVAILABLE: something is missing on this server; the message says what.
            UNKNOWN_RECIPE, UNKNOWN_STAGE: no installed plug-in has it.
        """
        resolved = await self.resolve(recipe)
        if recipe.options.replace:
            _require_stages(recipe)
        await self.require_available(recipe)
        return resolved

    async def resolve(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the quantization of its plug-ins' recipes, which only children can determine.

        Raises:
            UNKNOWN_RECIPE: no installed plug-in has a recipe of the name.
            BAD_STAGES: the recipe's stages do not match its quantization.
        """
        named = [part.name for part in recipe.parts if part.is_plugin]
        if not named:
            return recipe
        rows = {row.name: row for row in (await self.recipes()).recipes if "." in row.name}
        if missing := [name for name in named if name not in rows]:
            raise unknown_recipe(missing[0], rows)
        return recipes.with_plugins(recipe, {name: _specification(rows[name]) for name in named})

    async def require_available(self, recipe: Recipe) -> None:
        """Refuse a recipe that this server cannot compile with. One that needs nothing that may be missing does not wait.

        Raises:
            RECIPE_UNAVAILABLE: something is missing on this server; the message says what.
        """
        if any(part.specification.needs for part in recipe.parts):
            await self.recipes()
        missing = {row.name: row.missing for row in self._listed.recipes if not row.available} if self._listed else {}
        for part in recipe.parts:
            if part.name in missing:
                raise recipe_unavailable(part.name, missing[part.name].rstrip("."))


def _require_stages(recipe: Recipe) -> None:
    installed = {entry.name for entry in entry_points(group="etfarm.stages")}
    for stage, name in recipe.options.replace.items():
        if name not in installed:
            hint = f"Installed: {', '.join(sorted(installed))}." if installed else "No plug-in with stages is installed."
            raise error_for(
                "UNKNOWN_STAGE",
                f"This server has no stage {name!r} to replace {stage} with.", f"{hint} Plug-ins are installed on the server.",
                stage_name=name, replaces=stage, known=",".join(sorted(installed)),
            )  # fmt: skip


def _specification(row: compile_pb2.RecipeInfo) -> Specification:
    """Return a plug-in's recipe as a child described it; its arguments are checked where the plug-in is."""
    return Specification(row.name, row.backend, _QUANTIZATIONS.get(row.quantization, Quantization.NONE), row.summary)
