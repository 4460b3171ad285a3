"""Conversion of a Recipe to ExecuTorch's objects, new for every use because lowering changes their configuration."""

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

from etfarm.server.compile.errors import recipe_unavailable
from etfarm.server.compile.lower import components, plugins
from etfarm.server.compile.program.descriptions import first_line
from etfarm.server.compile.program.explain import stage_failed
from etfarm.wire import recipes
from etfarm.wire.errors import error_for
from etfarm.wire.recipes import MethodOptions, Part, Plain, Quantization, Recipe, Specification, bad_recipe_field

_RECIPE_MODULES: Final = {
    "xnnpack": "executorch.backends.xnnpack.recipes",
    "coreml": "executorch.backends.apple.coreml.recipes",
    "coreai": "executorch.backends.apple.coreai.recipes",
    "arm": "executorch.backends.arm.recipes",
    "qnn": "executorch.backends.qualcomm.recipes",
}
"""Modules that register a backend's recipes when they are imported, if the backend's tools are installed."""

_EDGE: Final = {
    "check_ir_validity": "_check_ir_validity",
    "skip_dim_order": "_skip_dim_order",
    "preserve_ops": "preserve_ops",
    "core_aten_exceptions": "_core_aten_ops_exception_list",
}
"""Fields of EdgeCompileConfig by the names in [edge]."""

_PLANNED: Final = ("memory_planning", "alloc_graph_input", "alloc_graph_output", "alloc_mutable_buffers")
"""Fields of [executorch] that belong to MemoryPlanningPass."""

_ALGORITHMS: Final = {"greedy": greedy, "naive": naive}


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe with the specifications of its plug-ins; its identity stays the same.

    Raises:
        RECIPE_UNAVAILABLE, PLUGIN_FAILED, UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument: as `plugins.recipe`.
        BAD_STAGES: the recipe's stages do not match its quantization.
    """
    return recipes.with_plugins(recipe, {part.name: specification(part) for part in recipe.parts if part.is_plugin})


def specification(part: Part) -> Specification:
    """Return the specification of a plug-in's recipe; detect quantization that it does not declare.

    Raises:
        RECIPE_UNAVAILABLE, PLUGIN_FAILED: as `plugins.recipe`.
    """
    described = plugins.specification(part.name) or Specification(
        part.name, "", Quantization.NONE, "an installed plug-in's recipe"
    )
    described = dataclasses.replace(described, name=part.name, resolved=True)
    quantization_recipe = plugins.recipe(part.name, part.arguments).quantization_recipe
    if described.quantization is Quantization.NONE and quantization_recipe is not None and quantization_recipe.quantizers:
        return dataclasses.replace(described, quantization=Quantization.PT2E_STATIC)
    return described


def export_recipe(recipe: Recipe, methods: Sequence[str]) -> ExportRecipe:
    """Return a new ExportRecipe with the recipe's options applied.

    Args:
        methods: all methods of the program; those without partitioners in the recipe file get the recipe's.

    Raises:
        RECIPE_UNAVAILABLE: a provider, its tools or a plug-in are not installed here.
        BAD_RECIPE_COMBINATION: the parts contradict each other.
        BAD_RECIPE_FIELD: an operator of [edge] is unknown here.
        StageFailed: a provider refuses the arguments.
    """
    parts = [_build_part(part) for part in recipe.parts]
    if not parts:
        # The default of ExecuTorch's recipes.
        parts = [ExportRecipe(lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)))]
    for part in parts:
        _apply_edge(recipe, part)
    try:
        built = ExportRecipe.combine(parts, recipe.name)
    except ValueError as error:
        names = " and ".join(part.name for part in recipe.parts)
        why = first_line(error).removeprefix("Cannot combine recipes").removeprefix(":").strip()
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"{names} cannot be combined: ExecuTorch reports {why}.",
            "Leave one out, or set the option once in [edge].",
            recipes=names,
        ) from error
    built.name = recipe.name
    _apply_partitioners(recipe, methods, built)
    if built.lowering_recipe is not None:
        components.configure_xnnpack(built.lowering_recipe.partitioners or [], per_op=recipe.options.per_op)
    _apply_executorch(recipe, built)
    return built


def partitioners(built: ExportRecipe, method: str) -> list[Any]:
    """Return a method's partitioners from the result of `export_recipe`; an empty list means ExecuTorch's portable kernels."""
    configured = built.lowering_recipe.partitioners if built.lowering_recipe is not None else None
    return list((configured.get(method) if isinstance(configured, Mapping) else configured) or ())


def quantization(recipe: Recipe, method: str) -> QuantizationRecipe | None:
    """Return a new QuantizationRecipe of one method; None if PT2E does not quantize it.

    Raises:
        RECIPE_UNAVAILABLE, BAD_RECIPE_COMBINATION, StageFailed: as `export_recipe`.
    """
    method_quantizers = recipe.options.methods.get(method, MethodOptions()).quantizers
    configured = recipe.options.quantizers if method_quantizers is None else method_quantizers
    if configured is not None:
        return QuantizationRecipe(quantizers=components.quantizers(configured)) if configured else None
    built = export_recipe(recipe, [method]).quantization_recipe
    return built if built is not None and built.quantizers else None


def stages(recipe: Recipe, built: ExportRecipe) -> tuple[str, ...]:
    """Return all stages of the pipeline, wherever they run: the recipe file's, else the ExportRecipe's, else the default.

    A recipe with passes for EDGE_PROGRAM_MANAGER_TRANSFORM gets that stage, as in ExportSession.
    """
    if recipe.options.stages is not None:
        return recipe.options.stages
    if built.pipeline_stages:
        return tuple(stage.name for stage in built.pipeline_stages)
    names, transform = list(recipe.stages), "EDGE_PROGRAM_MANAGER_TRANSFORM"
    if built.lowering_recipe and built.lowering_recipe.edge_manager_transform_passes and transform not in names:
        names.insert(names.index("TO_EXECUTORCH"), transform)
    return tuple(names)


def _build_part(part: Part) -> ExportRecipe:
    if part.is_plugin:
        return plugins.recipe(part.name, part.arguments)
    if part.name == "portable":
        return ExportRecipe(
            name="portable", lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False))
        )
    try:
        with _suppress_stderr():
            coreml = part.specification.backend == "coreml"
            arguments = components.coreml_arguments(part.arguments) if coreml else dict(part.arguments)
            return ExportRecipe.get_recipe(_find_recipe_type(part), **arguments)
    except (ImportError, OSError) as error:
        raise recipe_unavailable(part.name, first_line(error)) from error
    except ValueError as error:
        raise stage_failed("SOURCE_TRANSFORM", error) from error


def _find_recipe_type(part: Part) -> Any:
    backend = part.specification.backend
    importlib.import_module(_RECIPE_MODULES[backend])
    for registered in recipe_registry.list_backends():
        for recipe_type in recipe_registry.get_supported_recipes(registered):
            if recipe_type.value == part.name:
                return recipe_type
    raise recipe_unavailable(part.name, f"no provider of {backend} recipes has it")


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
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        operator = None
    # torch.ops also has attributes that are not operators, and those lead to arbitrary objects.
    if not isinstance(operator, torch._ops.OpOverload):
        raise bad_recipe_field(
            f"[edge] {field}", name, "operators that the server's torch has, with their overload, like aten.linear.default"
        )
    return operator


def _apply_partitioners(recipe: Recipe, methods: Sequence[str], built: ExportRecipe) -> None:
    options = recipe.options
    by_method = {
        name: method.partitioners
        for name, method in options.methods.items()
        if method.partitioners is not None and name in methods
    }
    if options.partitioners is None and not by_method:
        return
    lowering = built.lowering_recipe = built.lowering_recipe or LoweringRecipe()
    if options.partitioners is not None:
        lowering.partitioners = components.partitioners(options.partitioners)
    if by_method:
        shared = lowering.partitioners or []
        lowering.partitioners = {
            method: components.partitioners(by_method[method]) if method in by_method
            else list(shared.get(method, [])) if isinstance(shared, dict) else list(shared)
            for method in methods
        }  # fmt: skip


def _apply_executorch(recipe: Recipe, built: ExportRecipe) -> None:
    config = built.executorch_backend_config = built.executorch_backend_config or ExecutorchBackendConfig()
    options = recipe.options.executorch
    planned = {field: value for field, value in options.items() if field in _PLANNED}
    if planned or config.memory_planning_pass is ExecutorchBackendConfig.memory_planning_pass:
        # ExecuTorch's default is a single stateful object of the process.
        algorithm = str(planned.pop("memory_planning", "greedy"))
        config.memory_planning_pass = MemoryPlanningPass(MemoryPlanningAlgorithmSuite([_ALGORITHMS[algorithm]]), **planned)
    for field, value in options.items():
        if field not in (*_PLANNED, "share_mutable_buffers"):  # the latter depends on the programs; see `shared_state`
            setattr(config, field, _external_constants(value) if field == "external_constants" else value)


def _external_constants(value: Plain) -> Any:
    """Return ExecutorchBackendConfig.external_constants: a bool, or a function that returns the file name of each constant."""
    return value if isinstance(value, bool) else lambda node: str(value)


@contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Suppress what providers print about missing tools; the raised error states it."""
    with redirect_stderr(io.StringIO()):
        yield
