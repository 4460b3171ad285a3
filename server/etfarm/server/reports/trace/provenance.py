"""Checks of whether a trace, an ETRecord and a program belong together. Pure.

An ETDump identifies neither its program nor its run, and an ETRecord does not identify its program, so their instructions are
compared. Files of equal graphs pass, since each describes the other as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from etfarm.server.reports.trace import kernels, xnnpack
from etfarm.server.reports.trace.etdump import Trace
from etfarm.server.reports.trace.graph import Instruction, Record, base_name

Program = Mapping[tuple[int, int], Instruction]

_CLOCK_NS: Final = 1000.0
"""Maximum difference between a runner's clock and the trace's."""


def misfit_of_record(record: Record, program: Program) -> str | None:
    """Return why the record does not match the program, as part of a sentence; None if it may match."""
    # Within a branch or a loop's body, instructions are numbered differently than in an ETRecord.
    if not record.handles or not _is_straight(program):
        return None
    delegates = {at: known.name for (_, at), known in program.items() if known.delegate}
    if record.delegates != delegates:
        return f"it has {_listed(record.delegates)}, but the program has {_listed(delegates)}"
    strangers = set(record.handles) - {at for _, at in program}
    if strangers:
        return f"the program runs nothing at its instruction {min(strangers)}"
    known, misfits = 0, []
    for (_, at), instruction in program.items():
        types = {base_name(node.op_type) for handle in record.handles.get(at, ()) for node in record.nodes.get(handle, ())}
        if types and not instruction.delegate:
            known += 1
            misfits += [at] if base_name(instruction.name) not in types else []
    # Lowering renames some kernels (view_copy runs as et_view), so only a majority is conclusive.
    if 2 * len(misfits) > known:
        return f"{len(misfits)} of the program's {known} kernels belong to none of its operators, the first at "
        f"instruction {misfits[0]}"
    return _misfit_of_graphs(record, program)


def _misfit_of_graphs(record: Record, program: Program) -> str | None:
    """Return a mismatch in XNNPACK's delegates, whose graphs keep the debug handles of their export."""
    known = misfits = 0
    for (_, at), instruction in program.items():
        if instruction.name != xnnpack.NAME or instruction.data is None:
            continue
        try:
            nodes = xnnpack.read(instruction.data).nodes
        except xnnpack.BadGraph:
            continue
        handles = {node.debug_handle for node in nodes if node.debug_handle is not None}
        strange = handles - set(record.handles.get(at, ()))
        if strange:
            return f"it does not know the debug handle {min(strange)} in the program's delegate at instruction {at}"
        for node in nodes:
            operators = xnnpack.OPERATORS.get(node.kind)
            types = {base_name(origin.op_type) for origin in record.nodes.get(node.debug_handle or 0, ())}
            if operators and types:
                known += 1
                misfits += not operators & types
    if 2 * misfits > known:
        return f"{misfits} of the {known} nodes in the program's delegates belong to none of its operators"
    return None


def misfit_of_trace(trace: Trace, program: Program) -> str | None:
    """Return why the trace does not match the program, as part of a sentence; None if it may match."""
    if not program:
        return None
    named = misnamed = 0
    for call in trace.calls:
        known = program.get((call.chain, call.instruction))
        if known is None:
            return f"the program runs nothing at its instruction {call.instruction}"
        if known.delegate != call.delegate:
            kinds = ("a delegate", "a kernel") if call.delegate else ("a kernel", "a delegate")
            return f"instruction {call.instruction} is {kinds[0]} in it, and {kinds[1]} in the program"
        if call.event is not None and not known.delegate:
            named += 1
            misnamed += known.name.partition(".")[2] != call.event
    # A kernel may be recorded under the name of another kernel that it calls.
    if 2 * misnamed > named:
        return f"{misnamed} of its {named} kernels have other names in the program"
    missing = set(program) - {(call.chain, call.instruction) for call in trace.calls}
    if missing and _is_straight(program):
        return f"it ran {len(trace.calls)} of the program's {len(program)} instructions"
    return _misfit_of_kernels(trace, program)


def _misfit_of_kernels(trace: Trace, program: Program) -> str | None:
    """Return a mismatch in the kernels of XNNPACK's delegates; different programs often consist of a single delegate each."""
    unmatched = total = 0
    for call in trace.calls:
        known = program[call.chain, call.instruction]
        if known.name != xnnpack.NAME or known.data is None or not call.kernels:
            continue
        try:
            graph = xnnpack.read(known.data)
        except xnnpack.BadGraph:
            continue
        more, count = kernels.difference(graph, [str(kernel.identifier) for kernel in call.kernels])
        unmatched, total = unmatched + more, total + count
    if 2 * unmatched > total:
        return f"{unmatched} of {total} kernels in its delegates and in the program's are in one of both only"
    return None


def misfit_of_run(trace: Trace, traced_ns: Sequence[int]) -> str | None:
    """Return why the trace does not match the run, as part of a sentence; None if it may match.

    Args:
        traced_ns: duration of each traced execution by the runner's clock, an upper bound of the trace's own durations.
    """
    executed = trace.method_ns.size + trace.left_out
    if not traced_ns:
        return None
    if executed != len(traced_ns):
        return f"it holds {executed} executions, and the run had {len(traced_ns)}"
    if not trace.left_out and (trace.method_ns > np.asarray(traced_ns) + _CLOCK_NS).any():
        longer = int((trace.method_ns > np.asarray(traced_ns) + _CLOCK_NS).sum())
        return f"{longer} of its {executed} executions took longer than the run's"
    return None


def _is_straight(program: Program) -> bool:
    """Return whether each instruction runs once; jumps leave gaps in the numbering of kernels and delegates."""
    return bool(program) and {chain for chain, _ in program} == {0} and max(at for _, at in program) == len(program) - 1


def _listed(delegates: Mapping[int, str]) -> str:
    if not delegates:
        return "no delegates"
    first = sorted(delegates)[:3]
    more = ", ..." if len(delegates) > len(first) else ""
    return f"{len(delegates)} delegates ({', '.join(f'{delegates[at]} at instruction {at}' for at in first)}{more})"
