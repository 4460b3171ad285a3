"""torchvision's models on a torch without CUDA."""

from __future__ import annotations

from types import ModuleType

import torch


def torchvision_models() -> ModuleType:
    """torchvision.models, also where torchvision's library, built for CUDA, cannot be loaded beside torch's CPU build.

    No classifier uses the operators of that library; importing the package describes two of them to torch all the same.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        try:
            import torchvision.models
        except RuntimeError:
            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.models

    return torchvision.models
