"""Recipes and stages of installed plug-ins, loaded by their dotted names in the child. Never loads code from a user.

A plug-in is a Python distribution on the server with entry points in the groups `etfarm.recipes` and `etfarm.stages`. A
recipe's entry point is a callable `(**arguments) -> executorch.export.ExportRecipe` with an optional attribute
`specification` (etfarm.wire.recipes.Specification) for its summary, quantization and arguments. A stage's entry point is a
callable `() -> executorch.export.stages.Stage`, whose `stage_type` is the stage that it replaces.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from etfarm.server.compile.errors import recipe_unavailable
from etfarm.server.compile.program.descriptions import first_line
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire.errors import EtfarmError, UserError, error_for
from etfarm.wire.recipes import BadRecipeArgument, Specification, bad_recipe_field, unknown_recipe_argument
from etfarm.wire.recipes.values import shown

RECIPES: Final = "etfarm.recipes"
STAGES: Final = "etfarm.stages"
"""Groups of the entry points."""


class PluginRefused(BadRecipeArgument):
    """A plug-in's recipe raised TypeError or ValueError for the passed arguments.

    Args:
        plugin: the plug-in's name in the message.
        why: the raised error in one line.
    """

    def __init__(self, name: str, plugin: str, arguments: Mapping[str, object], why: str) -> None:
        values = ", ".join(f"{key}={shown(value)}" for key, value in arguments.items())
        UserError.__init__(
            self, f"{plugin[0].upper()}{plugin[1:]} refuses {values}: {why.rstrip('.')}.", "Give it other arguments.",
            recipe=name, argument=",".join(arguments), value=values, allowed=why,
        )  # fmt: skip


def names(group: str) -> list[str]:
    """Return the dotted names of a group's entry points, sorted; names without a dot are not plug-ins."""
    return sorted({point.name for point in entry_points(group=group) if "." in point.name})


def recipe(name: str, arguments: Mapping[str, object]) -> Any:
    """Return a new ExportRecipe of a plug-in.

    Raises:
        RECIPE_UNAVAILABLE: no such plug-in is installed.
        UNKNOWN_RECIPE_ARGUMENT: the recipe has no argument of that name.
        BadRecipeArgument: a required argument is missing, or the recipe raises TypeError or ValueError for the arguments.
        PLUGIN_FAILED: the plug-in cannot be imported, fails without arguments, or does not return an ExportRecipe.
    """
    from executorch.export import ExportRecipe

    point = _find_entry_point(RECIPES, name)
    _check_arguments(name, _load(point), arguments)
    result = _call(point, dict(arguments))
    if not isinstance(result, ExportRecipe):
        raise _plugin_failed(name, f"{_display_name(point)} returned {type(result).__name__}, not an ExportRecipe")
    return result


def specification(name: str) -> Specification | None:
    """Return the specification of a plug-in's recipe; None if it has none.

    Raises:
        RECIPE_UNAVAILABLE, PLUGIN_FAILED: as `recipe`.
    """
    point = _find_entry_point(RECIPES, name)
    described = getattr(_load(point), "specification", None)
    return described if isinstance(described, Specification) else None


def stage(name: str, replaced: str) -> Any:
    """Return a new Stage of a plug-in for the stage `replaced`.

    Raises:
        RECIPE_UNAVAILABLE: no such plug-in is installed.
        PLUGIN_FAILED: the plug-in cannot be imported, or does not return a Stage.
        BAD_RECIPE_FIELD: the plug-in replaces another stage than the recipe's file states.
    """
    from executorch.export.stages import Stage

    point = _find_entry_point(STAGES, name)
    result = _call(point, {})
    if not isinstance(result, Stage):
        raise _plugin_failed(name, f"{_display_name(point)} returned {type(result).__name__}, not a Stage")
    kind = getattr(result.stage_type, "name", str(result.stage_type))
    if kind != replaced:
        allowed = f"a plug-in's stage that replaces it, but {_display_name(point)} replaces {kind}"
        raise bad_recipe_field(f"[replace] {replaced}", name, allowed)
    return result


def _find_entry_point(group: str, name: str) -> EntryPoint:
    points = [point for point in entry_points(group=group) if point.name == name]
    if not points:
        raise recipe_unavailable(name, f"no installed package has the entry point {name} in {group}")
    return points[0]


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise _failure(point, "cannot be imported", error) from error


def _call(point: EntryPoint, arguments: dict[str, object]) -> Any:
    factory = _load(point)
    try:
        return factory(**arguments)
    except Exception as error:
        if arguments and isinstance(error, TypeError | ValueError):
            traceback.print_exception(error)
            raise PluginRefused(point.name, _display_name(point), arguments, first_line(error)) from error
        raise _failure(point, "failed", error) from error


def _check_arguments(name: str, factory: Any, arguments: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # not a function, which the call reports; or a C function without a signature
        return
    kinds = [parameter.kind for parameter in parameters.values()]
    for argument in arguments:
        if argument not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise unknown_recipe_argument(name, argument, list(parameters))
    for argument, parameter in parameters.items():
        variable = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and argument not in arguments and not variable:
            raise BadRecipeArgument(name, argument, None, "a value that the plug-in accepts (it has no default)")


def _failure(point: EntryPoint, what: str, error: Exception) -> Exception:
    if is_out_of_memory(error):
        return error
    traceback.print_exception(error)
    return _plugin_failed(point.name, f"{_display_name(point)} {what} ({first_line(error)})")


def _plugin_failed(name: str, missing: str) -> EtfarmError:
    """Return the error that a plug-in violates the contract of its entry point; the server's owner has to fix it."""
    return error_for(
        "PLUGIN_FAILED",
        f"This server cannot use {name}: {missing}.",
        "Tell the server's owner, or use another plug-in. The job's log has the plug-in's traceback.",
        recipe=name, missing=missing,
    )  # fmt: skip


def _display_name(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist is not None else "an unnamed distribution"
    return f"the plug-in {point.name} of {distribution}"
