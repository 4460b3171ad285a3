"""Recipes as users write them: a name with arguments, several joined by +, or the path of a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.errors import UserError
from etfarm.wire.errors import error_of

if TYPE_CHECKING:
    from etfarm.wire.recipes import Recipe

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
        raise recipes.BadRecipeText(f"The recipe file {text} cannot be read: {why}.", path=text) from None
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
