"""Step 1, client: what torch and torchao print while they are at work is kept off the user's terminal."""

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
    "torch.utils._pytree",  # torchao registers an enum in a way that torch calls deprecated
    "torchao",  # says which of its CUDA libraries it did not load
)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps graph dumps, warnings and failed look-ups of optional libraries away; TORCH_LOGS brings them back."""
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
