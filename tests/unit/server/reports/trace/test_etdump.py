"""An ETDump's events as times: what ExecuTorch's own reader finds, and for damaged bytes one sentence."""

from __future__ import annotations

import importlib.resources
import re

import pytest
from executorch.devtools import etdump as schemas

from etfarm.server.reports.trace import etdump
from tests.support.etdumps import decoded, event, written
from tests.support.refusals import refuses
from tests.support.traces import traced

NAMES = ["xnnpack", "portable", "int8", "methods"]


def _fields(table: str) -> list[str]:
    schema = importlib.resources.files(schemas).joinpath("etdump_schema_flatcc.fbs").read_text()
    (body,) = re.findall(rf"^table {table} \{{(.*?)^\}}", schema, re.DOTALL | re.MULTILINE)
    return re.findall(r"^ *(\w+) *:", body, re.MULTILINE)


def test_fields_are_those_of_the_schema() -> None:
    assert _fields("ETDump")[etdump._RUNS] == "run_data"
    assert _fields("RunData")[etdump._EVENTS] == "events"
    assert _fields("Event")[etdump._PROFILE_EVENT] == "profile_event"
    wanted = {
        "name": etdump._NAME, "chain_index": etdump._CHAIN, "instruction_id": etdump._INSTRUCTION, "start_time": etdump._START,
        "delegate_debug_id_int": etdump._NUMBER, "delegate_debug_id_str": etdump._TEXT, "end_time": etdump._END,
    }  # fmt: skip
    result = {name: slot for slot, name in enumerate(_fields("ProfileEvent"))}
    assert result.pop("delegate_debug_metadata") not in wanted.values()
    assert result == wanted


@pytest.mark.parametrize("name", NAMES)
def test_times_and_starts_are_those_that_executorch_reads(name: str) -> None:
    data = traced(name).etdump.read_bytes()
    runs = [
        {(e.get("name", ""), e.get("instruction_id", -1), e.get("delegate_debug_id_str", "")): e for e in run}
        for run in decoded(data)
    ]
    runs = [run for run in runs if ("Method::execute", 0, "") in run]
    trace = etdump.read(data)
    whole = [run["Method::execute", 0, ""] for run in runs]
    begun = [one["start_time"] for one in whole]
    assert trace.method_ns.tolist() == [one["end_time"] - at for one, at in zip(whole, begun, strict=True)]
    parts = 0
    for call in trace.calls:
        what = "DELEGATE_CALL" if call.delegate else f"native_call_{call.event}"
        kernels = [(("", call.instruction, str(kernel.identifier)), kernel) for kernel in call.kernels]
        for key, part in [((what, call.instruction, ""), call), *kernels]:
            result = [run[key] for run in runs]
            assert part.times_ns.tolist() == [one["end_time"] - one["start_time"] for one in result]
            assert part.spans is not None
            assert part.spans.starts_ns.tolist() == [one["start_time"] - at for one, at in zip(result, begun, strict=True)]
            assert part.spans.durations_ns.tolist() == part.times_ns.tolist()
            parts += 1
    calls = {"OPERATOR_CALL", "Method::execute"}
    assert parts == sum(1 for name, _, _ in runs[0] if name not in calls)


def _execution(*events: tuple[int, str, int, int]) -> list[dict[str, object]]:
    return [*(event(name, start, end, at) for at, name, start, end in events), event("Method::execute", 100, 200, 0)]


def test_iterations_that_executed_something_else_are_left_out() -> None:
    yes, no = _execution((0, "native_call_sin.out", 110, 120)), _execution((1, "native_call_cos.out", 110, 130))
    trace = etdump.read(written([event("Method::init", 0, 5, 0)], yes, no, yes))
    assert (trace.left_out, trace.method_ns.tolist()) == (1, [100, 100])
    assert [(call.instruction, call.event, call.times_ns.tolist()) for call in trace.calls] == [(0, "sin.out", [10, 10])]


def test_a_loop_s_body_is_summed_and_has_the_place_of_its_first_execution() -> None:
    twice = _execution((0, "native_call_sin.out", 110, 120), (0, "native_call_sin.out", 130, 145))
    thrice = _execution(*[(0, "native_call_sin.out", at, at + 5) for at in (110, 120, 130)])
    trace = etdump.read(written(twice, thrice, twice))
    (call,) = trace.calls
    assert (trace.left_out, call.times_ns.tolist()) == (0, [25, 15, 25])
    assert call.spans is not None
    assert (call.spans.starts_ns.tolist(), call.spans.durations_ns.tolist()) == ([10, 10, 10], [10, 5, 10])


def test_a_kernel_without_its_own_event_takes_the_time_of_its_call() -> None:
    """Views of the interpreter say only OPERATOR_CALL; kernels that call kernels say two events that overlap."""
    run = _execution(
        (0, "OPERATOR_CALL", 100, 107), (1, "native_call_b.out", 111, 116), (1, "native_call_a.out", 111, 117),
        (1, "OPERATOR_CALL", 110, 118), (2, "native_call_c.out", 121, 125), (2, "OPERATOR_CALL", 120, 129),
    )  # fmt: skip
    result = [(call.event, call.times_ns.tolist()) for call in etdump.read(written(run)).calls]
    assert result == [(None, [7]), ("b.out", [8]), ("c.out", [4])]


def test_a_clock_that_went_back_says_nothing_and_one_that_leapt_is_refused() -> None:
    trace = etdump.read(written(_execution((0, "native_call_sin.out", 120, 110))))
    assert trace.calls[0].times_ns.tolist() == [0]
    with refuses("BAD_TRACE", match="months"):
        etdump.read(written(_execution((0, "native_call_sin.out", 120, 1 << 60))))


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", "is empty"), (b"no etdump at all", "of 16 bytes is not an ETDump"), (bytes(200), "is not an ETDump")],
)
def test_bytes_that_are_no_trace_are_refused(data: bytes, expected: str) -> None:
    with refuses("BAD_TRACE", match=expected):
        etdump.read(data)


def test_a_trace_of_something_that_never_executed_is_refused() -> None:
    for data in (written(), written([]), written([event("Method::init", 0, 5, 0)])):
        with refuses("BAD_TRACE", match="no execution of a method"):
            etdump.read(data)


@pytest.mark.remedy("BAD_TRACE")
@pytest.mark.parametrize("name", ["xnnpack", "portable"])
def test_a_trace_that_is_cut_short_says_by_how_much(name: str) -> None:
    whole = traced(name).etdump.read_bytes()
    for size in (12, 100, len(whole) // 2, len(whole) - 1):
        with refuses("BAD_TRACE", match=f"cut short: {size} of its {len(whole)} bytes"):
            etdump.read(whole[:size])
    assert etdump.read(whole).calls, "what a runner of the server's version writes"


def test_the_same_events_over_and_over_are_refused_before_memory_is_taken_for_them() -> None:
    """Every run leads to one vector of events: a small file that says millions."""
    data = bytearray(written(*[_execution((0, "native_call_sin.out", 110, 120))] * 2))
    runs = 5000
    events = 5000
    # A vector of offsets to the first run's table, whose events are a vector of offsets to one event.
    base = len(data)
    table = base + 4 + 4 * runs
    layout = table + 8
    vector = layout + 12
    target = vector + 4 + 4 * events
    data += runs.to_bytes(4, "little") + b"".join((table - base - 4 - 4 * at).to_bytes(4, "little") for at in range(runs))
    data += (table - layout + (1 << 32)).to_bytes(4, "little") + (vector - table - 4).to_bytes(4, "little")
    data += b"".join(number.to_bytes(2, "little") for number in (12, 8, 0, 0, 0, 4))
    data += events.to_bytes(4, "little") + b"".join((target - vector - 4 - 4 * at).to_bytes(4, "little") for at in range(events))
    data += bytes(64)
    root = 4 + int.from_bytes(data[4:8], "little")
    fields = root - int.from_bytes(data[root : root + 4], "little", signed=True)
    slot = root + int.from_bytes(data[fields + 4 + 2 * etdump._RUNS : fields + 6 + 2 * etdump._RUNS], "little")
    data[slot : slot + 4] = (base - slot).to_bytes(4, "little")
    data[:4] = (len(data) - 4).to_bytes(4, "little")
    with refuses("BAD_TRACE", match="more events than its bytes can hold"):
        etdump.read(bytes(data))
