"""Step 4, command line: `etfarm recipes`, what a model can be compiled with and what is missing for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute, run_async

if TYPE_CHECKING:
    from etfarm.client.models import RecipeInfo


def main(argv: list[str]) -> int:
    """Runs `etfarm recipes`."""
    return execute({"list": list_, "show": show}, argv, "recipes", "Lists and shows recipes, and what is missing for some.")


def list_(
    available: Annotated[bool, typer.Option("--available", help="Only those that this farm can run.")] = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """All recipes, those that this farm can run first."""
    from rich.text import Text

    from etfarm.client.cli import output

    found = _fetch(server, tls_ca)
    rows = [
        (
            Text(recipe.name, style="bold" if recipe.available else "dim"),
            recipe.quantization if recipe.quantization not in ("", "none") else "-",
            Text("yes", style="green") if recipe.available else Text("no", style="yellow"),
            Text(recipe.summary) if recipe.available else Text(f"{recipe.summary}; {recipe.missing}", style="dim"),
        )
        for recipe in sorted(found, key=lambda recipe: not recipe.available)
        if recipe.available or not available
    ]
    output.show_table(("RECIPE", "QUANTIZATION", "HERE", "WHAT"), rows, shrink=("WHAT",))


def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, name:key=value, or a TOML file.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """One recipe: what it does, its arguments, its digest, and whether this farm can run it."""
    from etfarm.client.cli import output
    from etfarm.client.submission import read_recipe

    # `recipes show` explains recipes with required arguments too, which do not parse by their name alone.
    from etfarm.wire.recipes import RECIPES

    parsed = None if recipe in RECIPES else read_recipe(recipe)
    name = parsed.name if parsed is not None else recipe
    known = RECIPES[name]
    here = {one.name: one for one in _fetch(server, tls_ca)}.get(name)
    pairs = [("recipe", name), ("what", known.summary), ("backend", known.backend), ("quantization", known.quantization.value)]
    if here is not None:
        pairs.append(("here", "available" if here.available else f"not available: {here.missing}"))
    pairs += [("runs on", known.runs_on), ("keeps fp32", known.keeps_fp32)]
    pairs += [("argument", text) for text in (here.arguments if here is not None else ())]
    if parsed is None and not any(argument.required for argument in known.arguments):
        parsed = read_recipe(recipe)
    if parsed is not None:
        pairs += [("canonical", parsed.json), ("digest", parsed.digest)]
    output.show(output.facts((key, value) for key, value in pairs if value))


def _fetch(server: str | None, tls_ca: str | None) -> list[RecipeInfo]:
    from etfarm.client.aio import AsyncFarm

    async def fetch() -> list[RecipeInfo]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.recipes()

    return run_async(fetch)
