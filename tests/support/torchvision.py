"""torchvision's models on a torch without CUDA."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

FAILURES = (ImportError, RuntimeError, OSError, AttributeError)
"""What an import of a torchvision raises that was built for another torch, depending on where it notices."""


def torchvision_models() -> ModuleType:
    """torchvision.models, also where torchvision's library, built for CUDA, cannot be loaded beside torch's CPU build.

    No classifier uses the operators of that library; importing the package describes two of them to torch all the same.
    """
    if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
        try:
            return importlib.import_module("torchvision.models")
        except FAILURES:
            # Submodules that were imported before the failure would be incomplete.
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            if not hasattr(torch.ops.torchvision, "nms"):
                torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision.models")
