"""Recipes and stages of installed plug-ins, loaded by their dotted names in the child. Never code that a user sent.

A plug-in is a Python distribution on the server with entry points in the groups `etfarm.recipes` and `etfarm.stages`. A
recipe's is a callable `(**arguments) -> executorch.export.ExportRecipe`, with an optional attribute `specification`
(etfarm.wire.recipes.Specification) that tells its summary, quantization and arguments. A stage's is a callable
`() -> executorch.export.stages.Stage`, whose `stage_type` is the stage that it replaces.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from etfarm.server.compile.errors import ToolchainIncomplete
from etfarm.server.compile.program.explain import first_line
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire.errors import FarmError, UserError
from etfarm.wire.recipes import BadRecipeArgument, BadRecipeField, Specification, UnknownRecipeArgument
from etfarm.wire.recipes.values import shown

RECIPES: Final = "etfarm.recipes"
STAGES: Final = "etfarm.stages"
"""The entry points' groups."""


class PluginFailed(ToolchainIncomplete):
    """An installed plug-in does not do what its entry point promises: the server's owner is to look at it."""

    reason = "PLUGIN_FAILED"

    def __init__(self, name: str, missing: str) -> None:
        FarmError.__init__(
            self,
            f"This server cannot use {name}: {missing}.",
            "Tell the server's owner, or use another; the job's log has all that the plug-in raised.",
            recipe=name, missing=missing,
        )  # fmt: skip


class PluginRefused(BadRecipeArgument):
    """A plug-in's recipe raised TypeError or ValueError on the arguments that it was given.

    Args:
        who: the plug-in, for the sentence.
        said: what it raised, in one line.
    """

    def __init__(self, name: str, who: str, arguments: Mapping[str, object], said: str) -> None:
        given = ", ".join(f"{key}={shown(value)}" for key, value in arguments.items())
        UserError.__init__(
            self, f"{who[0].upper()}{who[1:]} refuses {given}: {said.rstrip('.')}.", "Give it other arguments.",
            recipe=name, argument=",".join(arguments), value=given, allowed=said,
        )  # fmt: skip


def names(group: str) -> list[str]:
    """The dotted names of a group's entry points, sorted; others are not plug-ins."""
    return sorted({point.name for point in entry_points(group=group) if "." in point.name})


def recipe(name: str, arguments: Mapping[str, object]) -> Any:
    """A fresh ExportRecipe of a plug-in.

    Raises:
        ToolchainIncomplete: no such plug-in is installed.
        UnknownRecipeArgument: it has no argument of that name.
        BadRecipeArgument: it lacks one that it needs, or raises TypeError or ValueError on those that are given.
        PluginFailed: it cannot be imported, fails without having been given arguments, or gives something else.
    """
    from executorch.export import ExportRecipe

    point = _point(RECIPES, name)
    _check_arguments(name, _loaded(point), arguments)
    given = _called(point, dict(arguments))
    if not isinstance(given, ExportRecipe):
        raise PluginFailed(name, f"{_who(point)} gave {type(given).__name__} and no ExportRecipe")
    return given


def specification(name: str) -> Specification | None:
    """What a plug-in's recipe says of itself; None where it says nothing.

    Raises:
        ToolchainIncomplete, PluginFailed: as `recipe`.
    """
    point = _point(RECIPES, name)
    found = getattr(_loaded(point), "specification", None)
    return found if isinstance(found, Specification) else None


def stage(name: str, replaced: str) -> Any:
    """A fresh Stage of a plug-in, for the stage `replaced`.

    Raises:
        ToolchainIncomplete: no such plug-in is installed.
        PluginFailed: it cannot be imported, or gives no Stage.
        BadRecipeField: its stage replaces another one than the recipe's file says.
    """
    from executorch.export.stages import Stage

    point = _point(STAGES, name)
    given = _called(point, {})
    if not isinstance(given, Stage):
        raise PluginFailed(name, f"{_who(point)} gave {type(given).__name__} and no Stage")
    kind = getattr(given.stage_type, "name", str(given.stage_type))
    if kind != replaced:
        allowed = f"a plug-in's stage that replaces it, and {_who(point)} replaces {kind}"
        raise BadRecipeField(f"[replace] {replaced}", name, allowed)
    return given


def _point(group: str, name: str) -> EntryPoint:
    found = [point for point in entry_points(group=group) if point.name == name]
    if not found:
        raise ToolchainIncomplete(name, f"no installed package has the entry point {name} in {group}")
    return found[0]


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise _failed(point, "cannot be imported", error) from error


def _called(point: EntryPoint, arguments: dict[str, object]) -> Any:
    made = _loaded(point)
    try:
        return made(**arguments)
    except Exception as error:
        if arguments and isinstance(error, TypeError | ValueError):
            traceback.print_exception(error)
            raise PluginRefused(point.name, _who(point), arguments, first_line(error)) from error
        raise _failed(point, "failed", error) from error


def _check_arguments(name: str, made: Any, arguments: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):  # no function, which is told when it is called; or one of C, which has none to show
        return
    kinds = [parameter.kind for parameter in parameters.values()]
    for argument in arguments:
        if argument not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise UnknownRecipeArgument(name, argument, list(parameters))
    for argument, parameter in parameters.items():
        variable = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and argument not in arguments and not variable:
            raise BadRecipeArgument(name, argument, None, "what the plug-in takes, which has no default for it")


def _failed(point: EntryPoint, what: str, error: Exception) -> Exception:
    if is_out_of_memory(error):
        return error
    traceback.print_exception(error)
    return PluginFailed(point.name, f"{_who(point)} {what} ({first_line(error)})")


def _who(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist is not None else "an unnamed distribution"
    return f"the plug-in {point.name} of {distribution}"
