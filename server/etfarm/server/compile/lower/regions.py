"""Source lines of operators within `torch.autocast` and `torch.no_grad`, which torch.export keeps as subgraphs.

When ExecuTorch decomposes a program, torch interprets its graph node by node, and each new node inherits the metadata of the node
that it comes from. A region is one node of that graph, whose subgraph runs as compiled Python: all operators of a region would
inherit the metadata of the region's node, which has no stack trace. Here, regions are interpreted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._higher_order_ops.wrap import WrapWithAutocast, WrapWithSetGradEnabled

_REGIONS: Final = (WrapWithAutocast, WrapWithSetGradEnabled)


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret the subgraphs of regions node by node inside the context."""
    calls = {region: region.__call__ for region in _REGIONS}
    for region, call in calls.items():
        region.__call__ = _interpreting(call)
    try:
        yield
    finally:
        for region, call in calls.items():
            region.__call__ = call


def _interpreting(call: Callable[..., Any]) -> Callable[..., Any]:
    def interpret(region: Any, *args: Any, **kwargs: Any) -> Any:
        return call(region, *(torch.fx.Interpreter(a).run if isinstance(a, torch.fx.GraphModule) else a for a in args), **kwargs)

    return interpret
