"""Recipes parsed from their canonical JSON, once for a submission and all cells of its job."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from etfarm.wire import recipes
from etfarm.wire.recipes import Recipe

MAX_KEPT: Final = 32
"""Maximum number of recipes that are kept; each has at most 256 Ki characters. Recipes are immutable."""


@lru_cache(maxsize=MAX_KEPT)
def parse_recipe(text: str) -> Recipe:
    """Return the recipe whose `json` is `text`, without the specifications of its plug-ins.

    Raises:
        UserError: as `recipes.from_json`; errors are not kept.
    """
    return recipes.from_json(text)
