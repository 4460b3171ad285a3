"""Source trees of other versions of etfarm, which run with the installed packages of this environment.

PYTHONPATH puts a tree's code before the current one.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final

PACKAGES: Final = ("proto", "server", "client", "device_agents")


def make_runnable(folder: Path, version: str) -> None:
    """Complete a tree of the packages and pyproject.toml with a version."""
    _describe(folder, version)
    for package in PACKAGES:
        _close(folder / package / "etfarm")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which this Python runs a tree."""
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES)}


def _close(folder: Path) -> None:
    """Make every folder a package of its own, which the current one of the same name cannot extend or replace."""
    for path in folder.rglob("*.py"):
        for inner in path.relative_to(folder).parents[:-1]:
            (folder / inner / "__init__.py").touch()


def _describe(folder: Path, version: str) -> None:
    """Write the package's metadata, which name its version and its commands as an installation would."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / "proto" / f"etfarm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: etfarm\nVersion: {version}\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["etfarm.commands"].items()]
    (about / "entry_points.txt").write_text("\n".join(["[etfarm.commands]", *lines, ""]))
