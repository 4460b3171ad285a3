"""Step 1, client: from a MODEL argument to what the server can compile.

`resolve` says what kind of model an argument names, `load_source` makes a `ModelSource` of an eager one, and
`export_source` exports that to .pt2 archives. Importing this package imports no torch: with .pt2 and .pte files alone
a client never needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etfarm.client.export.source import ModelSource
from etfarm.client.export.spec import DEMOS, Demo, FileFactory, ModelSpec, ModuleFactory, Pt2File, PteFile, resolve

if TYPE_CHECKING:
    from etfarm.client.export.eager import ExportedMethod, ExportedModel, export_source
    from etfarm.client.export.factory import load_source

__all__ = [
    "DEMOS",
    "Demo",
    "ExportedMethod",
    "ExportedModel",
    "FileFactory",
    "ModelSource",
    "ModelSpec",
    "ModuleFactory",
    "Pt2File",
    "PteFile",
    "export_source",
    "load_source",
    "resolve",
]

_LATER = {
    "ExportedMethod": "eager",
    "ExportedModel": "eager",
    "export_source": "eager",
    "load_source": "factory",
}


def __getattr__(name: str) -> object:
    """The names that are needed for eager models only, imported when they are first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
