"""Recipes: their specifications, and the parsing of a user's text or file into a canonical Recipe.

Client and server share this package: the client rejects errors before anything is sent, and the server resolves the same text
to the same digest. Stdlib only. Each server reports whether a recipe's tools are installed (`etfarm recipes list`).
"""

from etfarm.wire.recipes.components import EDGE, EXECUTORCH, PARTITIONERS, QUANTIZERS, ComponentSpecification
from etfarm.wire.recipes.errors import (
    BadRecipeArgument,
    bad_recipe_field,
    literal,
    unknown_recipe,
    unknown_recipe_argument,
)
from etfarm.wire.recipes.pipeline import check_combination, check_methods, check_pipeline
from etfarm.wire.recipes.reading import from_json, from_toml, parse, resolve, with_plugins
from etfarm.wire.recipes.recipe import Component, MethodOptions, Options, Part, Recipe
from etfarm.wire.recipes.table import DEFAULT, RECIPES, Quantization, Specification, runtime_backend
from etfarm.wire.recipes.values import Argument, Plain

__all__ = [
    "DEFAULT",
    "EDGE",
    "EXECUTORCH",
    "PARTITIONERS",
    "QUANTIZERS",
    "RECIPES",
    "Argument",
    "BadRecipeArgument",
    "Component",
    "ComponentSpecification",
    "MethodOptions",
    "Options",
    "Part",
    "Plain",
    "Quantization",
    "Recipe",
    "Specification",
    "bad_recipe_field",
    "check_combination",
    "check_methods",
    "check_pipeline",
    "from_json",
    "from_toml",
    "literal",
    "parse",
    "resolve",
    "runtime_backend",
    "unknown_recipe",
    "unknown_recipe_argument",
    "with_plugins",
]
