"""The versions that a program was made with. Reads package metadata; imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from etfarm.server.compile.result import Toolchain


def toolchain() -> Toolchain:
    """Installed versions; an absent package's is empty."""
    return {"torch": _version("torch"), "executorch": _version("executorch"), "torchao": _version("torchao")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
