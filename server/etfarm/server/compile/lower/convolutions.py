"""Convolutions whose batch has a dynamic size.

For the layout of a convolution's output, torch 2.13 asks which of its own kernels would compute it. That depends on whether the
batch has 16 images or more, so the answer for the example inputs becomes a condition. Passes of ExecuTorch 1.5.1 come to that
question, and then the program takes batches of 15 at most, or, with a maximum of 16, of 16 alone.

Source: `conv` of torch/_subclasses/fake_impls.py 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def of_any_batch() -> Iterator[None]:
    """Let torch choose kernels of convolutions inside the context without conditions on sizes."""
    select = torch._C._select_conv_backend

    def select_freely(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = [size for size in image.shape if isinstance(size, torch.SymInt)]
        if not sizes:
            return select(image, *args, **kwargs)
        with sizes[0].node.shape_env.suppress_guards():
            return select(image, *args, **kwargs)

    torch._C._select_conv_backend = select_freely
    try:
        yield
    finally:
        torch._C._select_conv_backend = select
