"""From a Recipe to ExecuTorch's objects, fresh for every use: lowering changes their configuration."""

from __future__ import annotations

import dataclasses
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, Final

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, greedy, naive
from executorch.exir.passes import MemoryPlanningPass
from executorch.export import ExportRecipe, LoweringRecipe, QuantizationRecipe
from executorch.export.recipe_registry import recipe_registry

from etfarm.server.compile.errors import ToolchainIncomplete
from etfarm.server.compile.lower import components, plugins
from etfarm.server.compile.program.explain import first_line, stage_failed
from etfarm.wire import recipes
from etfarm.wire.recipes import BadCombination, BadRecipeField, MethodOptions, Part, Plain, Quantization, Recipe, Specification

_RECIPE_MODULES: Final = {
    "xnnpack": "executorch.backends.xnnpack.recipes",
    "coreml": "executorch.backends.apple.coreml.recipes",
    "coreai": "executorch.backends.apple.coreai.recipes",
    "arm": "executorch.backends.arm.recipes",
    "qnn": "executorch.backends.qualcomm.recipes",
}
"""What registers each backend's recipes when it is imported, where its tools are installed."""

_EDGE: Final = {
    "check_ir_validity": "_check_ir_validity",
    "skip_dim_order": "_skip_dim_order",
    "preserve_ops": "preserve_ops",
    "core_aten_exceptions": "_core_aten_ops_exception_list",
}
"""EdgeCompileConfig's fields by ours."""

_PLANNED: Final = ("memory_planning", "alloc_graph_input", "alloc_graph_output", "alloc_mutable_buffers")
"""Fields of [executorch] that are MemoryPlanningPass's."""

_ALGORITHMS: Final = {"greedy": greedy, "naive": naive}


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with what its plug-ins are; its identity stays the same.

    Raises:
        ToolchainIncomplete, PluginFailed: as `plugins.recipe`.
        UnknownRecipeArgument, BadRecipeArgument, BadStages: as they say.
    """
    return recipes.with_plugins(recipe, {part.name: specification(part) for part in recipe.parts if part.is_plugin})


def specification(part: Part) -> Specification:
    """What a plug-in's recipe says of itself; that it quantizes is seen where it does not say so.

    Raises:
        ToolchainIncomplete, PluginFailed: as `plugins.recipe`.
    """
    said = plugins.specification(part.name) or Specification(part.name, "", Quantization.NONE, "an installed plug-in's recipe")
    said = dataclasses.replace(said, name=part.name, resolved=True)
    how = plugins.recipe(part.name, part.arguments).quantization_recipe
    if said.quantization is Quantization.NONE and how is not None and how.quantizers:
        return dataclasses.replace(said, quantization=Quantization.PT2E_STATIC)
    return said


def export_recipe(recipe: Recipe, methods: Sequence[str]) -> ExportRecipe:
    """A fresh ExportRecipe with the recipe's options applied.

    Args:
        methods: all of the program's, so that those without partitioners of their own get the recipe's.

    Raises:
        ToolchainIncomplete: a provider, its tools or a plug-in are not installed here.
        BadCombination: the parts contradict each other.
        BadRecipeField: an operator of [edge] is unknown here.
        StageFailed: a provider refuses the arguments.
    """
    parts = [_part(part) for part in recipe.parts]
    if not parts:
        # As ExecuTorch's own recipes have it.
        parts = [ExportRecipe(lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)))]
    for part in parts:
        _apply_edge(recipe, part)
    try:
        built = ExportRecipe.combine(parts, recipe.name)
    except ValueError as error:
        names = " and ".join(part.name for part in recipe.parts)
        why = first_line(error).removeprefix("Cannot combine recipes").removeprefix(":").strip()
        raise BadCombination(
            f"{names} cannot be combined: ExecuTorch finds {why}.", "Leave one out, or say it once in [edge].", recipes=names
        ) from error
    built.name = recipe.name
    _apply_partitioners(recipe, methods, built)
    if recipe.options.per_op and built.lowering_recipe is not None:
        components.separate(built.lowering_recipe.partitioners or [])
    _apply_executorch(recipe, built)
    return built


def partitioners(built: ExportRecipe, method: str) -> list[Any]:
    """Those of one method of a recipe that `export_recipe` built; none for ExecuTorch's portable kernels."""
    found = built.lowering_recipe.partitioners if built.lowering_recipe is not None else None
    return list((found.get(method) if isinstance(found, Mapping) else found) or ())


def quantization(recipe: Recipe, method: str) -> QuantizationRecipe | None:
    """What quantizes one method, fresh; None where nothing of PT2E does.

    Raises:
        ToolchainIncomplete, BadCombination, StageFailed: as `export_recipe`.
    """
    own = recipe.options.methods.get(method, MethodOptions()).quantizers
    said = recipe.options.quantizers if own is None else own
    if said is not None:
        return QuantizationRecipe(quantizers=components.quantizers(said)) if said else None
    found = export_recipe(recipe, [method]).quantization_recipe
    return found if found is not None and found.quantizers else None


def stages(recipe: Recipe, built: ExportRecipe) -> tuple[str, ...]:
    """The whole pipeline, wherever its stages run: what the recipe's file says, else the ExportRecipe's own, else the default.

    A recipe with passes for EDGE_PROGRAM_MANAGER_TRANSFORM gets that stage, as ExportSession has it.
    """
    if recipe.options.stages is not None:
        return recipe.options.stages
    if built.pipeline_stages:
        return tuple(stage.name for stage in built.pipeline_stages)
    found, transform = list(recipe.stages), "EDGE_PROGRAM_MANAGER_TRANSFORM"
    if built.lowering_recipe and built.lowering_recipe.edge_manager_transform_passes and transform not in found:
        found.insert(found.index("TO_EXECUTORCH"), transform)
    return tuple(found)


def _part(part: Part) -> ExportRecipe:
    if part.is_plugin:
        return plugins.recipe(part.name, part.arguments)
    if part.name == "portable":
        return ExportRecipe(
            name="portable", lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False))
        )
    try:
        with _quiet():
            coreml = part.specification.backend == "coreml"
            arguments = components.coreml_arguments(part.arguments) if coreml else dict(part.arguments)
            return ExportRecipe.get_recipe(_type_of(part), **arguments)
    except (ImportError, OSError) as error:
        raise ToolchainIncomplete(part.name, first_line(error)) from error
    except ValueError as error:
        raise stage_failed("SOURCE_TRANSFORM", error) from error


def _type_of(part: Part) -> Any:
    backend = part.specification.backend
    importlib.import_module(_RECIPE_MODULES[backend])
    for registered in recipe_registry.list_backends():
        for found in recipe_registry.get_supported_recipes(registered):
            if found.value == part.name:
                return found
    raise ToolchainIncomplete(part.name, f"no provider of {backend} recipes has it")


def _apply_edge(recipe: Recipe, part: ExportRecipe) -> None:
    if not recipe.options.edge:
        return
    lowering = part.lowering_recipe = part.lowering_recipe or LoweringRecipe()
    config = lowering.edge_compile_config = lowering.edge_compile_config or EdgeCompileConfig()
    for field, value in recipe.options.edge.items():
        if isinstance(value, tuple):
            setattr(config, _EDGE[field], [_operator(field, str(name)) for name in value])
        else:
            setattr(config, _EDGE[field], value)


def _operator(field: str, name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        found = None
    # torch.ops has attributes that are none, and theirs in turn lead everywhere.
    if not isinstance(found, torch._ops.OpOverload):
        raise BadRecipeField(
            f"[edge] {field}", name, "operators that the server's torch has, with their overload, like aten.linear.default"
        )
    return found


def _apply_partitioners(recipe: Recipe, methods: Sequence[str], built: ExportRecipe) -> None:
    options = recipe.options
    own = {name: one.partitioners for name, one in options.methods.items() if one.partitioners is not None and name in methods}
    if options.partitioners is None and not own:
        return
    lowering = built.lowering_recipe = built.lowering_recipe or LoweringRecipe()
    if options.partitioners is not None:
        lowering.partitioners = components.partitioners(options.partitioners)
    if own:
        shared = lowering.partitioners or []
        lowering.partitioners = {
            method: components.partitioners(own[method]) if method in own
            else list(shared.get(method, [])) if isinstance(shared, dict) else list(shared)
            for method in methods
        }  # fmt: skip


def _apply_executorch(recipe: Recipe, built: ExportRecipe) -> None:
    config = built.executorch_backend_config = built.executorch_backend_config or ExecutorchBackendConfig()
    said = recipe.options.executorch
    planned = {field: value for field, value in said.items() if field in _PLANNED}
    if planned or config.memory_planning_pass is ExecutorchBackendConfig.memory_planning_pass:
        # ExecuTorch's default is one object for all of a process, and keeps a state.
        algorithm = str(planned.pop("memory_planning", "greedy"))
        config.memory_planning_pass = MemoryPlanningPass(MemoryPlanningAlgorithmSuite([_ALGORITHMS[algorithm]]), **planned)
    for field, value in said.items():
        if field not in _PLANNED:
            setattr(config, field, _tagging(value) if field == "external_constants" else value)


def _tagging(value: Plain) -> Any:
    """ExecutorchBackendConfig.external_constants: a bool, or what names the file of each constant."""
    return value if isinstance(value, bool) else lambda node: str(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Providers print what they miss; it is told in one sentence instead."""
    with redirect_stderr(io.StringIO()):
        yield
