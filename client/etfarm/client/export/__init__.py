"""Resolution and export of a MODEL argument to a form that the server can compile.

`resolve` determines the kind of model of an argument, `load_source` creates a `ModelSource` of an eager model,
and `export_source` exports that to .pt2 archives. Importing this package does not import torch: a client with
.pt2 and .pte files only never needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etfarm.client.export.source import ModelSource
from etfarm.client.export.spec import (
    DEMOS,
    Demo,
    FileFactory,
    HuggingFaceFolder,
    ModelSpec,
    ModuleFactory,
    Pt2File,
    PteFile,
    resolve,
)

if TYPE_CHECKING:
    from etfarm.client.export.eager import ExportedMethod, ExportedModel, export_source
    from etfarm.client.export.factory import load_source

__all__ = [
    "DEMOS",
    "Demo",
    "ExportedMethod",
    "ExportedModel",
    "FileFactory",
    "HuggingFaceFolder",
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
    """Import a name that only eager models need on its first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
