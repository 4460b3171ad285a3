"""ExecuTorch's operators of language models, such as `llama::custom_sdpa`, for children that load or run graphs with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

_LIBRARY: Final = "extension/llm/custom_ops/libcustom_ops_aot_lib.so"
"""The library, below ExecuTorch's package."""


def register() -> None:
    """Register the operators with torch, and their kernels with ExecuTorch's runtime; imports torch.

    Takes milliseconds, unlike `executorch.extension.llm.custom_ops.custom_ops`, which only the export of such models needs.
    """
    import torch

    spec = importlib.util.find_spec("executorch")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (library := Path(folder) / _LIBRARY).is_file():
            torch.ops.load_library(library)
