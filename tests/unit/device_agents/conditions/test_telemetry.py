"""Telemetry of this machine: true where the kernel reports it, absent where it does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from etfarm.device_agents.conditions.telemetry import Telemetry, run_telemetry
from etfarm.device_agents.runners.protocol import Measured


def test_telemetry_equals_the_machines_own_values(tmp_path: Path) -> None:
    before_s = int(time.time())
    reported = Telemetry(tmp_path).read()
    assert before_s <= reported.time.ToSeconds() <= time.time()
    assert 0 < reported.memory_available_bytes < psutil.virtual_memory().total
    assert reported.disk_free_bytes <= psutil.disk_usage(str(tmp_path)).total
    assert 0 <= reported.cpu_share <= 1
    assert 1 << 20 < reported.agent_rss_bytes < psutil.virtual_memory().total


def test_what_the_machine_lacks_is_absent_and_not_zero(tmp_path: Path) -> None:
    reported = Telemetry(tmp_path).read()
    assert not reported.HasField("temperature_c") or reported.temperature_c != 0
    assert reported.HasField("battery_share") == (psutil.sensors_battery() is not None)
    assert reported.HasField("charging") <= reported.HasField("battery_share")
    assert not reported.HasField("frequency_hz") or reported.frequency_hz > 0


def test_a_missing_folder_only_costs_the_disks_value(tmp_path: Path) -> None:
    reported = Telemetry(tmp_path / "gone").read()
    assert not reported.HasField("disk_free_bytes") and reported.HasField("load_1m")


def test_a_light_reading_leaves_out_what_costs(tmp_path: Path) -> None:
    before = os.getloadavg()[0]
    reported = Telemetry(tmp_path).read(light=True)
    after = os.getloadavg()[0]
    assert {field.name for field, _ in reported.ListFields()} == {"time", "load_1m", "memory_available_bytes"}
    assert min(before, after) - 0.01 <= reported.load_1m <= max(before, after) + 0.01


def test_counters_that_the_kernel_does_not_report_are_absent() -> None:
    from array import array

    measured = Measured(
        warmup=1, first_run_ns=1, iterations=1, duration_ns=1, stop_reason="ENOUGH", wall_ns=7, cpu_ns=0,
        voluntary_switches=0, involuntary_switches=None, minor_faults=None, major_faults=None, cpu_pressure_us=None,
        peak_rss_bytes=None, samples_ns=array("q", [1]),
    )  # fmt: skip
    reported = run_telemetry(measured)
    assert {field.name for field, _ in reported.ListFields()} == {"cpu_time_ns", "wall_time_ns", "voluntary_switches"}
    assert reported.voluntary_switches == 0
