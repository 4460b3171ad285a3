"""Validation of recipes: whether the parts can be combined, and whether the stages implement the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from etfarm.wire import stages as export_stages
from etfarm.wire.errors import error_for
from etfarm.wire.recipes.errors import bad_recipe_field, did_you_mean
from etfarm.wire.recipes.recipe import Recipe
from etfarm.wire.recipes.table import Quantization

_PT2E: Final = (Quantization.PT2E_STATIC, Quantization.PT2E_DYNAMIC)


def check(recipe: Recipe) -> None:
    """Validate a recipe: reject one that would fail, or silently do less than it states, before anything costly runs.

    The quantization of an unknown plug-in's recipe is not checked; see `Recipe.resolved`.

    Raises:
        BAD_STAGES, BAD_RECIPE_COMBINATION: the recipe is not valid.
    """
    check_combination(recipe)
    check_pipeline(recipe)


def check_combination(recipe: Recipe) -> None:
    """Raise an error for parts that cannot be combined, and for quantizers that would have no effect.

    Of several quantizers, the first one takes all operators that it can, and the others silently get the rest. Two named recipes
    that quantize for the same backend are therefore rejected, since their order is not apparent. A file can specify a mixture,
    as its list of quantizers is ordered and names modules; there, a quantizer is rejected if it follows a static quantizer for
    all modules of the same backend, which leaves nothing.

    Raises:
        BAD_RECIPE_COMBINATION: the parts cannot be combined; the error names them.
    """
    names = [part.name for part in recipe.parts]
    if len(names) > 1 and "portable" in names:
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            "portable cannot be combined: it delegates nothing, so it adds nothing.",
            "Leave it out.",
            recipes=",".join(names),
        )
    if recipe.options.per_op and not recipe.takes_xnnpack:
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"per_op gives each operator a delegate of XNNPACK, which {recipe.name} does not use.", "Leave per_op out.",
            recipes=",".join(names),
        )  # fmt: skip
    if recipe.options.fuse_activations and not recipe.takes_xnnpack:
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"fuse_activations quantizes as one what XNNPACK fuses, which {recipe.name} does not use.",
            "Leave fuse_activations out.", recipes=",".join(names),
        )  # fmt: skip
    _check_quantizers(recipe)
    source = [part for part in recipe.parts if part.specification.quantization is Quantization.TORCHAO_SOURCE]
    if not source:
        return
    quantizing = [part.name for part in recipe.parts if part.specification.quantization is not Quantization.NONE]
    others = quantizing if len(quantizing) > 1 else []
    if others:
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"{' and '.join(others)} cannot be combined: {source[0].name} replaces modules before the export, "
            "and what is quantized already cannot be quantized again.",
            "Keep one of them.", recipes=",".join(others),
        )  # fmt: skip
    options = recipe.options
    if options.quantizers or any(method.quantizers for method in options.methods.values()):
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"{source[0].name} cannot be combined with quantizers: it replaces modules before the export, "
            "and what is quantized already cannot be quantized again.",
            "Leave the quantizers or that recipe out.", recipes=source[0].name,
        )  # fmt: skip


def _check_quantizers(recipe: Recipe) -> None:
    options = recipe.options
    by_backend: dict[str, str] = {}
    for part in recipe.parts if options.quantizers is None else ():
        if part.specification.quantization not in _PT2E:
            continue
        first = by_backend.setdefault(part.specification.backend, part.name)
        if first != part.name:
            raise error_for(
                "BAD_RECIPE_COMBINATION",
                f"{first} and {part.name} cannot be combined: both quantize the whole model for {part.specification.backend}, "
                f"and {part.name} would only get what {first} leaves.",
                "Keep one of them, or write a recipe file: [methods.NAME] quantizers gives a method its own, and [[quantizers]] "
                "with only_modules names what is quantized otherwise.",
                recipes=f"{first},{part.name}",
            )  # fmt: skip
    for quantizers in (options.quantizers, *(method.quantizers for method in options.methods.values())):
        taken: set[str] = set()
        for entry in quantizers or ():
            if entry.name in taken:
                raise error_for(
                    "BAD_RECIPE_COMBINATION",
                    f"Two quantizers {entry.name} cannot be combined: the first one takes the whole model, and leaves the second "
                    "nothing.",
                    "Put the one with only_modules, only_operators or dynamic = true first, or leave one out.",
                    recipes=entry.name,
                )  # fmt: skip
            arguments = entry.arguments
            names = ("only_modules", "skip_modules", "only_operators", "skip_operators")
            if not any(arguments.get(name) for name in ("dynamic", *names)):
                taken.add(entry.name)


def check_pipeline(recipe: Recipe) -> None:
    """Raise an error for stages in an invalid order, or that do not implement the recipe.

    Raises:
        BAD_STAGES: the order is invalid, QUANTIZE is missing although there is a quantizer (or the reverse), the last stage
            does not write a program, or a stage that is to be replaced is missing.
    """
    stages, quantization = recipe.stages, recipe.quantization
    order, name = ",".join(stages), recipe.name
    export_stages.check_order(stages)
    if quantization in _PT2E and "QUANTIZE" not in stages:
        raise error_for(
            "BAD_STAGES",
            f"Recipe {name} quantizes, and its stages leave out QUANTIZE: the program would silently be fp32.",
            "Write QUANTIZE before TORCH_EXPORT, or quantizers = [].", stages=order, stage_name="QUANTIZE",
        )  # fmt: skip
    if quantization is Quantization.TORCHAO_SOURCE and "SOURCE_TRANSFORM" not in stages:
        raise error_for(
            "BAD_STAGES",
            f"Recipe {name} quantizes modules before the export, and its stages leave out SOURCE_TRANSFORM: "
            "the program would silently be fp32.",
            "Write SOURCE_TRANSFORM before TORCH_EXPORT.", stages=order, stage_name="SOURCE_TRANSFORM",
        )  # fmt: skip
    if quantization not in _PT2E and recipe.resolved and (changes := recipe.options.before_quantization()):
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            f"{' and '.join(changes)} changes what the stage QUANTIZE quantizes, which recipe {name} does not have.",
            f"Leave {' and '.join(changes)} out, or name a recipe or quantizers of pt2e.", recipes=name,
        )  # fmt: skip
    if quantization not in _PT2E and "QUANTIZE" in stages and recipe.resolved:
        raise error_for(
            "BAD_STAGES",
            f"Recipe {name} has the stage QUANTIZE and no quantizer for it.",
            "Name quantizers, or leave QUANTIZE out.", stages=order, stage_name="QUANTIZE",
        )  # fmt: skip
    if stages[-1] != "TO_EXECUTORCH":
        raise error_for(
            "BAD_STAGES",
            f"The stages of recipe {name} end with {stages[-1]}: only TO_EXECUTORCH writes a program.",
            f"End them with TO_EXECUTORCH; `etfarm compile --stop-after {stages[-1]}` ends one compilation earlier.",
            stages=order, stage_name=stages[-1],
        )  # fmt: skip
    for stage in recipe.options.replace:
        if stage not in stages:
            raise error_for(
                "BAD_STAGES",
                f"[replace] {stage} replaces no stage of recipe {name}.",
                f"Its stages are {', '.join(stages)}; write stages = [...] with {stage}.", stages=order, stage_name=stage,
            )  # fmt: skip


def check_methods(recipe: Recipe, methods: Sequence[str]) -> None:
    """Raise an error for a recipe with options of a method that the model lacks, which would silently have no effect.

    Raises:
        BAD_RECIPE_FIELD: a method does not exist; the error lists the existing ones.
    """
    for method in recipe.options.methods:
        if method not in methods:
            raise bad_recipe_field(f"[methods.{method}]", method, ", ".join(methods), did_you_mean(method, methods))
