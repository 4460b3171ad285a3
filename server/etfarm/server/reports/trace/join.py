"""The report's operator rows: the trace joined with the compiler's metadata.

Times and shares. Both come from one estimator, the mean over the typical iterations (`estimate`), so they never contradict: the
time of a row is its share of the method's. Means add up in the same hierarchy as the trace:

    method = sum of OPERATOR and DELEGATE rows + the method's REST;   delegate = sum of its KERNEL rows + its REST.

Leaves are the rows without children; with the RESTs their shares sum to 1. A REST is the part of its parent that the children do
not account for, and is never negative: if by rounding the children exceed the parent (XNNPACK's clock has a resolution of 1 us),
they are scaled to fill it and the REST is 0. XNNPACK rounds down, so its kernels' means are raised by half a step, as far as the
delegate has time left; a kernel that reads 0 in every typical iteration has no time, and the REST holds it.

Percentiles are over all iterations, as measured. They do not add up.

The timeline. `start_ns` and `duration_ns` are of one iteration, the one with the median time, so that a row lies within its
parent and after the preceding row; an operator that runs several times in it (a loop's body) has its first execution. A row
without a position there has no start, and one shorter than the clock's resolution has no duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from etfarm.server.graphs.sources import Source
from etfarm.server.reports.latency import slow_group
from etfarm.server.reports.trace.estimate import Estimator
from etfarm.server.reports.trace.etdump import Call, Kernel, Spans, Times, Trace
from etfarm.server.reports.trace.graph import Instruction, Origin, Record, base_name
from etfarm.v1 import compile_pb2, report_pb2
from etfarm.wire import timings, views

RESOLUTION_NS: Final = {"XnnpackBackend": 1000.0}
"""Clock resolution in ns of the events inside a delegate that rounds them down, by backend; for others it is derived."""

UNKNOWN_KERNEL: Final = "kernel"
"""The name of a kernel that is unnamed in both the trace and the program."""

UNKNOWN_DELEGATE: Final = "delegate"
"""The name of a delegate whose backend is unknown because the program cannot be read."""


_UNMATCHED: Final = Origin(reason="")
"""The origin of a kernel without one: its delegate's row says why, once for all of them."""
Place = tuple[float, float]
"""Start relative to the start of the method, and duration; ns."""


@dataclass(frozen=True)
class Joined:
    """The traced pass of a report."""

    profile: report_pb2.Profile
    operators: tuple[report_pb2.OperatorRow, ...]
    """In order of execution: a delegate, its kernels, its REST, ...; the method's REST comes last."""
    times_ns: tuple[list[int], ...]
    """Times of each traced iteration: of the method, then of each of `operators`."""


def join(
    trace: Trace,
    record: Record,
    program: Mapping[tuple[int, int], Instruction],
    method: str,
    kernels: Mapping[tuple[int, int], Mapping[str, Origin]] | None = None,
    unaligned: Mapping[tuple[int, int], str] | None = None,
    instructions: Mapping[tuple[int, int], Origin] | None = None,
) -> Joined:
    """Return the operator rows of a trace.

    Args:
        record: from the compilation of the program; an empty one leaves out modules, sources and handles.
        program: instructions by chain and index; an empty one leaves out kernel namespaces and backends.
        method: the method's name, used in its REST row.
        kernels: by a delegate's chain and instruction, the origins of its kernels by identifier; see `attribution`. For other
            delegates, the record holds the origins that the backend reported to the compiler.
        unaligned: the reason for each delegate with kernels, or some kernels, without origins.
        instructions: the origins of kernels outside of delegates for which the record has no debug handles.
    """
    rows = _Rows(trace, has_record=bool(record.nodes))
    calls_mean = [rows.estimator.mean(call.times_ns) for call in trace.calls]
    method_mean = rows.method_ns
    whole = 1.0 if method_mean > 0 else None
    shares, rest = _split(calls_mean, method_mean, whole)
    names = [_kernel_name(call, program) for call in trace.calls]
    undelegated = {
        (handle, base_name(name))
        for call, name in zip(trace.calls, names, strict=True)
        for handle in record.handles.get(call.instruction, ())
        if not call.delegate
    }
    for call, name, share in zip(trace.calls, names, shares, strict=True):
        handles = record.handles.get(call.instruction, ())
        if call.delegate:
            known = program.get((call.chain, call.instruction))
            origin = record.origin(handles, without=undelegated)
            reported = record.delegate_handles.get(call.instruction, {})
            origins = (kernels or {}).get((call.chain, call.instruction))
            if origins is None:
                origins = {identifier: record.origin(handles) for identifier, handles in reported.items() if handles}
            backend = known.name if known and known.delegate else None
            reason = (unaligned or {}).get((call.chain, call.instruction))
            if call.kernels and not any(str(kernel.identifier) in origins for kernel in call.kernels):
                reason = reason or _unaligned_reason(backend, record)
            rows.add_delegate(call, share, origin, backend, origins, reason)
        else:
            origin = (instructions or {}).get((call.chain, call.instruction)) or record.origin(handles, kernel=name)
            place = rows.place(call.spans)
            rows.add(report_pb2.OPERATOR_KIND_OPERATOR, name, call.times_ns, share, origin, call.instruction, place=place)
    rows.add_rest(f"rest of {method}", trace.method_ns, [call.times_ns for call in trace.calls], rest)
    profile = report_pb2.Profile(
        iterations=trace.method_ns.size, p50_ns=float(np.median(trace.method_ns)), shown=rows.shown, mean_ns=method_mean,
        mean_ci95_ns=_around(method_mean, rows.estimator.half_width(trace.method_ns), 0.0), events=trace.events or None,
        drift=timings.drift(trace.method_ns, np.median),
    )  # fmt: skip
    slow = slow_group.find(trace.method_ns)
    if slow is not None:
        profile.slow_share, profile.slow_ratio = slow.share, slow.ratio
    return Joined(profile, tuple(rows.rows), (_whole(trace.method_ns), *rows.times_ns))


class _Rows:
    """Rows under construction."""

    def __init__(self, trace: Trace, *, has_record: bool) -> None:
        self._has_record = has_record
        self.rows: list[report_pb2.OperatorRow] = []
        self.times_ns: list[list[int]] = []
        self.estimator = Estimator(trace.method_ns)
        self.method_ns = self.estimator.mean(trace.method_ns)
        """The mean time of the method."""
        self._tick = _smallest([trace.method_ns, *(call.times_ns for call in trace.calls)])
        # For an even number of iterations, the shorter of the two in the middle.
        self.shown = int(np.argsort(trace.method_ns, kind="stable")[(trace.method_ns.size - 1) // 2])
        self._whole: Place = (0.0, float(trace.method_ns[self.shown]))

    def place(self, spans: Spans | None) -> Place | None:
        """Return the position in the shown iteration; None if it is not within the method there."""
        if spans is None:
            return None
        place = float(spans.starts_ns[self.shown]), float(spans.durations_ns[self.shown])
        return place if within(place, self._whole) else None

    def add(
        self,
        kind: report_pb2.OperatorKind.ValueType,
        name: str,
        times: Times,
        share: float | None,
        origin: Origin,
        instruction: int | None,
        *,
        parent: report_pb2.OperatorRow | None = None,
        resolution: float | None = None,
        rounding: float | None = None,
        place: Place | None = None,
        signed: Times | None = None,
    ) -> report_pb2.OperatorRow:
        """Add a row. A percentile below `resolution` (if None, the trace's smallest time) is left unset instead of 0.

        Args:
            rounding: by how much the clock's rounding can shift the mean, ns.
            signed: the times whose mean is the row's, if `times` are not; they may be negative.
        """
        p10, p50, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
        mean, least = (share or 0.0) * self.method_ns, resolution or self._tick
        has_tails = timings.has_percentile(90, times.size)
        row = report_pb2.OperatorRow(
            index=len(self.rows), kind=kind, name=name, op_types=origin.op_types, debug_handles=origin.debug_handles,
            parent=None if parent is None else parent.index, share=share, module=origin.module, instruction_id=instruction,
            p50_ns=p50 if p50 >= least else None, mean_ns=mean if mean > 0 else None,
            p10_ns=p10 if has_tails and p10 >= least else None, p90_ns=p90 if has_tails and p90 >= least else None,
            resolution_ns=resolution if resolution or p50 > 0 else self._tick,
        )  # fmt: skip
        if mean > 0:
            half_width = self.estimator.half_width(times if signed is None else signed)
            row.mean_ci95_ns.extend(_around(mean, half_width, rounding or 0.0))
            if rounding is not None:
                row.rounding_ns = rounding
        if place is not None:
            row.start_ns = place[0]
            if place[1] > 0:
                row.duration_ns = place[1]
        if parent is not None:
            row.delegated = True
            if parent.HasField("backend"):
                row.backend = parent.backend
        if origin.source is not None:
            row.source.CopyFrom(_line(origin.source))
        row.sources.extend(map(_line, origin.sources))
        if kind != report_pb2.OPERATOR_KIND_REST and (reason := _source_reason(origin, self._has_record)):
            row.source_reason = reason
        self.rows.append(row)
        self.times_ns.append(_whole(times))
        return row

    def add_delegate(
        self,
        call: Call,
        share: float | None,
        origin: Origin,
        backend: str | None,
        origins: Mapping[str, Origin],
        unaligned: str | None,
    ) -> None:
        """Add rows for a delegate's call, its kernels and its REST; the call alone if the backend reports no kernels.

        Args:
            unaligned: why some or all kernels are not among `origins`.
        """
        name, whole = backend or UNKNOWN_DELEGATE, self.place(call.spans)
        row = self.add(report_pb2.OPERATOR_KIND_DELEGATE, name, call.times_ns, share, origin, call.instruction, place=whole)
        row.delegated = True
        if backend is not None:
            row.backend = backend
        if unaligned is not None:
            row.unaligned_reason = unaligned
        if not call.kernels:
            return
        resolution = _resolution(backend, call.kernels)
        raised = self._raise_by_half_a_step(backend, call)
        means = [self.estimator.mean(times) for times in raised]
        shares, rest = _split(means, self.estimator.mean(call.times_ns), share)
        spans = [kernel.spans for kernel in call.kernels]
        places, reconstructed = lay([self.place(span) for span in spans], whole, has_starts=resolution is None)
        roundings = [
            self.estimator.rounding_error(kernel.times_ns, resolution) if resolution and mean > 0 else None
            for kernel, mean in zip(call.kernels, means, strict=True)
        ]
        for kernel, part, place, rounding in zip(call.kernels, shares, places, roundings, strict=True):
            known = origins.get(str(kernel.identifier))
            text = kernel.identifier if isinstance(kernel.identifier, str) else f"{name} #{kernel.identifier}"
            child = self.add(
                report_pb2.OPERATOR_KIND_KERNEL, text, kernel.times_ns, part, known or _UNMATCHED, call.instruction,
                parent=row, resolution=resolution, rounding=rounding, place=place,
            )  # fmt: skip
            child.aligned = known is not None
            child.reconstructed = reconstructed
        self.add_rest(
            f"rest of {name}", call.times_ns, raised, rest, parent=row, resolution=resolution,
            rounding=views.combine_roundings(filter(None, roundings)) if resolution else None,
        )  # fmt: skip

    def _raise_by_half_a_step(self, backend: str | None, call: Call) -> list[Times]:
        """Return the times of a delegate's kernels with the half step by which a clock that rounds down is short on average.

        Of a kernel that no typical iteration saw, nothing is known but that it takes less than a step: it stays as it is. Kernels
        are not raised beyond what the delegate has left, since that would scale down those that are long.
        """
        read = [self.estimator.mean(kernel.times_ns) for kernel in call.kernels]
        seen = sum(mean > 0 for mean in read)
        left = max(0.0, self.estimator.mean(call.times_ns) - sum(read))
        step = min(RESOLUTION_NS.get(backend or "", 0.0) / 2, left / seen) if seen else 0.0
        return [kernel.times_ns + step if mean > 0 else kernel.times_ns for kernel, mean in zip(call.kernels, read, strict=True)]

    def add_rest(
        self,
        name: str,
        whole: Times,
        parts: Sequence[Times],
        share: float | None,
        *,
        parent: report_pb2.OperatorRow | None = None,
        resolution: float | None = None,
        rounding: float | None = None,
    ) -> None:
        """Add a row for the part of `whole` that `parts` do not account for."""
        signed = whole - np.sum(parts, axis=0) if parts else whole
        self.add(
            report_pb2.OPERATOR_KIND_REST, name, np.maximum(0.0, signed), share, Origin(), None, parent=parent,
            resolution=resolution, rounding=rounding, signed=signed,
        )  # fmt: skip


def _source_reason(origin: Origin, has_record: bool) -> str | None:
    """Return why a row has no line, or whose line it has instead of its own; None if no ETRecord has any lines."""
    if origin.reason is not None or origin.source is not None or origin.sources:
        return origin.reason
    if not has_record:
        return None
    if not origin.op_types:
        return "The compiler recorded no operator of the model for it."
    return f"The stack trace of {origin.op_types[0]} has no line of the model's own code."


def _around(mean_ns: float, half_width_ns: float | None, rounding_ns: float) -> tuple[float, ...]:
    """Return the ends of an interval; empty without one."""
    if half_width_ns is None:
        return ()
    return max(0.0, mean_ns - half_width_ns - rounding_ns), mean_ns + half_width_ns + rounding_ns


def _kernel_name(call: Call, program: Mapping[tuple[int, int], Instruction]) -> str:
    known = program.get((call.chain, call.instruction))
    return known.name if known and not known.delegate else call.event or UNKNOWN_KERNEL


def _unaligned_reason(backend: str | None, record: Record) -> str:
    if backend is None:
        return "The program that ran, which names the delegate's backend and graph, cannot be read."
    if not record.nodes:
        return "No ETRecord says where its operators come from."
    return f"{backend} reported no operators of its kernels to the compiler."


def _whole(times: Times) -> list[int]:
    rounded: list[int] = np.rint(times).astype(np.int64).tolist()
    return rounded


def _line(source: Source) -> compile_pb2.SourceLine:
    return compile_pb2.SourceLine(file=source.file, line=source.line, code=source.code)


def _split(parts: Sequence[float], whole: float, share: float | None) -> tuple[list[float | None], float | None]:
    """Return the shares of `parts` of a whole with the share `share`, and the share of the rest. They sum to `share`.

    Parts that exceed the whole are scaled to fill it. If the whole took no time, the rest has the entire share.
    """
    if share is None:
        return [None] * len(parts), None
    total = sum(parts)
    scale = share / max(whole, total) if whole > 0 else 0.0
    return [part * scale for part in parts], max(0.0, share - total * scale)


def _resolution(backend: str | None, kernels: Sequence[Kernel]) -> float | None:
    known = RESOLUTION_NS.get(backend or "")
    if known is not None:
        return known
    # Times that are all multiples of 1,000 ns reveal a microsecond clock; this does not happen by chance.
    times = np.concatenate([kernel.times_ns for kernel in kernels])
    return 1000.0 if times.size >= 10 and not (times % 1000).any() else None


def _smallest(times: Sequence[Times]) -> float:
    """Return the smallest positive time, an upper bound of the clock's resolution; 1 ns if all times are 0."""
    values = np.concatenate(times)
    return float(values[values > 0].min()) if (values > 0).any() else 1.0


def within(inner: Place, outer: Place) -> bool:
    """Return whether `inner` neither starts before `outer` nor ends after it."""
    return inner[0] >= outer[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def lay(kernels: Sequence[Place | None], delegate: Place | None, *, has_starts: bool) -> tuple[list[Place | None], bool]:
    """Return the positions of a delegate's kernels, and whether their starts are reconstructed.

    They are reconstructed if the backend reports no starts (`has_starts` is False) or impossible ones: a kernel that overlaps
    another or lies outside of the delegate. The kernels are then placed one after the other from the delegate's start, each
    shortened in proportion if, by rounding, they take longer together than the delegate.
    """
    known = [kernel for kernel in kernels if kernel is not None]
    if delegate is None or len(known) < len(kernels):
        return [None] * len(kernels), False
    disjoint = all(earlier[0] + earlier[1] <= later[0] for earlier, later in pairwise(known))
    if has_starts and disjoint and all(within(kernel, delegate) for kernel in known):
        return [*known], False
    total = sum(duration for _, duration in known)
    scale = min(1.0, delegate[1] / total) if total > 0 else 1.0
    places: list[Place | None] = []
    # Integer nanoseconds add up exactly.
    at, end = delegate[0], delegate[0] + delegate[1]
    for _, duration in known:
        length = float(int(min(duration * scale, end - at)))
        places.append((at, length))
        at += length
    return places, True
