"""Generates the health programs, `etfarm/server/jobs/health/programs/*.pte`. With `--check`, only compares them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from etfarm.server.jobs.health import program


def lower(name: str) -> bytes:
    """Return the bytes of the .pte of a health program. Equal toolchains return equal bytes."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    class Layers(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(program.FEATURES, program.FEATURES, bias=False)
            self.second = torch.nn.Linear(program.FEATURES, program.FEATURES, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    module = Layers().eval()
    with torch.no_grad():
        module.first.weight.copy_(torch.from_numpy(program.weights(0)))
        module.second.weight.copy_(torch.from_numpy(program.weights(1)))
    exported = torch.export.export(module, (torch.from_numpy(program.inputs()),), strict=False)
    partitioners = [XnnpackPartitioner()] if name == "xnnpack" else []
    return bytes(to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch().buffer)


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    differing: list[Path] = []
    for each in program.PROGRAMS:
        data = lower(each.name)
        if each.path.exists() and each.path.read_bytes() == data:
            continue
        differing.append(each.path)
        if "--check" not in arguments:
            each.path.parent.mkdir(exist_ok=True)
            each.path.write_bytes(data)
    for path in differing:
        print(path)
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
