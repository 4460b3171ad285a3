"""Programs that are far from their own quantized graph, although each operator alone is not.

XNNPACK computes operators of a delegate together. With static quantization this may change results: a layer that is used twice
gets the scales of its first use, and an activation that is fused with the layer before it skips the quantization between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.server.graphs.sources import source_of
from etfarm.server.reports.numerics import accuracy, reference
from etfarm.v1 import report_pb2
from etfarm.wire import rounding, tensors
from etfarm.wire.sqnr import decibels
from etfarm.wire.tensors import Value

if TYPE_CHECKING:
    from torch.export import ExportedProgram

LEAST_DB: Final = 25.0
"""Minimum SQNR in dB of a statically quantized program against its own quantized graph."""

BEYOND_ROUNDING_DB: Final = 3.0
"""How much lower it must be than that of the graph itself with values that are rounded to neighbours."""

_OTHERWISE: Final = "Keep layers in fp32 with skip_modules in a recipe file, or use an int8 recipe with dynamic scales."

_NAMED: Final = 3
"""Maximum number of layers in a message."""


def is_static(program: ExportedProgram) -> bool:
    """Return whether activations are quantized with scales from calibration."""
    return any(str(node.target).startswith("quantized_decomposed.quantize_per_tensor.default") for node in program.graph.nodes)


def describe(
    program: ExportedProgram,
    rows: Sequence[report_pb2.OutputAccuracy],
    samples: Sequence[Sequence[tuple[Value, Value]]],
    inputs: Sequence[Path],
) -> str:
    """Return the warning of outputs that are far from a quantized program; empty without such outputs.

    Deep transformers amplify rounding, so that correct kernels may lead far from the graph. Where the graph shows no other cause,
    what rounding explains is no reason to warn.

    Args:
        program: the quantized program that the rows compare with.
        rows: one for each output.
        samples: for each sample, the program's outputs with those of the device.
        inputs: the tensor file of each sample's inputs.
    """
    far = [at for at, row in enumerate(rows) if row.HasField("sqnr_db") and row.sqnr_db < LEAST_DB]
    if not far or not is_static(program):
        return ""
    advice = _advise(program.graph)
    if not advice:
        far = _beyond_rounding(program, far, rows, samples, inputs)
    if not far:
        return ""
    listed = ", ".join(f"{rows[at].output} ({decibels(rows[at].sqnr_db)})" for at in far[:_NAMED])
    more = f" and {len(far) - _NAMED} more" if len(far) > _NAMED else ""
    return (
        f"Outputs are far from the program's own quantized graph, run by PyTorch: {listed}{more}, where {LEAST_DB:g} dB or more "
        f"are usual. The backend computes something else than the graph says. {advice or _OTHERWISE}"
    )


def _beyond_rounding(
    program: ExportedProgram,
    far: Sequence[int],
    rows: Sequence[report_pb2.OutputAccuracy],
    samples: Sequence[Sequence[tuple[Value, Value]]],
    inputs: Sequence[Path],
) -> list[int]:
    """Return those of the outputs that are farther from the program than rounding explains.

    Samples differ by several dB, so both are compared on one sample: the one that is most like all of them together.
    """
    levels = [{at: _sqnr_db(*sample[at]) for at in far} for sample in samples]
    lowest = min(far, key=lambda at: rows[at].sqnr_db)

    def distance(place: int) -> float:
        level = levels[place][lowest]
        return math.inf if level is None else abs(level - rows[lowest].sqnr_db)

    typical = min(range(len(samples)), key=distance)
    rounded = reference.run_rounded(program, tensors.decode(inputs[typical].read_bytes()))
    beyond = []
    for at in far:
        level, of_rounded = levels[typical][at], _sqnr_db(samples[typical][at][0], rounded[at])
        if level is None or of_rounded is None or level < of_rounded - BEYOND_ROUNDING_DB:
            beyond.append(at)
    return beyond


def _advise(graph: Any) -> str:
    """Return what in the graph explains a difference, and what to do about it; empty if nothing does."""
    from etfarm.server.graphs import fusion

    advice = []
    shared = [layers[0] for _, layers in fusion.shared_layers(graph) if any(map(fusion.takes_quantized, layers))]
    if shared:
        advice.append(
            f"XNNPACK quantizes the bias of {_layers(shared)}, used more than once, for the first use only: write "
            "copy_shared_layers = true at the top level of a recipe file."
        )
    if split := fusion.split_activations(graph):
        advice.append(
            f"XNNPACK fuses {_layers(split)} with the activation after it, and skips the quantization between them: write "
            "fuse_activations = true at the top level of a recipe file."
        )
    return " ".join(advice)


def _layers(nodes: Sequence[Any]) -> str:
    names = list(dict.fromkeys(map(_layer, nodes)))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _layer(node: Any) -> str:
    """Return a node's module, with the user's line if it is known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).removeprefix("L['self']").removeprefix("L__self__").strip(".") if stack else ""
    source = source_of(node.meta.get("stack_trace"))
    return f"{path or node.name} ({source.file}:{source.line})" if source is not None else path or str(node.name)


def fill_numerics(report: report_pb2.Report, expected: Sequence[Value], timed: Path, separate: Path, *, quantized: bool) -> None:
    """Compare the outputs of the timed program and of the numerics pass's program with what operators are judged by.

    Args:
        expected: outputs of the program on the host.
        timed, separate: tensor files of outputs on the same inputs.
        quantized: whether that is a quantized program.
    """
    timed_db, dtype = _lowest(expected, timed)
    separate_db, _ = _lowest(expected, separate)
    if timed_db is None or separate_db is None:
        return
    least_db = LEAST_DB if quantized else rounding.least_sqnr_db(dtype)
    report.numerics.timed_sqnr_db, report.numerics.sqnr_db = timed_db, separate_db
    is_bad = report.numerics.HasField("first_bad")
    report.numerics.wrong_only_when_fused = timed_db < least_db <= separate_db and not is_bad


def _sqnr_db(expected: Value, actual: Value) -> float | None:
    return accuracy.compare("", expected, actual).sqnr_db


def _lowest(expected: Sequence[Value], outputs: Path) -> tuple[float | None, str]:
    """Return the lowest SQNR in dB of an output, and its dtype; None if none has one."""
    levels = [
        (level, accuracy.dtype_of(before) or "")
        for before, output in accuracy.pair(list(expected), tensors.decode(outputs.read_bytes()))
        if (level := _sqnr_db(before, output)) is not None
    ]
    return min(levels, default=(None, ""))
