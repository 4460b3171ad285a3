"""Step 9, in the jailed child: an ETDump of a traced pass as one array of times for each instruction and kernel."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etfarm.wire.errors import DeviceError, Kind

EXECUTE: Final = "Method::execute"
DELEGATE_CALL: Final = "DELEGATE_CALL"
OPERATOR_CALL: Final = "OPERATOR_CALL"
NATIVE: Final = "native_call_"

Times = NDArray[np.float64]
"""[iterations] of ns; what an iteration executes several times (a loop's body) is summed."""


class BadTrace(DeviceError):
    """The bytes are no ETDump, or it holds no execution of the method."""

    reason = "BAD_TRACE"
    kind = Kind.INVALID_ARGUMENT


@dataclass(frozen=True)
class Kernel:
    """One event inside a delegate's call."""

    identifier: str | int
    """As the backend names it: XNNPACK by text (`Transpose (ND, X32) #1`), others by number."""
    times_ns: Times


@dataclass(frozen=True)
class Call:
    """One instruction of the method that runs something."""

    chain: int
    instruction: int
    event: str | None
    """The kernel's name without its namespace, `convolution.out`; None for a delegate and for kernels that do not say."""
    delegate: bool
    times_ns: Times
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Trace:
    """The executions of one method."""

    method_ns: Times
    calls: tuple[Call, ...]
    """In order of execution."""
    left_out: int
    """Iterations that executed something else than most did, and are in none of the times."""


Key = tuple[int, int, str, str | int]
"""Chain, instruction, event's name, the delegate's identifier of it ("" where there is none)."""


def read(data: bytes) -> Trace:
    """The trace in an .etdp file.

    An ETDump says one OPERATOR_CALL around each kernel's `native_call_...` and one DELEGATE_CALL around a delegate's events.
    A kernel's time here is that of `native_call_...`, counted once; what the runtime spends around it is the method's.

    Raises:
        BadTrace: the bytes are no ETDump, or no run in it executed a method.
    Source: executorch/devtools/etdump/etdump_schema_flatcc.fbs. Its own reader makes a dataclass of each event and takes
        seconds where the JSON behind it takes milliseconds.
    """
    iterations = [found for run in _runs(data) if (found := _iteration(run)) is not None]
    if not iterations:
        raise BadTrace("The trace holds no execution of a method.")
    usual, _ = Counter(frozenset(times) for times in iterations).most_common(1)[0]
    alike = [times for times in iterations if times.keys() == usual]
    table = {key: np.array([times[key] for times in alike], dtype=np.float64) for key in alike[0]}
    method = next(times for key, times in table.items() if key[2] == EXECUTE)
    return Trace(method, _calls(table), len(iterations) - len(alike))


def _runs(data: bytes) -> list[dict[str, Any]]:
    from executorch.devtools.etdump import serialize

    try:
        runs = json.loads(serialize._convert_from_flatcc(data))["run_data"]
    except Exception as error:
        # flatc is a subprocess: bad bytes show as RuntimeError, CalledProcessError or no output file at all.
        raise BadTrace(f"The trace of {len(data)} bytes is no ETDump.", size_bytes=len(data)) from error
    return [run for run in runs if run.get("events")]


def _iteration(run: Mapping[str, Any]) -> dict[Key, int] | None:
    """Durations in ns of one execution, in the order of the events; None for a run that did something else."""
    times: dict[Key, int] = defaultdict(int)
    executed = False
    for event in run["events"]:
        profile = event.get("profile_event")
        if profile is None:
            continue
        name = profile.get("name") or ""
        executed = executed or name == EXECUTE
        number = profile.get("delegate_debug_id_int", -1)
        identifier = profile.get("delegate_debug_id_str") or (number if number != -1 else "")
        key = (profile.get("chain_index", 0), profile.get("instruction_id", -1), name, identifier)
        times[key] += max(0, profile["end_time"] - profile["start_time"])
    return dict(times) if executed else None


def _calls(table: Mapping[Key, Times]) -> tuple[Call, ...]:
    grouped: dict[tuple[int, int], dict[tuple[str, str | int], Times]] = defaultdict(dict)
    for (chain, instruction, name, identifier), times in table.items():
        if name != EXECUTE and instruction >= 0:
            grouped[chain, instruction][name, identifier] = times
    return tuple(call for place, events in grouped.items() if (call := _call(place, events)) is not None)


def _call(place: tuple[int, int], events: Mapping[tuple[str, str | int], Times]) -> Call | None:
    kernels = tuple(Kernel(identifier, times) for (_, identifier), times in events.items() if identifier != "")
    native = {name: times for (name, identifier), times in events.items() if identifier == "" and name.startswith(NATIVE)}
    name = next(iter(native)).removeprefix(NATIVE) if native else None
    delegate = events.get((DELEGATE_CALL, ""))
    if delegate is not None:
        return Call(*place, None, True, delegate, kernels)
    around = events.get((OPERATOR_CALL, ""))
    if len(native) == 1:
        return Call(*place, name, False, next(iter(native.values())), ())
    if around is not None:
        # Kernels of the interpreter itself (views) say no name; one that calls another kernel says two that overlap.
        return Call(*place, name, False, around, ())
    return None
