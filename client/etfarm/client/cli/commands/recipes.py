"""`etfarm recipes`: the recipes for compiling a model, and what the server lacks for some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.event_loop import run_async

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etfarm.client.models import RecipeInfo
    from etfarm.wire.recipes import Component, Recipe


def main(argv: list[str]) -> int:
    """Run `etfarm recipes`."""
    return execute({"list": list_, "show": show}, argv, "recipes", "Lists and shows recipes, and what is missing for some.")


def list_(
    available: Annotated[bool, typer.Option("--available", help="Only those that this farm can run.")] = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """All recipes, plug-ins' too, those that this farm can run first."""
    from rich.text import Text

    from etfarm.client.cli.terminal import output

    recipes = _fetch(server, tls_ca)
    rows = [
        (
            Text(recipe.name, style="bold" if recipe.available else "dim"),
            recipe.quantization if recipe.quantization not in ("", "none") else "-",
            Text("yes", style="green") if recipe.available else Text("no", style="yellow"),
            Text(recipe.summary) if recipe.available else Text(f"{recipe.summary}; {recipe.missing}", style="dim"),
        )
        for recipe in sorted(recipes, key=lambda recipe: not recipe.available)
        if recipe.available or not available
    ]
    output.show_table(("RECIPE", "QUANTIZATION", "HERE", "WHAT"), rows, shrink=("WHAT",))


def show(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A name, name:key=value, several joined by +, a plug-in's dotted name, or a TOML file."
        ),
    ],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """One recipe: what it does, its arguments, stages and digest, and whether this farm can run it."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.submit.recipes import read_recipe

    # `recipes show` also explains recipes with required arguments, whose names alone cannot be parsed.
    from etfarm.wire.recipes import RECIPES

    known = RECIPES.get(recipe)
    needs_arguments = known is not None and any(argument.required for argument in known.arguments)
    parsed = None if needs_arguments else read_recipe(recipe)
    here = {info.name: info for info in _fetch(server, tls_ca)}
    names = [recipe] if parsed is None else [part.name for part in parsed.parts]
    pairs = [pair for name in names for pair in _part(name, here.get(name))]
    pairs += [] if parsed is None else _whole(parsed)
    output.show(output.facts((key, value) for key, value in pairs if value))


def _part(name: str, here: RecipeInfo | None) -> list[tuple[str, str]]:
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
    if known is not None:
        pairs += [("runs on", known.runs_on), ("keeps fp32", known.keeps_fp32)]
    return pairs + [("argument", text) for text in (here.arguments if here is not None else ())]


def _whole(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the facts of a recipe, including everything that its file contains."""
    options = recipe.options
    pairs = [("name", options.name or recipe.label), ("per_op", "true" if options.per_op else "")]
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


def _fetch(server: str | None, tls_ca: str | None) -> list[RecipeInfo]:
    from etfarm.client.aio import AsyncFarm

    async def fetch() -> list[RecipeInfo]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.recipes()

    return run_async(fetch)
