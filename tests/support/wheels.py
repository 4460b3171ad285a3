"""Wheels of etfarm that are built from this tree with another version number, and environments that have one installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc

_ROOT: Final = Path(__file__).parents[2]
_FILES: Final = ("pyproject.toml", "README.md", "LICENSE")
_PACKAGES: Final = ("proto", "server", "client", "device_agents")


def build(folder: Path, version: str) -> Path:
    """Build a wheel of a version into a folder, without a network, and return it."""
    tree = folder / f"tree-{version}"
    tree.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(_ROOT / name, tree)
    for name in _PACKAGES:
        shutil.copytree(_ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    project = tree / "pyproject.toml"
    text, count = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', project.read_text(), count=1)
    assert count == 1
    project.write_text(text)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=tree, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    shutil.rmtree(tree)
    (wheel,) = folder.glob(f"etfarm-{version}-*.whl")
    return wheel


def changed(wheel: Path, version: str, changes: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Write a copy of a wheel with another version, and return it.

    Args:
        changes: texts of files that are replaced, by the files' paths in the wheel.
    """
    former = wheel.name.split("-")[1]
    path = wheel.with_name(wheel.name.replace(former, version))
    left = dict(changes or {})
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as copy:
        for entry in archive.infolist():
            data = archive.read(entry)
            if entry.filename.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {former}\n".encode(), f"\nVersion: {version}\n".encode())
            if entry.filename in left:
                before, after = left.pop(entry.filename)
                assert data.count(before.encode()) == 1, (entry.filename, before)
                data = data.replace(before.encode(), after.encode())
            copy.writestr(entry.filename.replace(f"etfarm-{former}.dist-info", f"etfarm-{version}.dist-info"), data)
    assert not left, left
    return path


def install(folder: Path, wheel: Path) -> Path:
    """Create an environment with a wheel, whose requirements are those of this one; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A path of a .pth file does not process the .pth files there, such as this tree's own.
    (Path(purelib) / "requirements.pth").write_text(f"{Path(grpc.__file__).parents[1]}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return python
