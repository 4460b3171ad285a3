"""Delegates of uploaded programs that write no output. Loads neither torch nor ExecuTorch.

ExecuTorch 1.5 marks what quantizes the input of a layer as a part of it. Where XNNPACK then refuses the layer, the mark stays,
and ExecuTorch delegates the quantization alone: the delegate skips it, and writes nothing. Recipes of etfarm remove such marks.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from etfarm.wire.flatbuffer import BadBuffer
from etfarm.wire.program_tables import ProgramTables, xnnpack_graph

DELEGATE_WITHOUT_OUTPUTS: Final = "DELEGATE_WITHOUT_OUTPUTS"
"""Code of the warning about a program that has one."""
_XNNPACK: Final = "XnnpackBackend"
_OUTPUT_IDS: Final = 5
"""Field of XNNGraph. Source: executorch/backends/xnnpack/serialization/schema.fbs."""


def describe(path: Path) -> str:
    """Return which delegates of a .pte write no output, and what to do about it; empty without any."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        silent = list(_find(view))
    if not silent:
        return ""
    return (
        f"Delegates write no output, so that what reads it gets what earlier executions left in memory: {', '.join(silent)}. "
        "ExecuTorch makes such a delegate of the quantization before a layer that XNNPACK refuses, as one whose size is read. "
        "Submit the quantized program (.pt2) or the model, with a recipe: etfarm keeps that quantization outside of delegates."
    )


def _find(view: memoryview) -> Iterator[str]:
    program = ProgramTables(view)
    for plan in program.plans():
        for index, delegate in enumerate(plan.delegates()):
            try:
                graph = xnnpack_graph(program.data_of(delegate)) if delegate.backend == _XNNPACK else None
                if graph is not None and not graph.numbers(_OUTPUT_IDS, "<I"):
                    yield f"number {index} of {plan.name}"
            except BadBuffer:
                continue  # the runtime refuses what is no graph
