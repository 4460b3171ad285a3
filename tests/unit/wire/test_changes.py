"""What is another between two reports: everything that could be why, and nothing that is the same or not known."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from etfarm.wire.changes import WHATS, changes, is_other_program, sentence

READING = {
    "cpus": [{"cpu": 0, "frequency_hz": 1_000_000_000, "limit_hz": 2_400_000_000, "governor": "performance"}],
    "zones": [{"name": "soc", "temperature_c": 41.0}],
    "cooling": [{"name": "fan", "state": 0}],
    "charging": None,
}
REPORT: dict[str, Any] = {
    "recipe_digest": "a" * 64,
    "method": "forward",
    "threads": 4,
    "model": {"name": "net", "digest": "b" * 64},
    "device": {"id": "pi", "os": "Linux 6.1", "memory_bytes": 8 << 30},
    "runner": {"kind": "native", "executorch": "1.5.1", "bundle_digest": "c" * 64, "cores": None},
    "compile": {
        "program": {"digest": "d" * 64, "size_bytes": 10},
        "toolchain": {"torch": "2.13.0", "executorch": "1.5.1", "torchao": "0.14", "etfarm": "0.1.0"},
    },
    "telemetry": {"before": READING},
    "inputs": {"digest": "9" * 64, "tensors": [{"name": "x", "dtype": "int64", "shape": [2, 3]}]},
    "analysis": {"version": "0.1.0"},
}


def with_(path: str, value: Any) -> dict[str, Any]:
    """Return the report with one value another."""
    created = copy.deepcopy(REPORT)
    *route, key = path.split(".")
    target: Any = created
    for name in route:
        target = target[int(name)] if name.isdigit() else target[name]
    target[key] = value
    return created


def test_equal_reports_have_no_changes() -> None:
    assert changes(REPORT, copy.deepcopy(REPORT)) == []


@pytest.mark.parametrize(
    ("path", "value", "what", "expected"),
    [
        ("model.digest", "e" * 64, "model", "model bbbbbbbb -> eeeeeeee"),
        ("recipe_digest", None, "recipe", "recipe aaaaaaaa -> none"),
        ("compile.toolchain.torch", "2.14.0", "torch", "torch 2.13.0 -> 2.14.0"),
        ("compile.program.digest", "f" * 64, "program", "program dddddddd -> ffffffff"),
        ("threads", 2, "threads", "threads 4 -> 2"),
        ("runner.bundle_digest", "1" * 64, "runner bundle", "runner bundle cccccccc -> 11111111"),
        ("device.memory_bytes", 4 << 30, "memory of the device", "memory of the device 8.0 -> 4.0 GiB"),
        ("telemetry.before.cpus.0.governor", "powersave", "governor", "governor performance -> powersave"),
        ("telemetry.before.cpus.0.limit_hz", 1_500_000_000, "frequency limit", "frequency limit 2.40 -> 1.50 GHz"),
        ("telemetry.before.zones.0.temperature_c", 62.0, "temperature", "temperature 41 -> 62 °C"),
        ("telemetry.before.cooling.0.state", 2, "throttled", "throttled no -> yes"),
        ("inputs.digest", "8" * 64, "inputs", "inputs 99999999 -> 88888888"),
        ("inputs.digest", None, "inputs", "inputs 99999999 -> none"),
        (
            "inputs",
            {"digest": "8" * 64, "tensors": [{"name": "x", "dtype": "int64", "shape": [9, 3]}]},
            "inputs",
            "inputs x int64[2, 3] -> x int64[9, 3]",
        ),
        ("analysis.version", "0.2.0", "analyzing etfarm", "analyzing etfarm 0.1.0 -> 0.2.0"),
    ],
)
def test_what_is_another_is_named_with_both_values(path: str, value: Any, what: str, expected: str) -> None:
    (result,) = changes(REPORT, with_(path, value))
    assert result["what"] == what and what in WHATS
    assert sentence(result) == expected
    (back,) = changes(with_(path, value), REPORT)
    assert (back["base"], back["candidate"]) == (result["candidate"], result["base"])


def test_source_files_that_differ_are_named_although_programs_are_equal() -> None:
    files = [{"path": f"p{place}.py", "sha256": f"{place % 10}" * 64} for place in range(30)]
    base, candidate = with_("model.sources", files), with_("model.sources", [*files[:28], {"path": "p28.py", "sha256": "a" * 64}])
    (result,) = changes(base, candidate)
    assert result["what"] == "source files" and result["what"] in WHATS and not is_other_program([result])
    assert sentence(result) == "source files p28.py (88888888), p29.py (99999999) -> p28.py (aaaaaaaa)"
    assert changes(base, base) == changes(base, with_("model.sources", None)) == changes(REPORT, base) == []
    (result,) = changes(base, with_("model.sources", [{"path": "x.py", "sha256": "b" * 64}]))
    assert result["base"].endswith("p19.py (99999999), 10 more")


def test_a_programs_digest_is_reported_only_without_another_explanation() -> None:
    other = with_("compile.program.digest", "f" * 64)
    other["compile"]["toolchain"]["torch"] = "2.14.0"
    assert [result["what"] for result in changes(REPORT, other)] == ["torch"]


@pytest.mark.parametrize("section", ["device", "runner", "compile", "telemetry", "analysis", "inputs"])
def test_a_part_that_one_report_does_not_have_is_not_compared(section: str) -> None:
    assert changes(REPORT, with_(section, None)) == changes(with_(section, None), REPORT) == []


def test_a_few_degrees_are_no_change() -> None:
    assert changes(REPORT, with_("telemetry.before.zones.0.temperature_c", 44.0)) == []


def test_facts_that_a_device_does_not_report_are_no_change() -> None:
    silent = {"cpus": [{"cpu": 0, "frequency_hz": None, "limit_hz": None, "governor": None}], "zones": [], "cooling": []}
    assert changes(REPORT, with_("telemetry.before", silent)) == []
