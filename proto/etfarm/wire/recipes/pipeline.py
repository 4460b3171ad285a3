"""Whether a recipe's stages are a pipeline that does what the recipe says, and whether its parts go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from etfarm.wire import stages as export_stages
from etfarm.wire.recipes.errors import BadCombination, BadRecipeField, did_you_mean
from etfarm.wire.recipes.recipe import Recipe
from etfarm.wire.recipes.table import Quantization
from etfarm.wire.stages import BadStages

_PT2E: Final = (Quantization.PT2E_STATIC, Quantization.PT2E_DYNAMIC)


def check(recipe: Recipe) -> None:
    """Refuses what can be known to fail, or to do silently less than it says, before anything costly runs.

    What an unknown plug-in's recipe does to numbers is not asked: see `Recipe.resolved`.

    Raises:
        BadStages, BadCombination: as they say.
    """
    check_combination(recipe)
    check_pipeline(recipe)


def check_combination(recipe: Recipe) -> None:
    """Refuses parts that cannot be one recipe, and quantizers that would find nothing left.

    Of several quantizers the first one takes what it can, and the others get what is left, without a word. So two named
    recipes that quantize for one backend are refused, since which of them is first shows in neither; a file can still say
    a mixture, as its list of quantizers has an order and names modules. There a quantizer is refused that follows a static
    one for all modules of the same backend: that one has taken everything.

    Raises:
        BadCombination: with the names of both.
    """
    names = [part.name for part in recipe.parts]
    if len(names) > 1 and "portable" in names:
        raise BadCombination(
            "portable cannot be combined: it delegates nothing, and so adds nothing.", "Leave it out.", recipes=",".join(names)
        )
    if recipe.options.per_op and not recipe.takes_xnnpack:
        raise BadCombination(
            f"per_op gives each operator a delegate of XNNPACK, which takes no part in {recipe.name}.", "Leave per_op out.",
            recipes=",".join(names),
        )  # fmt: skip
    _check_quantizers(recipe)
    source = [part for part in recipe.parts if part.specification.quantization is Quantization.TORCHAO_SOURCE]
    if not source:
        return
    quantizing = [part.name for part in recipe.parts if part.specification.quantization is not Quantization.NONE]
    others = quantizing if len(quantizing) > 1 else []
    if others:
        raise BadCombination(
            f"{' and '.join(others)} cannot be combined: {source[0].name} replaces modules before the export, "
            "and what is quantized already cannot be quantized again.",
            "Keep one of them.", recipes=",".join(others),
        )  # fmt: skip
    options = recipe.options
    if options.quantizers or any(method.quantizers for method in options.methods.values()):
        raise BadCombination(
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
            raise BadCombination(
                f"{first} and {part.name} cannot be combined: both quantize the whole model for {part.specification.backend}, "
                f"and {part.name} would only get what {first} leaves.",
                "Keep one of them, or write a recipe file: [methods.NAME] quantizers gives a method its own, and [[quantizers]] "
                "with only_modules names what is quantized otherwise.",
                recipes=f"{first},{part.name}",
            )  # fmt: skip
    for quantizers in (options.quantizers, *(method.quantizers for method in options.methods.values())):
        taken: set[str] = set()
        for one in quantizers or ():
            if one.name in taken:
                raise BadCombination(
                    f"Two quantizers {one.name} cannot be combined: the first one takes the whole model, and leaves the second "
                    "nothing.",
                    "Put the one with only_modules or dynamic = true first, or leave one out.", recipes=one.name,
                )  # fmt: skip
            arguments = one.arguments
            if not (arguments.get("dynamic") or arguments.get("only_modules") or arguments.get("skip_modules")):
                taken.add(one.name)


def check_pipeline(recipe: Recipe) -> None:
    """Refuses stages that are no order, or that leave out what the recipe is.

    Raises:
        BadStages: they are no order, leave out QUANTIZE where there is a quantizer (or the reverse), end too early, or
            have none that is to be replaced.
    """
    stages, quantization = recipe.stages, recipe.quantization
    said, name = ",".join(stages), recipe.name
    export_stages.check_order(stages)
    if quantization in _PT2E and "QUANTIZE" not in stages:
        raise BadStages(
            f"Recipe {name} quantizes, and its stages leave out QUANTIZE: the program would silently be fp32.",
            "Write QUANTIZE before TORCH_EXPORT, or quantizers = [].", stages=said, stage_name="QUANTIZE",
        )  # fmt: skip
    if quantization is Quantization.TORCHAO_SOURCE and "SOURCE_TRANSFORM" not in stages:
        raise BadStages(
            f"Recipe {name} quantizes modules before the export, and its stages leave out SOURCE_TRANSFORM: "
            "the program would silently be fp32.",
            "Write SOURCE_TRANSFORM before TORCH_EXPORT.", stages=said, stage_name="SOURCE_TRANSFORM",
        )  # fmt: skip
    if quantization not in _PT2E and "QUANTIZE" in stages and recipe.resolved:
        raise BadStages(
            f"Recipe {name} has the stage QUANTIZE and no quantizer for it.",
            "Name quantizers, or leave QUANTIZE out.", stages=said, stage_name="QUANTIZE",
        )  # fmt: skip
    if stages[-1] != "TO_EXECUTORCH":
        raise BadStages(
            f"The stages of recipe {name} end with {stages[-1]}: only TO_EXECUTORCH writes a program.",
            f"End them with TO_EXECUTORCH; `etfarm compile --stop-after {stages[-1]}` ends one compilation earlier.",
            stages=said, stage_name=stages[-1],
        )  # fmt: skip
    for stage in recipe.options.replace:
        if stage not in stages:
            raise BadStages(
                f"[replace] {stage} replaces no stage of recipe {name}.",
                f"Its stages are {', '.join(stages)}; write stages = [...] with {stage}.", stages=said, stage_name=stage,
            )  # fmt: skip


def check_methods(recipe: Recipe, methods: Sequence[str]) -> None:
    """Refuses a recipe that says something of a method that the model does not have, which would silently do nothing.

    Raises:
        BadRecipeField: with the methods that there are.
    """
    for method in recipe.options.methods:
        if method not in methods:
            raise BadRecipeField(f"[methods.{method}]", method, ", ".join(methods), did_you_mean(method, methods))
