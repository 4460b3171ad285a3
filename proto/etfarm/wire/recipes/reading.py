"""From what a user writes to a Recipe: `name:key=value+name`, a TOML file, or a Recipe's own JSON."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from etfarm.wire.recipes import fields, pipeline
from etfarm.wire.recipes.errors import BadRecipeArgument, BadRecipeField, BadRecipeText, UnknownRecipe, UnknownRecipeArgument
from etfarm.wire.recipes.recipe import Part, Recipe
from etfarm.wire.recipes.table import RECIPES, Quantization, Specification
from etfarm.wire.recipes.values import Plain, plain, spoken

PLUGIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){1,4}")
"""A name with a dot: an installed plug-in's."""

MAX_CHARACTERS: Final = 256 << 10
"""Maximum length of a recipe as JSON or TOML."""

MAX_PARTS: Final = 32
"""Maximum number of recipes that are combined."""

MAX_ARGUMENTS: Final = 64
"""Maximum number of arguments of one recipe."""

_ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def parse(text: str) -> Recipe:
    """The recipe of `name`, `name:key=value,...`, or several of these joined by `+`. For a TOML file see `from_toml`.

    Raises:
        BadRecipeText: the text has another form.
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument, BadCombination: as they say.
    """
    _require_short(text)
    return _checked(Recipe(_merged([_part(one, text) for one in _bounded_parts(text.split("+"))])))


def resolve(name: str, given: Mapping[str, object]) -> Recipe:
    """The recipe `name` with `given` arguments and the defaults of the others.

    Raises:
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    return _checked(Recipe((_named(name, given),)))


def from_toml(text: str, name: str = "") -> Recipe:
    """The recipe of a TOML text.

    Args:
        text: what the file has.
        name: what people see where the file names none; no part of the recipe's identity. The name of a recipe that is
            another is not taken.

    Raises:
        BadRecipeText: it is no TOML, or names neither recipes nor partitioners.
        BadRecipeField: a field is unknown, or its value is not allowed.
        BadStages, BadCombination, UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    _require_short(text)
    try:
        said = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRecipeText(f"The recipe file is no TOML: {error}.") from None
    parts, rest = _parts(said, fields.TOP)
    return _checked(Recipe(parts, fields.options(rest), "" if name in RECIPES else name))


def from_json(text: str) -> Recipe:
    """The recipe whose `json` this is.

    Raises:
        BadRecipeText: it is no JSON object of that form.
        BadRecipeField, BadStages, BadCombination, UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    _require_short(text)
    try:
        said = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRecipeText(f"The recipe is no JSON: {error}.") from None
    if not isinstance(said, dict):
        raise BadRecipeText("The recipe is no JSON object of `recipe`, `arguments` and `options`.")
    options = said.pop("options", {})
    if not isinstance(options, dict):
        raise BadRecipeText("The recipe's `options` are no JSON object.")
    parts, rest = _parts(said, ("recipe", "arguments", "combine", "options"))
    for key in rest:
        raise fields.unknown("", key, ("recipe", "arguments", "combine", "options"))
    return _checked(Recipe(parts, fields.options(options)))


def with_plugins(recipe: Recipe, known: Mapping[str, Specification]) -> Recipe:
    """The recipe with what is known of plug-ins' recipes; its identity stays the same.

    Args:
        recipe: any.
        known: what plug-ins say of their recipes, by dotted name. A recipe that is not there stays unresolved; arguments
            are checked of those that tell theirs.

    Raises:
        UnknownRecipeArgument, BadRecipeArgument, BadStages, BadCombination: as they say.
    """
    parts = []
    for part in recipe.parts:
        specification = known.get(part.name) if part.is_plugin else None
        if specification is None:
            parts.append(part)
            continue
        if specification.arguments:
            arguments = {argument.name: argument for argument in specification.arguments}
            for key, value in part.arguments.items():
                if key not in arguments:
                    raise UnknownRecipeArgument(part.name, key, list(arguments))
                _read(part.name, key, arguments[key].convert(value), part.arguments, arguments[key].allowed)
            for argument in specification.arguments:
                if argument.required and argument.name not in part.arguments:
                    raise BadRecipeArgument(part.name, argument.name, None, argument.allowed)
        parts.append(Part(replace(specification, name=part.name), part.arguments))
    return _checked(replace(recipe, parts=tuple(parts)))


def _require_short(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise BadRecipeText(
            f"A recipe must have at most {MAX_CHARACTERS} characters, got {len(text)}.", "Name modules by a common parent.",
            limit=MAX_CHARACTERS, got=len(text),
        )  # fmt: skip


def _bounded_parts(parts: list[Any]) -> list[Any]:
    if len(parts) > MAX_PARTS:
        raise BadRecipeText(
            f"At most {MAX_PARTS} recipes can be combined, got {len(parts)}.", "Leave some out.", limit=MAX_PARTS, got=len(parts)
        )
    return parts


def _checked(recipe: Recipe) -> Recipe:
    options = recipe.options
    methods = (method.partitioners for method in options.methods.values())
    if not recipe.parts and all(said is None for said in (options.partitioners, *methods)):
        raise BadRecipeText(
            "The recipe names neither recipes nor partitioners.",
            'Write recipe = "name", combine = ["name", "name"] or partitioners = ["name"].',
        )
    pipeline.check(recipe)
    return recipe


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Without those that are there twice: a recipe that is combined with itself is itself."""
    found: dict[str, Part] = {}
    for part in parts:
        found.setdefault(Recipe((part,)).json, part)
    return tuple(found.values())


def _part(text: str, whole: str) -> Part:
    name, colon, rest = text.strip().partition(":")
    given: dict[str, object] = {}
    for piece in rest.split(",") if rest else []:
        key, equals, value = piece.partition("=")
        if not equals or not key.strip() or key.strip() in given:
            raise BadRecipeText(
                f"{whole!r} is no recipe: {piece!r} is not one key=value.", "Write name:key=value,key=value.", text=whole
            )
        given[key.strip()] = spoken(value.strip()) if PLUGIN.fullmatch(name) else value.strip()
    if colon and not given:
        raise BadRecipeText(f"{whole!r} is no recipe: nothing follows the colon.", "Write name:key=value.", text=whole)
    if not name and "+" in whole:
        raise BadRecipeText(f"{whole!r} is no recipe: nothing is on one side of a +.", "Write name+name.", text=whole)
    return _named(name, given)


def _named(name: str, given: Mapping[str, object]) -> Part:
    if len(given) > MAX_ARGUMENTS:
        raise BadRecipeText(
            f"A recipe must have at most {MAX_ARGUMENTS} arguments, got {len(given)}.", limit=MAX_ARGUMENTS, got=len(given)
        )
    if PLUGIN.fullmatch(name):
        return Part(Specification(name, "", Quantization.NONE, "", resolved=False), _any_arguments(name, given))
    specification = RECIPES.get(name)
    if specification is None:
        raise UnknownRecipe(name, RECIPES)
    known = {argument.name: argument for argument in specification.arguments}
    for key in given:
        if key not in known:
            raise UnknownRecipeArgument(name, key, list(known))
    values: dict[str, Plain] = {}
    for argument in specification.arguments:
        if argument.name in given:
            values[argument.name] = _read(name, argument.name, argument.convert(given[argument.name]), given, argument.allowed)
        elif argument.default is not None:
            values[argument.name] = argument.default
        elif argument.required:
            raise BadRecipeArgument(name, argument.name, None, argument.allowed)
    return Part(specification, values)


def _any_arguments(name: str, given: Mapping[str, object]) -> dict[str, Plain]:
    values = {}
    for key, value in given.items():
        if not _ARGUMENT.fullmatch(key):
            raise UnknownRecipeArgument(name, key, ())
        values[key] = _read(name, key, plain(value), given, "a text, a number, true, false, or a list of texts or integers")
    return values


def _read(name: str, key: str, value: Plain | None, given: Mapping[str, object], allowed: str) -> Plain:
    if value is None:
        raise BadRecipeArgument(name, key, "" if given[key] is None else given[key], allowed)
    return value


def _parts(said: Mapping[str, object], known: tuple[str, ...]) -> tuple[tuple[Part, ...], dict[str, object]]:
    """The named recipes, and what else is said."""
    rest = {key: value for key, value in said.items() if key not in ("recipe", "arguments", "combine")}
    for key in rest:
        if key not in known:
            raise fields.unknown("", key, known)
    if "combine" in said:
        if "recipe" in said or "arguments" in said:
            raise BadRecipeText("A recipe has either `recipe` with `arguments` or `combine`, not both.", "Leave one out.")
        return _combined(said["combine"]), rest
    if "recipe" not in said:
        if "arguments" in said:
            raise BadRecipeText("The recipe has arguments and no name to go with them.", 'Write recipe = "name".')
        return (), rest
    name, arguments = said["recipe"], said.get("arguments", {})
    if not isinstance(name, str):
        raise BadRecipeField("recipe", name, "a recipe's name; `etfarm recipes list` shows those there are")
    if not isinstance(arguments, dict):
        raise BadRecipeField("[arguments]", arguments, "a table of key = value")
    return (_named(name, arguments),), rest


def _combined(said: object) -> tuple[Part, ...]:
    allowed = 'a list of recipes, each "name", "name:key=value,..." or a table of recipe and arguments'
    if not isinstance(said, list) or not said:
        raise BadRecipeField("combine", said, allowed)
    parts = []
    for one in _bounded_parts(said):
        if isinstance(one, str):
            parts.append(_part(one, one))
        elif isinstance(one, dict) and isinstance(one.get("recipe"), str) and isinstance(one.get("arguments", {}), dict):
            for key in one:
                if key not in ("recipe", "arguments"):
                    raise fields.unknown("[[combine]]", key, ("recipe", "arguments"))
            parts.append(_named(one["recipe"], one.get("arguments", {})))
        else:
            raise BadRecipeField("combine", one, allowed)
    return _merged(parts)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no number")
