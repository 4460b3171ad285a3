"""What a node must share with the server: the versions of everything that a child computes with.

`describe` runs on nodes whose Python may lack etfarm, so that Ray pickles this module by value: standard library only.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "executorch", "torchao", "etfarm")


def describe() -> str:
    """Return this Python's versions by name, as JSON; empty for packages that are not installed."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "architecture": platform.machine()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return json.dumps(versions)


def find_difference(node: Mapping[str, object], server: Mapping[str, str]) -> str:
    """Return a sentence that names what a node has and what the server has; empty if they are equal."""
    differences = [
        f"{name} {str(node.get(name) or '')[:50] or '(not installed)'}, and the server has {value or '(not installed)'}"
        for name, value in server.items()
        if str(node.get(name) or "") != value
    ]
    return f"It has {'; '.join(differences)}." if differences else ""
