"""The versions of the packages that compile programs, from package metadata; imports none of the packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from etfarm.v1.compile_pb2 import Toolchain


def toolchain() -> Toolchain:
    """Return the installed versions; empty for packages that are not installed."""
    return Toolchain(torch=_version("torch"), executorch=_version("executorch"), torchao=_version("torchao"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
