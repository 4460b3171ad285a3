"""What the committed patterns of XNNPACK's passes are compared with; prints it as JSON.

Run as `python -m tests.support.patterns`: the passes of a process have one set of patterns.
"""

from __future__ import annotations

import hashlib
import json
import warnings

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

from etfarm.server.compile import prewarm
from etfarm.server.compile.lower import xnnpack_patterns


class Attention(torch.nn.Module):
    """Attention with a mask, and an image made larger: each has a pattern."""

    def forward(self, query: torch.Tensor, mask: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        return attended, torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)


def lower() -> str:
    """Return the digest of the lowered program."""
    inputs = (torch.rand(2, 4, 8, 16), torch.zeros(8, 8), torch.rand(1, 3, 4, 4))
    program = torch.export.export(Attention().eval(), inputs)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    return hashlib.sha256(lowered.to_executorch().buffer).hexdigest()


def composites() -> set[str]:
    """Return the composite operators that an export may keep."""
    from torch._export.utils import _collect_all_valid_cia_ops

    return {str(operator) for operator in _collect_all_valid_cia_ops()}


def main() -> None:
    warnings.simplefilter("ignore")
    exported = xnnpack_patterns.export()
    before, known = lower(), composites()
    prewarm.remember_composite_operators()
    installed = xnnpack_patterns.install()
    after, again = lower(), composites()
    with torch.library._scoped_library("etfarm_patterns", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        new = composites() - known
    print(
        json.dumps(
            {
                "exported": exported, "installed": installed, "programs": [before, after], "same_composites": known == again,
                "new_composites": sorted(new),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
