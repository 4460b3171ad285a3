"""The reasons for which partitioners reject operators, in the partitioners' own words.

ExecuTorch keeps these reasons nowhere. XNNPACK's partitioner logs each one as a `WhyNoPartition` at level DEBUG; those of Arm and
Vulkan pass them to a method that writes the log. The others, such as Core ML's, only answer whether they support a node.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner, format_target_name
from executorch.exir.backend.utils import WhyNoPartition
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

_REPORTS: Final = (
    ("executorch.exir.backend.utils", "WhyNoPartitionReporter", "report_reject"),
    ("executorch.backends.vulkan.partitioner.vulkan_partitioner", "VulkanSupportedOperators", "log_skip"),
)
"""Methods that partitioners call with a rejected node and the reason: the module, which may not be imported, class and name."""

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
        self._unsupported: set[_Key] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of a record that has one."""
        why = record.msg
        if isinstance(why, WhyNoPartition):
            if why.node is not None:
                self.add(why.node, why.reason)
        elif record.levelno >= self._forward_from and (above := logging.getLogger(_LOGGERS).parent) is not None:
            above.handle(record)

    def add(self, node: Any, reason: object) -> None:
        """Keep the reason why a partitioner rejected a node; a node may have several."""
        reasons = self._reasons.setdefault(_key(node), [])
        text = " ".join(str(reason).split()).rstrip(".")[:_MAX_REASON]
        if text and text not in reasons:
            reasons.append(text)

    def add_unsupported(self, node: Any) -> None:
        """Note that a partitioner does not support a node."""
        self._unsupported.add(_key(node))

    def reason_of(self, method: str, node: Any) -> str:
        """Return why a node outside of delegates was rejected; empty if the method has no partitioners.

        A node that no partitioner gave a reason for has the sentence that says so.
        """
        if reasons := self._reasons.get(_key(node)):
            return "; ".join(reasons)
        partitioners = self._partitioners(method)
        if not partitioners:
            return ""
        names = " and ".join(dict.fromkeys(type(each).__name__ for each in partitioners))
        target = format_target_name(str(getattr(node.target, "__name__", node.target)))
        rules = [each.target_partitioner_configs for each in partitioners if isinstance(each, ConfigerationBasedPartitioner)]
        if len(rules) == len(partitioners):
            has_rule = any(target in known for known in rules)
            return f"{names} gave no reason" if has_rule else f"{names} has no rule for {target}"
        if _key(node) in self._unsupported:
            return f"not supported by {names}, which gave no reason"
        return f"{names} gave no reason"


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
        with _watched(rejections):
            yield rejections
    finally:
        logger.removeHandler(rejections)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def _watched(rejections: Rejections) -> Iterator[None]:
    """Pass on the reasons that partitioners report to a method instead of a logger, and the nodes that they do not support."""

    def reporting(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
        def report(reporter: Any, node: Any, reason: Any) -> None:
            rejections.add(node, reason)
            original(reporter, node, reason)

        return report

    def answering(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def is_supported(partitioner: Any, node: Any) -> bool:
            supported = original(partitioner, node)
            if not supported:
                rejections.add_unsupported(node)
            return supported

        return is_supported

    with ExitStack() as restored:
        for module, kind, name in _REPORTS:
            # A recipe's partitioners are imported when it is built, thus before.
            if owner := getattr(sys.modules.get(module), kind, None):
                restored.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, reporting(getattr(owner, name)))
        private = "_is_node_supported"
        restored.callback(setattr, CapabilityBasedPartitioner, private, getattr(CapabilityBasedPartitioner, private))
        setattr(CapabilityBasedPartitioner, private, answering(getattr(CapabilityBasedPartitioner, private)))
        yield


def _key(node: Any) -> _Key:
    """Return what identifies a node after its graph was copied: several methods may have a node of the same name."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, tuple | list) else [val]
    types = ", ".join(f"{getattr(each, 'dtype', '')}{tuple(getattr(each, 'shape', ()))}" for each in tensors)
    return node.name, str(node.target), str(node.meta.get("stack_trace")), types
