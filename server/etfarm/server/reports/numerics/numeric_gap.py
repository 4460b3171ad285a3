"""The numeric gap: every operator's values on the device against those on the host, and the first bad operator.

The device's values were recorded by its numerics pass. The host's come from torch, which runs the exported program as it was
lowered, and the program before quantization if available, node by node on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from etfarm.server.graphs.sources import Source, common_module
from etfarm.server.reports.numerics import counterparts, edge, reference
from etfarm.server.reports.numerics.counterparts import Counterparts, Output
from etfarm.server.reports.numerics.deviation import Array
from etfarm.server.reports.numerics.operator_check import THRESHOLD_DB, Observer, OutOfTime, Slot, is_bad, is_judged
from etfarm.server.reports.request import Numerics
from etfarm.server.reports.trace import graph, provenance
from etfarm.server.reports.trace.recording import NothingRecorded, Recording
from etfarm.server.workers.limits import limit_parsing
from etfarm.v1 import compile_pb2, report_pb2
from etfarm.wire import tensors
from etfarm.wire.errors import error_for

EAGER: Final = report_pb2.REFERENCE_EAGER
QUANTIZED: Final = report_pb2.REFERENCE_QUANTIZED

_NO_BFLOAT16: Final = "ExecuTorch's ETDump records no bfloat16 values"

Warn = Callable[[str, str], None]


@dataclass
class Side:
    """The comparison of all rows with one reference."""

    name: report_pb2.Reference.ValueType
    nodes: Counterparts
    slots: list[Slot] = field(default_factory=list)


def fill(
    report: report_pb2.Report,
    method: str,
    model: Path | None,
    inputs: Path,
    files: Numerics,
    deadline_s: float,
    warn: Warn,
    screen: reference.Screen | None = None,
) -> None:
    """Fill `numeric_gap`, and the fields of `numerics` that describe it.

    Args:
        model: the program before quantization; None if it is not available.
        inputs: tensor file of the device's inputs.
        files: the files of the numerics pass.
        deadline_s: by time.monotonic(); nodes that the host has not reached by then have no row.
        warn: called with a code ANALYSIS_NUMERICS_... and a sentence for each part that is left out.
        screen: as in `reference.load`.

    Raises:
        BadRecording, BadRecord, BadProgram, OTHER_EXPORT, NothingToCompare: nothing can be compared.
    """
    parsing = partial(limit_parsing, files.etdump, files.etrecord, files.pte)
    with parsing():
        recording = _recording(files, method)
        record = graph.read_record(files.etrecord, method)
        operators = edge.read(files.etrecord, method)
        program = graph.read_program(files.pte, method)
        if not record.handles or not record.nodes:
            raise graph.BadRecord("The ETRecord has no debug handles, by which recorded values are matched with the graph.")
        if misfit := provenance.misfit_of_record(record, program):
            raise error_for("OTHER_EXPORT", f"The ETRecord is of another export: {misfit}.")
        values = {recorded.instruction: recorded.values for recorded in recording.instructions}
        executed = edge.executed(operators, record.handles, program, values)
        outputs = list(counterparts.outputs(operators, executed, program, recording.instructions))
    known = [recorded for recorded in recording.instructions if executed.get(recorded.instruction)]
    if 2 * len({id(output.group) for output in outputs}) < len(known):
        raise error_for(
            "OTHER_EXPORT",
            f"The recorded values come from another program: most of the {len(known)} instructions gave another type "
            "or shape than "
            "the graph does."
        )  # fmt: skip
    ran = [operator for group in executed.values() for operator in group]
    if unrecorded := sum(operator.is_bfloat16 for operator in ran):
        message = f"{_NO_BFLOAT16}: {unrecorded} of {len(ran)} operators produce them; each is compared at the next "
        "operator that does not."
        warn("ANALYSIS_NUMERICS_BFLOAT16", message)
    leaves = tensors.decode(inputs.read_bytes())
    # Kernels are not to blame for quantization error, so they are judged against the quantized program if there is one.
    judged = QUANTIZED if files.quantized is not None else EAGER
    sides: list[Side] = []
    numbers: dict[int, Callable[[Array], Array]] = {}
    failed = []
    for name, path in ((QUANTIZED, files.quantized), (EAGER, model)):
        if path is not None:
            try:
                exported = reference.load(path, screen)
                with parsing():
                    sides.append(_side(name, Counterparts(operators, exported, executed), outputs))
                observe = Observer(sides[-1].slots, recording, numbers, deadline_s, judges=name == judged)
                reference.run_nodes(exported, leaves, observe)
            except (reference.ReferenceNotRunnable, OutOfTime) as error:
                failed.append(f"Nothing further is compared with {_called(name)}: {error}")
                warn("ANALYSIS_NUMERICS_REFERENCE_FAILED", failed[-1])
    if not any(slot.deviation for side in sides for slot in side.slots):
        if failed and (not sides or any(side.slots for side in sides)):
            raise error_for(
                "NOTHING_TO_COMPARE", f"None of the {len(outputs)} values that the device recorded could be compared. {failed[0]}"
            )
        raise error_for(
            "NOTHING_TO_COMPARE",
            f"None of the {len(outputs)} values that the device recorded has a counterpart in the model's graph: the ETRecord "
            "and the model are of different exports."
        )  # fmt: skip
    with parsing():
        rows = _rows(sides, outputs)
    report.numeric_gap.extend(row for row, _ in rows)
    bad = next((at for at, (_, slot) in enumerate(rows) if is_bad(slot)), None)
    report.numerics.threshold_db = THRESHOLD_DB
    report.numerics.judged = sum(is_judged(slot) for _, slot in rows)
    if bad is not None:
        report.numerics.first_bad = bad
        report.numeric_gap[bad].first_bad = True


def _recording(numerics: Numerics, method: str) -> Recording:
    try:
        return Recording(numerics.etdump, numerics.debug)
    except NothingRecorded as error:
        if any(operator.is_bfloat16 for operator in edge.read(numerics.etrecord, method).operators):
            raise NothingRecorded(f"{_NO_BFLOAT16}, and the program produces no other values.") from error
        raise


def _called(against: report_pb2.Reference.ValueType) -> str:
    return "the quantized program" if against == QUANTIZED else "the program before quantization"


def _side(name: report_pb2.Reference.ValueType, nodes: Counterparts, outputs: Sequence[Output]) -> Side:
    side = Side(name, nodes)
    steps: dict[str, list[edge.Operator]] = {}
    for output in outputs:
        step, node = nodes.step_of(output.operator), nodes.of(output)
        if step is None:
            continue
        if node is None:
            steps.setdefault(step.name, []).extend(output.group)
        elif name == QUANTIZED or not all(
            operator.quantizes for operator in output.group
        ):  # a quantizing group repeats the value of the preceding operator
            # If one operator of the model became several, only the last value is the model's, and they share one row.
            group = {operator.index: operator for operator in (*steps.get(step.name, ()), *output.group)}
            side.slots.append(Slot(output, node, tuple(group[index] for index in sorted(group))))
    return side


def _rows(sides: Sequence[Side], outputs: Sequence[Output]) -> list[tuple[report_pb2.NumericGap, Slot]]:
    """Return the rows in order of execution; for one value, the row against the quantized program comes first."""
    order = {id(output): at for at, output in enumerate(outputs)}
    slots = [
        (order[id(slot.output)], at, slot) for at, side in enumerate(sides) for slot in side.slots if slot.deviation is not None
    ]
    seen = [frozenset(slot.node.name for slot in side.slots if slot.deviation is not None) for side in sides]
    rows = []
    for _, at, slot in sorted(slots, key=lambda entry: entry[:2]):
        unseen = sides[at].nodes.unseen(slot.node, seen[at])
        members = {operator.index: operator for operator in (*slot.group, *unseen)}
        rows.append((_row(slot, [members[index] for index in sorted(members)], sides[at].name), slot))
    return rows


def _row(slot: Slot, group: Sequence[edge.Operator], against: report_pb2.Reference.ValueType) -> report_pb2.NumericGap:
    deviation = slot.deviation
    assert deviation is not None
    own = [operator for operator in group if not operator.quantizes] or list(group)
    places = list(dict.fromkeys(operator.node.source for operator in own if operator.node.source is not None))
    return report_pb2.NumericGap(
        ops=list(dict.fromkeys(operator.node.op_type for operator in group)),
        snr_db=deviation.snr_db if deviation.same_kind and not deviation.has_nan else None,
        mse=deviation.mse, l1=deviation.l1, max_abs_error=deviation.max_abs_error,
        source=_line(places[0]) if places else None,
        reference=against,
        module=own[0].node.module or common_module(operator.node.holder for operator in own),
        sources=[_line(place) for place in places] if len(places) > 1 else (),
        debug_handles=sorted({handle for operator in slot.group for handle in operator.handles}),
        backend=slot.output.backend,
        expected=slot.expected, actual=slot.actual, histogram=slot.histogram,
    )  # fmt: skip


def _line(source: Source) -> compile_pb2.SourceLine:
    return compile_pb2.SourceLine(file=source.file, line=source.line, code=source.code)
