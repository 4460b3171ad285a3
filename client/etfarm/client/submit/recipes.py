"""Recipes as users write them: a name with arguments, several joined by +, or the path of a TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.errors import UserError
from etfarm.client.submit.options import one_spelling, require_some
from etfarm.wire.errors import error_for, error_of

if TYPE_CHECKING:
    from etfarm.wire.recipes import Recipe

    Recipes = str | Recipe | Sequence[str | Recipe]

DEFAULT_RECIPE = "xnnpack_fp32"


def read_recipe(text: str | Recipe) -> Recipe:
    """Parse a recipe: `name`, `name:key=value,...`, several of them joined by `+`, or a TOML file's path.

    A recipe that was parsed before is returned as it is, so that each caller can read what it receives.

    A name with a dot is a plug-in of the server; only the server can check whether it exists.

    Raises:
        UserError: the name is unknown, an argument or field is wrong, or the file cannot be read.
    """
    from etfarm.wire import recipes

    if isinstance(text, recipes.Recipe):
        return text
    if not text.endswith(".toml"):
        return recipes.parse(text)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise error_for("BAD_RECIPE_TEXT", f"The recipe file {text} cannot be read: {why}.", path=text) from None
    try:
        return recipes.from_toml(content, name=Path(text).stem)
    except UserError as error:
        # A job may have several recipe files.
        metadata = {**error.metadata, "path": text}
        raise error_of(error.fault, error.reason, f"{text}: {error.message}", error.remedy, metadata=metadata) from error


def reads_values(recipe: Recipe) -> bool:
    """Return whether the recipe uses calibration samples; True for a plug-in, since only the server knows it."""
    from etfarm.wire import recipes

    if recipe.quantization is recipes.Quantization.PT2E_DYNAMIC:
        return False
    return "QUANTIZE" in recipe.stages or bool(recipe.plugins)


def chosen_recipes(recipe: Recipes | None, recipes: Recipes | None) -> list[str | Recipe]:
    """Return the recipes of the keywords `recipe` and `recipes` as a list; the default recipe if neither is set.

    Raises:
        BAD_OPTION: both are set, there is no recipe, or something else is given, such as inputs.
    """
    from etfarm.wire.recipes import Recipe

    for keyword, value in (("recipe", recipe), ("recipes", recipes)):
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, str | Recipe | None):
                raise error_for(
                    "BAD_OPTION",
                    f"`{keyword}` must be a recipe's name, a TOML file or a Recipe, got {type(each).__name__}.",
                    "Give a module's inputs as example_inputs=(x,), those of a program as inputs={...}.", option=keyword,
                )  # fmt: skip
    chosen = one_spelling("recipe", recipe, "recipes", recipes, DEFAULT_RECIPE)
    listed = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
    require_some("recipes", listed, repr(DEFAULT_RECIPE))
    return listed  # type: ignore[return-value]  # mypy: a Sequence that is neither list nor tuple is no list of recipes


def only_recipe(recipe: Recipes | None, recipes: Recipes | None) -> str | Recipe:
    """Return the recipe of the keywords `recipe` and `recipes` of a call that takes a single one.

    Raises:
        BAD_OPTION: as `chosen_recipes`, or there are several.
    """
    listed = chosen_recipes(recipe, recipes)
    if len(listed) > 1:
        raise error_for(
            "BAD_OPTION", f"`recipe` must be one recipe, got {len(listed)}.", "Make one call for each.", option="recipe"
        )
    return listed[0]
