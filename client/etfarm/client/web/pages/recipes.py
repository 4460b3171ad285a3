"""The recipes: what each does, whether the server can compile it, and which devices run its programs."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.fleet.recipe_devices import describe_missing_device, locate
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm


async def recipes(request: Request) -> Response:
    """Show all recipes, those that compile on this server first."""
    client = await farm(request)
    known, devices = await asyncio.gather(client.recipes(), client.devices())
    rows = [locate(recipe, devices) for recipe in known]
    rows.sort(key=lambda row: (not row.available, row.devices == ()))
    return render(
        request, "recipes.html", title="Recipes", command="etfarm recipes list", recipes=rows,
        describe_missing_device=describe_missing_device,
    )  # fmt: skip


ROUTES = (Route("/recipes", recipes, name="recipes", methods=["GET"]),)
