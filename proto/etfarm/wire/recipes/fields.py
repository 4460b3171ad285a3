"""The options of a recipe, parsed field by field from TOML or JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Final

from etfarm.wire import stages as export_stages
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes.components import EDGE, EXECUTORCH, PARTITIONERS, QUANTIZERS, ComponentSpecification
from etfarm.wire.recipes.errors import bad_recipe_field, did_you_mean
from etfarm.wire.recipes.recipe import Component, MethodOptions, Options
from etfarm.wire.recipes.table import RECIPES
from etfarm.wire.recipes.values import Argument, Plain, shown
from etfarm.wire.stages import REPLACEABLE

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
