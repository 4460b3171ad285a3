"""The recipes that this host can compile, and what the others lack. For children, because it imports the providers."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from etfarm.server.compile.lower import build, plugins
from etfarm.server.compile.program.descriptions import first_line
from etfarm.v1 import common_pb2
from etfarm.v1.compile_pb2 import ListRecipesResponse, RecipeInfo
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import RECIPES, Argument, BadRecipeArgument, Part, Plain, Quantization, Specification, resolve

_QUANTIZATION: Final = {
    Quantization.NONE: common_pb2.QUANTIZATION_NONE,
    Quantization.PT2E_STATIC: common_pb2.QUANTIZATION_PT2E_STATIC,
    Quantization.PT2E_DYNAMIC: common_pb2.QUANTIZATION_PT2E_DYNAMIC,
    Quantization.TORCHAO_SOURCE: common_pb2.QUANTIZATION_TORCHAO,
}

_TOOLS: Final = {
    "coreml": ("coremltools",),
    "coreai": ("coreai_torch", "coreai_opt"),
    "arm_ethos": ("ethosu.vela", "tosa_serializer"),
    "arm_tosa": ("tosa_serializer",),
}
"""Python packages without which a recipe's provider loads but compilation fails, by the prefix of the recipe's name."""

_NOT_HERE: Final = {
    "qnn": "Qualcomm's AI Engine Direct SDK, which is not in any package registry",
    "arm_vgf": "Arm's ML SDK for Vulkan (its model converter)",
}


def list_recipes(request: object, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: return a ListRecipesResponse: every recipe of etfarm, in the table's order, then those of plug-ins."""
    rows = [_row(specification, _missing(specification)) for specification in RECIPES.values()]
    rows += [_plugin_row(name) for name in plugins.names(plugins.RECIPES)]
    return ListRecipesResponse(recipes=rows).SerializeToString()


def _plugin_row(name: str) -> RecipeInfo:
    """Return the row of a plug-in's recipe: its specification, and whether it returns an ExportRecipe."""
    described = Specification(name, "", Quantization.NONE, "an installed plug-in's recipe")
    try:
        described = dataclasses.replace(plugins.specification(name) or described, name=name)
        return _row(build.specification(Part(described, _required(described))), "")
    except BadRecipeArgument:  # installed, but it does not declare its required arguments
        return _row(described, "")
    except EtfarmError as error:
        return _row(described, _why(error))


def _row(specification: Specification, missing: str) -> RecipeInfo:
    return RecipeInfo(
        name=specification.name,
        summary=specification.summary,
        backend="" if specification.backend == "portable" else specification.backend,
        quantization=_QUANTIZATION[specification.quantization],
        available=not missing,
        missing=missing,
        arguments=[_describe_argument(argument) for argument in specification.arguments],
    )


def _missing(specification: Specification) -> str:
    for start, tools in _TOOLS.items():
        absent = [tool for tool in tools if specification.name.startswith(start) and not _installed(tool)]
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            return f"needs {specification.needs}: {' and '.join(absent)} {verb} not installed"
    for start, what in _NOT_HERE.items():
        if specification.name.startswith(start):
            return f"needs {what}"
    try:
        build.export_recipe(resolve(specification.name, _required(specification)), ["forward"])
    except EtfarmError as error:
        return _why(error)
    except Exception as error:  # noqa: BLE001 - providers fail in different ways, and each message is the answer
        return first_line(error)
    return ""


def _why(error: EtfarmError) -> str:
    return error.metadata.get("missing") or error.metadata.get("why") or error.message


def _required(specification: Specification) -> dict[str, Plain]:
    return {argument.name: _example_value(argument) for argument in specification.arguments if argument.required}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _example_value(argument: Argument) -> Plain:
    if argument.choices:
        return argument.choices[0]
    if argument.kind is tuple:
        return (1, 16)
    return argument.bounds[1] if argument.bounds is not None else "SM8650"


def _describe_argument(argument: Argument) -> str:
    default = "" if argument.default is None else f" (default {argument.default})"
    return f"{argument.name}={argument.allowed}{' (required)' if argument.required else default}: {argument.summary}"
