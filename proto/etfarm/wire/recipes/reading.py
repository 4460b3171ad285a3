"""Parsing of recipes from text (`name:key=value+name`), TOML files, or a Recipe's own JSON."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Final

from etfarm.wire import stages as export_stages
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.recipes import pipeline
from etfarm.wire.recipes.components import EDGE, EXECUTORCH, PARTITIONERS, QUANTIZERS, ComponentSpecification
from etfarm.wire.recipes.errors import (
    BadRecipeArgument,
    bad_recipe_field,
    did_you_mean,
    unknown_recipe,
    unknown_recipe_argument,
)
from etfarm.wire.recipes.recipe import Component, MethodOptions, Options, Part, Recipe
from etfarm.wire.recipes.table import RECIPES, Quantization, Specification
from etfarm.wire.recipes.values import Argument, Plain, plain, shown, spoken
from etfarm.wire.stages import REPLACEABLE

PLUGIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){1,4}")
"""The name of an installed plug-in, which has a dot."""

MAX_CHARACTERS: Final = 256 << 10
"""Maximum length of a recipe as JSON or TOML."""

MAX_PARTS: Final = 32
"""Maximum number of recipes that are combined."""

MAX_ARGUMENTS: Final = 64
"""Maximum number of arguments of one recipe."""

_ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
OPTIONS: Final = (
    "name", "strict", "per_op", "copy_shared_layers", "fuse_activations", "stages", "partitioners", "quantizers", "methods",
    "edge", "executorch", "replace",
)  # fmt: skip
"""The fields of options."""

TOP: Final = ("recipe", "combine", "arguments", *OPTIONS)
"""The fields of a file."""

MAX_COMPONENTS: Final = 64
"""Maximum number of partitioners, quantizers or stages in one list."""

MAX_METHODS: Final = 256
"""Maximum number of methods with their own options."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_METHOD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_STAGE_PLUGIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){1,4}")


def parse(text: str) -> Recipe:
    """Return the recipe of `name`, `name:key=value,...`, or several of these joined by `+`. For a TOML file see `from_toml`.

    Raises:
        BAD_RECIPE_TEXT: the text has another form.
        UNKNOWN_RECIPE, UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument, BAD_RECIPE_COMBINATION: the recipe is not valid.
    """
    _require_short(text)
    return _checked(Recipe(_merged([_part(part, text) for part in _bounded_parts(text.split("+"))])))


def resolve(name: str, arguments: Mapping[str, object]) -> Recipe:
    """Return the recipe `name` with `arguments` and the defaults of the others.

    Raises:
        UNKNOWN_RECIPE, UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument: the recipe is not valid.
    """
    return _checked(Recipe((_named(name, arguments),)))


def from_toml(text: str, name: str = "") -> Recipe:
    """Return the recipe of a TOML text.

    Args:
        text: content of the file.
        name: label for users if the file has no name; not part of the recipe's identity. The name of a known recipe is
            ignored.

    Raises:
        BAD_RECIPE_TEXT: the text is not TOML, or names neither recipes nor partitioners.
        BAD_RECIPE_FIELD: a field is unknown, or its value is not allowed.
        BAD_STAGES, BAD_RECIPE_COMBINATION, UNKNOWN_RECIPE, UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument: the recipe is not valid.
    """
    _require_short(text)
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise error_for("BAD_RECIPE_TEXT", f"The recipe file is not TOML: {error}.") from None
    parts, rest = _parts(table, TOP)
    return _checked(Recipe(parts, options(rest), "" if name in RECIPES else name))


def from_json(text: str) -> Recipe:
    """Return the recipe with this `json`.

    Raises:
        BAD_RECIPE_TEXT: the text is not a JSON object of that form.
        BAD_RECIPE_FIELD, BAD_STAGES, BAD_RECIPE_COMBINATION, UNKNOWN_RECIPE, UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument: the
            recipe is not valid.
    """
    _require_short(text)
    try:
        table = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise error_for("BAD_RECIPE_TEXT", f"The recipe is not JSON: {error}.") from None
    if not isinstance(table, dict):
        raise error_for("BAD_RECIPE_TEXT", "The recipe is not a JSON object of `recipe`, `arguments` and `options`.")
    fields = table.pop("options", {})
    if not isinstance(fields, dict):
        raise error_for("BAD_RECIPE_TEXT", "The recipe's `options` are not a JSON object.")
    parts, rest = _parts(table, ("recipe", "arguments", "combine", "options"))
    for key in rest:
        raise unknown("", key, ("recipe", "arguments", "combine", "options"))
    return _checked(Recipe(parts, options(fields)))


def with_plugins(recipe: Recipe, known: Mapping[str, Specification]) -> Recipe:
    """Return the recipe with the specifications of plug-ins' recipes; its identity does not change.

    Args:
        recipe: any recipe.
        known: specifications of plug-ins' recipes by dotted name. A recipe without a specification stays unresolved;
            arguments are validated if the specification has any.

    Raises:
        UNKNOWN_RECIPE_ARGUMENT, BadRecipeArgument, BAD_STAGES, BAD_RECIPE_COMBINATION: the recipe is not valid.
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
                    raise unknown_recipe_argument(part.name, key, list(arguments))
                _read(part.name, key, arguments[key].convert(value), part.arguments, arguments[key].allowed)
            for argument in specification.arguments:
                if argument.required and argument.name not in part.arguments:
                    raise BadRecipeArgument(part.name, argument.name, None, argument.allowed)
        parts.append(Part(replace(specification, name=part.name), part.arguments))
    return _checked(replace(recipe, parts=tuple(parts)))


def _require_short(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise error_for(
            "BAD_RECIPE_TEXT",
            f"A recipe must have at most {MAX_CHARACTERS} characters, got {len(text)}.", "Name modules by a common parent.",
            limit=MAX_CHARACTERS, got=len(text),
        )  # fmt: skip


def _bounded_parts(parts: list[Any]) -> list[Any]:
    if len(parts) > MAX_PARTS:
        raise error_for(
            "BAD_RECIPE_TEXT",
            f"At most {MAX_PARTS} recipes can be combined, got {len(parts)}.",
            "Leave some out.",
            limit=MAX_PARTS,
            got=len(parts),
        )
    return parts


def _checked(recipe: Recipe) -> Recipe:
    options = recipe.options
    methods = (method.partitioners for method in options.methods.values())
    if not recipe.parts and all(partitioners is None for partitioners in (options.partitioners, *methods)):
        raise error_for(
            "BAD_RECIPE_TEXT",
            "The recipe names neither recipes nor partitioners.",
            'Write recipe = "name", combine = ["name", "name"] or partitioners = ["name"].',
        )
    if options.executorch.get("share_mutable_buffers") and options.executorch.get("alloc_mutable_buffers") is False:
        raise error_for(
            "BAD_RECIPE_COMBINATION",
            "[executorch] has share_mutable_buffers = true and alloc_mutable_buffers = false, but only planned memory is shared.",
            "Leave one of them out.", recipes=recipe.name,
        )  # fmt: skip
    pipeline.check(recipe)
    return recipe


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Return the parts without duplicates: a recipe that is combined with itself is itself."""
    unique: dict[str, Part] = {}
    for part in parts:
        unique.setdefault(Recipe((part,)).json, part)
    return tuple(unique.values())


def _part(text: str, whole: str) -> Part:
    name, colon, rest = text.strip().partition(":")
    arguments: dict[str, object] = {}
    for piece in rest.split(",") if rest else []:
        key, equals, value = piece.partition("=")
        if not equals or not key.strip() or key.strip() in arguments:
            raise error_for(
                "BAD_RECIPE_TEXT",
                f"{whole!r} is not a recipe: {piece!r} is not one key=value.",
                "Write name:key=value,key=value.",
                text=whole,
            )
        arguments[key.strip()] = spoken(value.strip()) if PLUGIN.fullmatch(name) else value.strip()
    if colon and not arguments:
        raise error_for(
            "BAD_RECIPE_TEXT", f"{whole!r} is not a recipe: nothing follows the colon.", "Write name:key=value.", text=whole
        )
    if not name and "+" in whole:
        raise error_for(
            "BAD_RECIPE_TEXT", f"{whole!r} is not a recipe: nothing is on one side of a +.", "Write name+name.", text=whole
        )
    return _named(name, arguments)


def _named(name: str, arguments: Mapping[str, object]) -> Part:
    if len(arguments) > MAX_ARGUMENTS:
        raise error_for(
            "BAD_RECIPE_TEXT",
            f"A recipe must have at most {MAX_ARGUMENTS} arguments, got {len(arguments)}.",
            limit=MAX_ARGUMENTS,
            got=len(arguments),
        )
    if PLUGIN.fullmatch(name):
        return Part(Specification(name, "", Quantization.NONE, "", resolved=False), _any_arguments(name, arguments))
    specification = RECIPES.get(name)
    if specification is None:
        raise unknown_recipe(name, RECIPES)
    known = {argument.name: argument for argument in specification.arguments}
    for key in arguments:
        if key not in known:
            raise unknown_recipe_argument(name, key, list(known))
    values: dict[str, Plain] = {}
    for argument in specification.arguments:
        if argument.name in arguments:
            values[argument.name] = _read(
                name, argument.name, argument.convert(arguments[argument.name]), arguments, argument.allowed
            )
        elif argument.default is not None:
            values[argument.name] = argument.default
        elif argument.required:
            raise BadRecipeArgument(name, argument.name, None, argument.allowed)
    return Part(specification, values)


def _any_arguments(name: str, arguments: Mapping[str, object]) -> dict[str, Plain]:
    values = {}
    for key, value in arguments.items():
        if not _ARGUMENT.fullmatch(key):
            raise unknown_recipe_argument(name, key, ())
        values[key] = _read(name, key, plain(value), arguments, "a text, a number, true, false, or a list of texts or integers")
    return values


def _read(name: str, key: str, value: Plain | None, arguments: Mapping[str, object], allowed: str) -> Plain:
    if value is None:
        raise BadRecipeArgument(name, key, "" if arguments[key] is None else arguments[key], allowed)
    return value


def _parts(table: Mapping[str, object], known: tuple[str, ...]) -> tuple[tuple[Part, ...], dict[str, object]]:
    """Return the named recipes, and the other fields."""
    rest = {key: value for key, value in table.items() if key not in ("recipe", "arguments", "combine")}
    for key in rest:
        if key not in known:
            raise unknown("", key, known)
    if "combine" in table:
        if "recipe" in table or "arguments" in table:
            raise error_for(
                "BAD_RECIPE_TEXT", "A recipe has either `recipe` with `arguments` or `combine`, not both.", "Leave one out."
            )
        return _combined(table["combine"]), rest
    if "recipe" not in table:
        if "arguments" in table:
            raise error_for("BAD_RECIPE_TEXT", "The recipe has arguments but no name.", 'Write recipe = "name".')
        return (), rest
    name, arguments = table["recipe"], table.get("arguments", {})
    if not isinstance(name, str):
        raise bad_recipe_field("recipe", name, "a recipe's name; `etfarm recipes list` shows the known ones")
    if not isinstance(arguments, dict):
        raise bad_recipe_field("[arguments]", arguments, "a table of key = value")
    return (_named(name, arguments),), rest


def _combined(entries: object) -> tuple[Part, ...]:
    allowed = 'a list of recipes, each "name", "name:key=value,..." or a table of recipe and arguments'
    if not isinstance(entries, list) or not entries:
        raise bad_recipe_field("combine", entries, allowed)
    parts = []
    for entry in _bounded_parts(entries):
        if isinstance(entry, str):
            parts.append(_part(entry, entry))
        elif isinstance(entry, dict) and isinstance(entry.get("recipe"), str) and isinstance(entry.get("arguments", {}), dict):
            for key in entry:
                if key not in ("recipe", "arguments"):
                    raise unknown("[[combine]]", key, ("recipe", "arguments"))
            parts.append(_named(entry["recipe"], entry.get("arguments", {})))
        else:
            raise bad_recipe_field("combine", entry, allowed)
    return _merged(parts)


def _reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _reject_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number")


def options(table: Mapping[str, object]) -> Options:
    """Return the options of a recipe file or a recipe's JSON.

    Args:
        table: values by field.

    Raises:
        BAD_RECIPE_FIELD: a field is unknown, or its value is not allowed.
    """
    for key in table:
        if key not in OPTIONS:
            raise unknown("", key, OPTIONS)
    return Options(
        strict=_flag("strict", table.get("strict")),
        stages=_stages(table.get("stages")),
        partitioners=_components("partitioners", table.get("partitioners"), PARTITIONERS),
        quantizers=_components("quantizers", table.get("quantizers"), QUANTIZERS),
        methods=_methods(table.get("methods", {})),
        edge=_values("edge", table.get("edge", {}), EDGE),
        executorch=_values("executorch", table.get("executorch", {}), EXECUTORCH),
        replace=_replace(table.get("replace", {})),
        name=_name(table.get("name")),
        per_op=bool(_flag("per_op", table.get("per_op"))),
        copy_shared_layers=bool(_flag("copy_shared_layers", table.get("copy_shared_layers"))),
        fuse_activations=bool(_flag("fuse_activations", table.get("fuse_activations"))),
    )


def unknown(table: str, key: str, known: Sequence[str]) -> EtfarmError:
    """Return the error for an unknown field."""
    return bad_recipe_field(f"{table} {key}".strip(), None, ", ".join(known), did_you_mean(key, known))


def _name(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in RECIPES:
        raise bad_recipe_field("name", value, "up to 64 letters, digits, _, . and -, and not the name of another recipe")
    return value


def _flag(field: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise bad_recipe_field(field, value, "true, false")
    return value


def _stages(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(stage, str) for stage in value):
        raise bad_recipe_field("stages", value, f"a list of {', '.join(export_stages.STAGES)}")
    _require_few("stages", value, MAX_COMPONENTS)
    for stage in value:
        if stage not in export_stages.STAGES:
            raise bad_recipe_field("stages", stage, ", ".join(export_stages.STAGES), did_you_mean(stage, export_stages.STAGES))
    return tuple(value)


def _methods(value: object) -> dict[str, MethodOptions]:
    result = {}
    _require_few("[methods]", _table("methods", value), MAX_METHODS)
    for method, table in _table("methods", value).items():
        if not _METHOD.fullmatch(method):
            raise bad_recipe_field("[methods]", method, "methods' names, of letters, digits and _")
        where = f"methods.{method}"
        own = _table(where, table)
        for key in own:
            if key not in ("partitioners", "quantizers"):
                raise unknown(f"[{where}]", key, ("partitioners", "quantizers"))
        result[method] = MethodOptions(
            _components(f"{where}.partitioners", own.get("partitioners"), PARTITIONERS),
            _components(f"{where}.quantizers", own.get("quantizers"), QUANTIZERS),
        )
    return result


def _replace(value: object) -> dict[str, str]:
    result = {}
    for stage, plugin in _table("replace", value).items():
        if stage not in REPLACEABLE:
            allowed = f"{', '.join(REPLACEABLE)}, the stages that only the server runs"
            raise bad_recipe_field("[replace]", stage, allowed, did_you_mean(stage, REPLACEABLE))
        if not isinstance(plugin, str) or not _STAGE_PLUGIN.fullmatch(plugin):
            raise bad_recipe_field(
                f"[replace] {stage}", plugin, "the name of a plug-in's stage, which has a dot, like acme.stage"
            )
        result[stage] = plugin
    return result


def _components(where: str, value: object, known: Mapping[str, ComponentSpecification]) -> tuple[Component, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_recipe_field(where, value, f"a list of {', '.join(known)}, or [[{where}]] tables with a name")
    _require_few(where, value, MAX_COMPONENTS)
    return tuple(_component(where, entry, known) for entry in value)


def _component(where: str, entry: object, known: Mapping[str, ComponentSpecification]) -> Component:
    table = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise bad_recipe_field(where, entry, f"{', '.join(known)}, each a name or a [[{where}]] table with a name")
    name = table["name"]
    if name not in known:
        raise bad_recipe_field(f"{where} name", name, ", ".join(known), did_you_mean(name, list(known)))
    arguments = {argument.name: argument for argument in known[name].arguments}
    own = {key: value for key, value in table.items() if key != "name"}
    if set(own) == {"arguments"} and isinstance(own["arguments"], dict):
        own = own["arguments"]
    values = _values(f"[{where}]", own, arguments, what=f"[[{where}]] {name}:")
    return Component(name, values)


def _values(table: str, entries: object, known: Mapping[str, Argument], what: str = "") -> dict[str, Plain]:
    where = what or f"[{table}]"
    result: dict[str, Plain] = {}
    for key, value in _table(table, entries).items():
        if key not in known:
            raise unknown(where, key, list(known))
        converted = known[key].convert(value)
        if converted is None:
            near = did_you_mean(value, [shown(choice) for choice in known[key].choices]) if isinstance(value, str) else ""
            raise bad_recipe_field(f"{where} {key}", value, known[key].allowed, near)
        result[key] = converted
    for argument in known.values():
        if argument.default is not None:
            result.setdefault(argument.name, argument.default)
    return result


def _require_few(field: str, entries: Sized, most: int) -> None:
    if len(entries) > most:
        raise bad_recipe_field(field, f"{len(entries)} entries", f"at most {most} entries")


def _table(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise bad_recipe_field(f"[{name}]", value, "a table of key = value")
    return value
