"""`etfarm recipes`: the recipes for compiling a model, and what the server lacks for some of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import Outcome
from etfarm.client.fleet.recipe_devices import FarmRecipe, describe_missing_device, locate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import Device, RecipeInfo
    from etfarm.wire.recipes import Component, Recipe


SHOWN_RECIPES: Final = 15
"""Number of recipes that a terminal shows without `--all`."""

SHOWN_DEVICES: Final = 3
"""Number of devices that a terminal shows of a recipe without `--all`."""


def main(argv: list[str]) -> int:
    """Run `etfarm recipes`."""
    about = "List and show recipes, and what is missing for those that cannot run here."
    return execute({"list": list_, "show": show}, argv, "recipes", about)


def list_(
    listing: Annotated[JsonListing, Key("recipes")],
    connection: Connection,
    available: Annotated[bool, typer.Option("--available", help="Only those that compile here.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Show all recipes and devices on a terminal too.")] = False,
) -> None:
    """List the recipes, those of plug-ins too: which compile here, and which devices of this farm run them.

    A terminal shows the first 15, beginning with those that compile here; a pipe gets all.
    """
    from rich.text import Text

    from etfarm.client.cli.terminal import output

    recipes, devices = connection.call(_fetch)
    rows = [
        locate(recipe, devices)
        for recipe in sorted(recipes, key=lambda recipe: not recipe.available)
        if recipe.available or not available
    ]
    listing.record(rows)
    if listing.is_on_stdout:
        return
    is_cut = sys.stdout.isatty() and not all_
    # A single further row takes as much room as the sentence about it.
    shown = rows[:SHOWN_RECIPES] if is_cut and len(rows) > SHOWN_RECIPES + 1 else rows
    cells = [
        (
            Text(row.name, style="bold" if row.available and row.devices != () else "dim"),
            row.quantization if row.quantization not in ("", "none") else "-",
            Text("yes", style="green") if row.available else Text("no", style="yellow"),
            Text(_places(row, SHOWN_DEVICES if is_cut else None), style="" if row.devices else "yellow"),
            Text("; ".join(filter(None, (row.summary, row.missing, "" if row.undecided else describe_missing_device(row))))),
        )
        for row in shown
    ]
    heads = ("RECIPE", "QUANTIZATION", "COMPILES", "RUNS ON", "WHAT")
    output.show_table(heads, cells, shrink=("WHAT", "RUNS ON"), wrap=("WHAT",), spare=("QUANTIZATION",))
    if undecided := next((row for row in shown if row.undecided and row.devices == ()), None):
        output.show(output.line(f"not known yet: {describe_missing_device(undecided)}", style="yellow"))
    if len(shown) < len(rows):
        output.show(output.line(f"and {len(rows) - len(shown)} more: etfarm recipes list --all", style="dim"))


def _places(row: FarmRecipe, most: int | None = None) -> str:
    """Return the names of a recipe's devices, `most` of them and the number of the others."""
    if row.devices is None:
        return "unknown"
    if most is not None and len(row.devices) > most + 1:
        return f"{', '.join(row.devices[:most])} and {len(row.devices) - most} more"
    return ", ".join(row.devices) or ("not known yet" if row.undecided else "no device")


def show(
    outcome: Outcome,
    connection: Connection,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A name, name:key=value, several joined by +, a plug-in's dotted name, or a TOML file."
        ),
    ],
    json: options.ListJson = None,
) -> None:
    """Show a recipe: what it does, its arguments, stages and digest, whether it compiles here, and which devices run it."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.submit.recipes import read_recipe

    # `recipes show` also explains recipes with required arguments, whose names alone cannot be parsed.
    from etfarm.wire.recipes import RECIPES

    known = RECIPES.get(recipe)
    needs_arguments = known is not None and any(argument.required for argument in known.arguments)
    parsed = None if needs_arguments else read_recipe(recipe)
    listing = JsonListing(outcome, json, "recipe", is_list=False)
    recipes, devices = connection.call(_fetch)
    here = {info.name: locate(info, devices) for info in recipes}
    names = [recipe] if parsed is None else [part.name for part in parsed.parts]
    listing.record(
        {
            "parts": [here[name] for name in names if name in here],
            "stages": None if parsed is None else parsed.stages,
            "canonical": None if parsed is None else parsed.json,
            "digest": None if parsed is None else parsed.digest,
        }
    )
    if listing.is_on_stdout:
        return
    pairs = [pair for name in names for pair in _part(name, here.get(name))]
    pairs += [] if parsed is None else _whole(parsed)
    output.show(output.facts((key, value) for key, value in pairs if value))


def _part(name: str, here: FarmRecipe | None) -> list[tuple[str, str]]:
    """Return the facts of a named recipe; those of a plug-in come from the server."""
    from etfarm.wire.recipes import RECIPES

    known = RECIPES.get(name)
    if known is not None:
        facts = [("what", known.summary), ("backend", known.backend), ("quantization", known.quantization.value)]
    elif here is not None:
        facts = [("what", here.summary), ("backend", here.backend), ("quantization", here.quantization)]
    else:
        return [("recipe", name), ("here", "not available: this farm has no plug-in with that name")]
    pairs = [("recipe", name), *facts]
    if here is not None:
        pairs.append(("here", "available" if here.available else f"not available: {here.missing}"))
        pairs.append(("devices", "; ".join(filter(None, (_places(here), describe_missing_device(here))))))
    if known is not None:
        pairs += [("runs on", known.runs_on), ("keeps fp32", known.keeps_fp32)]
    return pairs + [("argument", text) for text in (here.arguments if here is not None else ())]


def _whole(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the facts of a recipe, including everything that its file contains."""
    options = recipe.options
    pairs = [("name", options.name or recipe.label), ("per_op", "true" if options.per_op else "")]
    pairs += [(name, "true") for name in options.before_quantization()]
    pairs += [("partitioners", _components(options.partitioners)), ("quantizers", _components(options.quantizers))]
    for method, own in sorted(options.methods.items()):
        parts = (("partitioners", own.partitioners), ("quantizers", own.quantizers))
        text = "; ".join(f"{key} {_components(ones)}" for key, ones in parts if ones is not None)
        pairs.append((f"method {method}", text))
    for table, values in (("edge", options.edge), ("executorch", options.executorch), ("replace", options.replace)):
        pairs.append((table, _values(values)))
    if options != type(options)():
        pairs += [("quantizes", recipe.quantization.value), ("strict", str(recipe.strict).lower())]
    stages = " ".join(recipe.stages)
    pairs.append(("stages", stages if recipe.resolved else f"{stages}, unless its plug-in quantizes"))
    return [*pairs, ("canonical", recipe.json), ("digest", recipe.digest)]


def _components(components: Sequence[Component] | None) -> str:
    """Return `xnnpack (per_op=false), coreml`; empty without components."""
    if components is None:
        return ""
    texts = [
        f"{component.name} ({_values(component.arguments)})" if component.arguments else component.name
        for component in components
    ]
    return ", ".join(texts) or "none"


def _values(values: Mapping[str, object]) -> str:
    from etfarm.wire.recipes import literal

    return ", ".join(f"{key}={literal(value)}" for key, value in sorted(values.items()))


async def _fetch(farm: AsyncFarm) -> tuple[list[RecipeInfo], list[Device]]:
    return await farm.recipes(), await farm.devices()
