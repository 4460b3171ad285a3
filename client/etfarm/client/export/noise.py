"""Suppression of what torch, torchao and ExecuTorch's operators print while they work."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

_NOISY = (
    "torch.export",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.utils._pytree",  # torchao registers an enum in a way that torch reports as deprecated
    "torchao",  # reports which of its CUDA libraries it did not load
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress graph dumps, warnings and failed look-ups of optional libraries; TORCH_LOGS enables them again."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def quiet_natively() -> Iterator[None]:
    """Suppress what C++ code writes to this process's stderr, too, such as the log of ExecuTorch's operators."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with quiet():
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
