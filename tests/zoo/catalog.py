"""All networks by name: `LIBRARY/NETWORK`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from typing import Final

import torch

from tests.zoo.network import Network

LIBRARIES: Final = {
    "executorch": "examples", "text": "language", "perception": "perception", "timm": "timm_images", "torchvision": "vision",
}  # fmt: skip
"""The module of each part of the zoo; `text` and `perception` are of transformers."""


def networks(only: str = "*") -> dict[str, Callable[[], Network]]:
    """Return the factories whose names match a pattern like `torchvision/*`, in the order of their modules."""
    known = {}
    for library, name in LIBRARIES.items():
        module = importlib.import_module(f"tests.zoo.{name}")
        for function, factory in vars(module).items():
            is_own = isinstance(factory, partial) or getattr(factory, "__module__", "") == module.__name__
            if is_own and not function.startswith("_") and fnmatch(f"{library}/{function}", only):
                known[f"{library}/{function}"] = factory
    return known


def factory(name: str) -> str:
    """Return a network's factory as the command line takes it, `package.module:function`."""
    library, _, function = name.partition("/")
    return f"tests.zoo.{LIBRARIES[library]}:{function}"


def create(name: str) -> Network:
    """Return the network with the same random weights and inputs each time."""
    torch.manual_seed(0)
    return networks(name)[name]()
