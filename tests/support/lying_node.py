"""Turns the service of a compile node into one that changes children's files, in the Python process that calls `install`."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_MODULE: Final = "etfarm.server.workers.cluster.node"


class _Lie(MetaPathFinder, Loader):
    """Finds the node's module, and changes it once it is loaded; every process of Ray installs it, and few load the module."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE or self._loader is not None:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        honest = module.NodeService.call

        async def call(service: Any, method: str, arguments: bytes, data: bytes) -> bytes:
            answer: bytes = await honest(service, method, arguments, data)
            return answer[:1] + answer[:0:-1] if method == "read" else answer

        module.NodeService.call = call


def install() -> None:
    """Change the module once it is imported."""
    assert PathFinder in sys.meta_path
    sys.meta_path.insert(0, _Lie())
