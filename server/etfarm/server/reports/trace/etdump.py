"""An ETDump of a traced pass as one array of times for each instruction and kernel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.trace.flatbuffer import Columns, Positions
from etfarm.wire.errors import error_for
from etfarm.wire.flatbuffer import Table

EXECUTE: Final = "Method::execute"
DELEGATE_CALL: Final = "DELEGATE_CALL"
OPERATOR_CALL: Final = "OPERATOR_CALL"
NATIVE: Final = "native_call_"

_IDENTIFIER: Final = b"ED00"
_RUNS: Final = 1  # fields of ETDump
_EVENTS: Final = 3  # of RunData
_PROFILE_EVENT: Final = 0  # of Event
_NAME, _CHAIN, _INSTRUCTION, _NUMBER, _TEXT, _START, _END = 0, 1, 2, 3, 4, 6, 7  # of ProfileEvent

_SMALLEST_EVENT: Final = 16
"""Minimum size of an event in bytes: its offset in the vector and a table with one field. A larger count repeats events."""
_LONGEST_NS: Final = 1 << 53
"""Maximum time span, 104 days: a double represents every integer number of nanoseconds up to it."""

Times = NDArray[np.float64]
"""Times of shape [iterations], in ns."""


@dataclass(frozen=True)
class Spans:
    """The start and duration of an event in each iteration; in a loop's body, of its first execution."""

    starts_ns: Times
    """Start, relative to the start of the method."""
    durations_ns: Times


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran inside a delegate's call."""

    identifier: str | int
    """The backend's own name: XNNPACK uses text (`Transpose (ND, X32) #1`), other backends use numbers."""
    times_ns: Times
    """Time per iteration; repeated executions within an iteration (a loop's body) are summed."""
    spans: Spans | None = None


@dataclass(frozen=True)
class Call:
    """One instruction of the method that runs a kernel or a delegate."""

    chain: int
    instruction: int
    event: str | None
    """The kernel's name without its namespace, `convolution.out`; None for a delegate and for unnamed kernels."""
    delegate: bool
    times_ns: Times
    """Time per iteration, as in `Kernel`."""
    kernels: tuple[Kernel, ...]
    spans: Spans | None = None


@dataclass(frozen=True)
class Trace:
    """The executions of one method."""

    method_ns: Times
    calls: tuple[Call, ...]
    """In order of execution."""
    left_out: int
    """Number of iterations that executed other instructions than most did; they are excluded from all times."""
    events: int = 0
    """Number of events that the tracer recorded in one iteration."""


Key = tuple[int, int, str, str | int]
"""Chain, instruction, event name, and the delegate's identifier of the event ("" if it has no identifier)."""


@dataclass(frozen=True)
class Timed:
    """The times of one key."""

    times_ns: Times
    spans: Spans | None = None


def read(data: bytes) -> Trace:
    """Return the trace in an .etdp file.

    An ETDump has one OPERATOR_CALL around each kernel's `native_call_...` and one DELEGATE_CALL around a delegate's events.
    A kernel's time here is that of `native_call_...`, counted once; the runtime's overhead around it belongs to the method.

    Raises:
        BAD_TRACE: the bytes are not a complete ETDump, or no run in it executed a method.
    Source: executorch/devtools/etdump/etdump_schema_flatcc.fbs, after four bytes that hold its size.
    """
    if not data:
        raise error_for("BAD_TRACE", "The trace is empty: its run wrote no events.", size_bytes=0)
    if data[8:12] != _IDENTIFIER:
        raise error_for("BAD_TRACE", f"The trace of {len(data)} bytes is not an ETDump.", size_bytes=len(data))
    wanted = 4 + int.from_bytes(data[:4], "little")
    if wanted > len(data):
        raise error_for(
            "BAD_TRACE", f"The trace is cut short: {len(data)} of its {wanted} bytes are present.", size_bytes=len(data)
        )
    try:
        table, left_out, events = _table(data)
    except (IndexError, ValueError) as error:
        raise error_for("BAD_TRACE", f"The trace of {len(data)} bytes is damaged ({error}).", size_bytes=len(data)) from error
    method = next(timed.times_ns for key, timed in table.items() if key[2] == EXECUTE)
    return Trace(method, _calls(table), left_out, events)


def _table(data: bytes) -> tuple[dict[Key, Timed], int, int]:
    """Return times by key in the order of the events, the number of excluded iterations, and that of an iteration's events."""
    events = _Events(data)
    runs_by_signature: dict[bytes, list[int]] = defaultdict(list)
    for run in range(events.runs):
        runs_by_signature[events.signature(run)].append(run)
    keys = {signature: events.keys(runs[0]) for signature, runs in runs_by_signature.items()}
    executed = {signature: run_keys for signature, run_keys in keys.items() if any(key[2] == EXECUTE for key in run_keys)}
    if not executed:
        raise error_for("BAD_TRACE", "The trace holds no execution of a method.", size_bytes=len(data))
    counts: Counter[frozenset[Key]] = Counter()
    for signature, run_keys in executed.items():
        counts[frozenset(run_keys)] += len(runs_by_signature[signature])
    usual, kept = counts.most_common(1)[0]
    chosen = {signature: run_keys for signature, run_keys in executed.items() if usual == set(run_keys)}
    order = np.argsort(np.concatenate([runs_by_signature[signature] for signature in chosen]), kind="stable")
    unique = list(dict.fromkeys(next(iter(chosen.values()))))
    columns = [events.columns(runs_by_signature[signature], run_keys, unique) for signature, run_keys in chosen.items()]
    times, starts, firsts = (np.concatenate(part, axis=1)[:, order] for part in zip(*columns, strict=True))
    (executions,) = (at for at, key in enumerate(unique) if key[2] == EXECUTE)
    starts = starts - starts[executions]
    table = {key: Timed(times[at], Spans(starts[at], firsts[at])) for at, key in enumerate(unique)}
    return table, counts.total() - kept, max(map(len, chosen.values()))


class _Events:
    """The profile events of all runs, one column per field."""

    def __init__(self, data: bytes) -> None:
        root = Table.root(data, 4)
        columns = Columns(data)
        places = np.array(root.positions(_RUNS), dtype=np.int64)
        starts, lengths = columns.vectors(columns.targets(places), _EVENTS, 4)
        if int(lengths.sum()) * _SMALLEST_EVENT > len(data):
            raise ValueError("it claims more events than its bytes can hold")
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tables = columns.targets(np.repeat(starts, lengths) + 4 * within)
        tables = columns.targets(columns.fields(tables, _PROFILE_EVENT))
        here = tables > 0
        tables, of_run = tables[here], np.repeat(np.arange(lengths.size), lengths)[here]
        self.runs = int(lengths.size)
        self._bounds = np.searchsorted(of_run, np.arange(self.runs + 1))
        self._starts = columns.scalars(tables, _START, "<u8", 0)
        self._durations = columns.scalars(tables, _END, "<u8", 0)
        # A duration is unknown if the clock went backwards.
        self._durations = np.where(self._durations > self._starts, self._durations - self._starts, np.uint64(0))
        if self._durations.size and max(self._durations.max(), np.ptp(self._starts)) > _LONGEST_NS:
            raise ValueError("its times span months")
        self._starts = (self._starts - self._starts.min()) if self._starts.size else self._starts
        self._texts: dict[bytes, int] = {}
        self._fields: NDArray[np.int64] = np.stack(
            [
                columns.scalars(tables, _CHAIN, "<i4", 0).astype(np.int64),
                columns.scalars(tables, _INSTRUCTION, "<i4", -1),
                self._interned(data, *columns.vectors(tables, _NAME, 1)),
                self._interned(data, *columns.vectors(tables, _TEXT, 1)),
                columns.scalars(tables, _NUMBER, "<i4", -1),
            ],
            axis=1,
        )

    def signature(self, run: int) -> bytes:
        """Return bytes that are equal for runs with the same events in the same order."""
        return self._fields[self._bounds[run] : self._bounds[run + 1]].tobytes()

    def keys(self, run: int) -> list[Key]:
        """Return the key of each of a run's events."""
        texts = [text.decode(errors="replace") for text in self._texts]
        fields = self._fields[self._bounds[run] : self._bounds[run + 1]].tolist()
        return [(at, to, texts[name], texts[label] or (number if number != -1 else "")) for at, to, name, label, number in fields]

    def columns(self, runs: Sequence[int], keys: Sequence[Key], unique: Sequence[Key]) -> tuple[Times, Times, Times]:
        """Return each key's total time, its first start and the duration of its first execution.

        Each array has the shape [unique keys, runs]. All runs have the same `keys`.
        """
        rows_by_key = {key: at for at, key in enumerate(unique)}
        rows = np.array([rows_by_key[key] for key in keys], dtype=np.int64)
        events = self._bounds[np.asarray(runs)] + np.arange(len(keys))[:, None]
        durations = self._durations[events].astype(np.float64)
        times = np.zeros((len(unique), len(runs)))
        np.add.at(times, rows, durations)
        _, first = np.unique(rows, return_index=True)
        return times, self._starts[events[first]].astype(np.float64), durations[first]

    def _interned(self, data: bytes, starts: Positions, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for each string; equal strings have equal numbers."""
        if int(lengths.sum()) > len(data):
            raise ValueError("its names are longer than its bytes")
        texts = self._texts
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.fromiter((texts.setdefault(data[at : at + length], len(texts)) for at, length in pairs), np.int64, starts.size)


def _calls(table: Mapping[Key, Timed]) -> tuple[Call, ...]:
    grouped: dict[tuple[int, int], dict[tuple[str, str | int], Timed]] = defaultdict(dict)
    for (chain, instruction, name, identifier), timed in table.items():
        if name != EXECUTE and instruction >= 0:
            grouped[chain, instruction][name, identifier] = timed
    return tuple(call for place, events in grouped.items() if (call := _call(place, events)) is not None)


def _call(place: tuple[int, int], events: Mapping[tuple[str, str | int], Timed]) -> Call | None:
    kernels = tuple(
        Kernel(identifier, timed.times_ns, timed.spans) for (_, identifier), timed in events.items() if identifier != ""
    )
    native = {name: timed for (name, identifier), timed in events.items() if identifier == "" and name.startswith(NATIVE)}
    name = next(iter(native)).removeprefix(NATIVE) if native else None
    delegate = events.get((DELEGATE_CALL, ""))
    if delegate is not None:
        return Call(*place, None, True, delegate.times_ns, kernels, delegate.spans)
    around = events.get((OPERATOR_CALL, ""))
    if len(native) == 1:
        (own,) = native.values()
        return Call(*place, name, False, own.times_ns, (), own.spans)
    if around is not None:
        # The interpreter's own kernels (views) have no name; a kernel that calls another one has two overlapping events.
        return Call(*place, name, False, around.times_ns, (), around.spans)
    return None
