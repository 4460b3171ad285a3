"""The reasons for which partitioners reject operators, in the partitioners' own words.

ExecuTorch keeps these reasons nowhere: XNNPACK's partitioner logs each one as a `WhyNoPartition` at level DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner, format_target_name
from executorch.exir.backend.utils import WhyNoPartition

_LOGGERS: Final = "executorch.backends.xnnpack"
"""The loggers of the partitioners that log their reasons."""

_MAX_REASON: Final = 200
"""Maximum number of characters of a reason; the reasons of ExecuTorch 1.5 have about 80."""

Partitioners = Callable[[str], Sequence[Any]]
"""Function that returns the partitioners of a method."""

_Key = tuple[str, str, str, str]


class Rejections(logging.Handler):
    """The rejected nodes, with their reasons.

    Args:
        partitioners: returns the partitioners of a method.
        level: minimum level of other records, which go on to the next logger.
    """

    def __init__(self, partitioners: Partitioners, level: int = logging.WARNING) -> None:
        super().__init__()
        self._partitioners = partitioners
        self._forward_from = level
        self._reasons: dict[_Key, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of a record that has one."""
        why = record.msg
        if isinstance(why, WhyNoPartition):
            if why.node is not None:
                reasons = self._reasons.setdefault(_key(why.node), [])
                reason = " ".join(str(why.reason).split()).rstrip(".")[:_MAX_REASON]
                if reason not in reasons:
                    reasons.append(reason)
        elif record.levelno >= self._forward_from and (above := logging.getLogger(_LOGGERS).parent) is not None:
            above.handle(record)

    def reason_of(self, method: str, node: Any) -> str:
        """Return why a node outside of delegates was rejected; empty if no partitioner has a reason."""
        if (reasons := self._reasons.get(_key(node))) is not None:
            return "; ".join(reasons)
        partitioners = self._partitioners(method)
        configured = [each for each in partitioners if isinstance(each, ConfigerationBasedPartitioner)]
        target = format_target_name(str(getattr(node.target, "__name__", node.target)))
        if not configured or len(configured) < len(partitioners):
            return ""
        if any(target in partitioner.target_partitioner_configs for partitioner in configured):
            return ""
        return f"{type(configured[0]).__name__} has no rule for {target}"


@contextmanager
def collected(partitioners: Partitioners) -> Iterator[Rejections]:
    """Collect the reasons of all partitioners that run inside."""
    logger = logging.getLogger(_LOGGERS)
    level, propagate = logger.level, logger.propagate
    rejections = Rejections(partitioners, logger.getEffectiveLevel())
    logger.addHandler(rejections)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield rejections
    finally:
        logger.removeHandler(rejections)
        logger.setLevel(level)
        logger.propagate = propagate


def _key(node: Any) -> _Key:
    """Return what identifies a node after its graph was copied: several methods may have a node of the same name."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, tuple | list) else [val]
    types = ", ".join(f"{getattr(each, 'dtype', '')}{tuple(getattr(each, 'shape', ()))}" for each in tensors)
    return node.name, str(node.target), str(node.meta.get("stack_trace")), types
