"""Errors in recipes, each with the allowed alternatives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

from etfarm.wire.errors import EtfarmError, UserError, error_for
from etfarm.wire.recipes.values import shown

_COMPARED: Final = 200
"""Number of characters that are compared with the known names; the comparison takes quadratic time."""


def unknown_recipe(name: str, known: Iterable[str]) -> EtfarmError:
    """Return the error of a name that no recipe has."""
    near = _find_near(name[:_COMPARED], list(known))
    remedy = f"Did you mean {alternatives(near)}?" if near else "`etfarm recipes list` shows the known ones."
    return error_for("UNKNOWN_RECIPE", f"There is no recipe {name!r}.", remedy, recipe=name, nearest=",".join(near))


def unknown_recipe_argument(recipe: str, argument: str, known: Sequence[str]) -> EtfarmError:
    """Return the error of an argument that the recipe does not take."""
    takes = f"It takes {', '.join(known)}." if known else "It takes none."
    return error_for(
        "UNKNOWN_RECIPE_ARGUMENT",
        f"Recipe {recipe} has no argument {argument!r}.",
        f"{takes}{did_you_mean(argument, known)}",
        recipe=recipe,
        argument=argument,
        known=",".join(known),
    )


class BadRecipeArgument(UserError):
    """An argument whose value is missing, of another type, or not allowed."""

    reason = "BAD_RECIPE_ARGUMENT"

    def __init__(self, recipe: str, argument: str, value: object, allowed: str) -> None:
        what = f"needs the argument {argument!r}" if value is None else f"cannot take {argument}={shown(value)}"
        super().__init__(
            f"Recipe {recipe} {what}.",
            f"Allowed: {allowed}.",
            recipe=recipe,
            argument=argument,
            value="" if value is None else shown(value),
            allowed=allowed,
        )


def bad_recipe_field(field: str, value: object, allowed: str, near: str = "") -> EtfarmError:
    """Return the error of a field of a recipe file that is unknown, or whose value is not allowed.

    Args:
        field: the field's full name, as in the file: `[executorch] memory_planning`.
        value: its value; None if the field itself is unknown.
        allowed: the allowed values, or the known fields.
    """
    what = f"cannot be {literal(value)}" if value is not None else "is not known"
    return error_for(
        "BAD_RECIPE_FIELD",
        f"{field} {what}.", f"Allowed: {allowed}.{near}",
        field=field, value="" if value is None else shown(value), allowed=allowed,
    )  # fmt: skip


def _find_near(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three recipes: those that contain each word of the name in the order of the table, else those spelled alike.

    A part of a name, such as `int8`, is spelled most like the shortest name, not like the one that is meant.
    """
    words = [word for word in name.lower().replace("-", "_").split("_") if word]
    containing = [recipe for recipe in known if words and all(word in recipe.split("_") for word in words)]
    return containing[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def did_you_mean(value: object, known: Sequence[str]) -> str:
    """Return ` Did you mean X?`; empty without a close match."""
    near = difflib.get_close_matches(str(value)[:_COMPARED], known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def alternatives(names: Sequence[str]) -> str:
    """Return the names as `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def literal(value: object) -> str:
    """Return a value as a TOML literal; long ones are truncated."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(literal, value))}]"
    else:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
