"""Recipes: what each does, takes and needs, and how a user's text or file becomes one canonical Recipe.

Both ends speak it: the client refuses a typing error before anything is sent, the server resolves the same text to the
same digest. Stdlib only; whether a recipe's tools are installed on a server, that server says (`etfarm recipes list`).
"""

from etfarm.wire.recipes.components import EDGE, EXECUTORCH, PARTITIONERS, QUANTIZERS, ComponentSpecification
from etfarm.wire.recipes.errors import (
    BadCombination,
    BadRecipeArgument,
    BadRecipeField,
    BadRecipeText,
    UnknownRecipe,
    UnknownRecipeArgument,
    literal,
)
from etfarm.wire.recipes.pipeline import check_combination, check_methods, check_pipeline
from etfarm.wire.recipes.reading import from_json, from_toml, parse, resolve, with_plugins
from etfarm.wire.recipes.recipe import Component, MethodOptions, Options, Part, Recipe
from etfarm.wire.recipes.table import DEFAULT, RECIPES, Quantization, Specification
from etfarm.wire.recipes.values import Argument, Plain

__all__ = [
    "DEFAULT",
    "EDGE",
    "EXECUTORCH",
    "PARTITIONERS",
    "QUANTIZERS",
    "RECIPES",
    "Argument",
    "BadCombination",
    "BadRecipeArgument",
    "BadRecipeField",
    "BadRecipeText",
    "Component",
    "ComponentSpecification",
    "MethodOptions",
    "Options",
    "Part",
    "Plain",
    "Quantization",
    "Recipe",
    "Specification",
    "UnknownRecipe",
    "UnknownRecipeArgument",
    "check_combination",
    "check_methods",
    "check_pipeline",
    "from_json",
    "from_toml",
    "literal",
    "parse",
    "resolve",
    "with_plugins",
]
