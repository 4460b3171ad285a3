"""Telemetry of this machine for heartbeats and results. Missing values stay unset; 0 is a value that was read."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from etfarm.device_agents.conditions.sampler import Sampled
from etfarm.device_agents.runners.generation import Generated
from etfarm.device_agents.runners.protocol import Measured, Traced
from etfarm.v1 import device_pb2, report_pb2


class Telemetry:
    """A reader of this machine's state.

    Args:
        folder: the agent's data folder, whose disk's free space is reported.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = psutil.Process()
        # psutil returns the share since the preceding call; the first call only sets the start.
        psutil.cpu_percent()

    def read(self, *, light: bool = False) -> device_pb2.DeviceTelemetry:
        """Return the current state.

        Args:
            light: read only a few small files in /proc, because a timed pass runs on the same cpus.
        """
        state = device_pb2.DeviceTelemetry()
        state.time.GetCurrentTime()
        state.load_1m = os.getloadavg()[0]
        state.memory_available_bytes = psutil.virtual_memory().available
        if light:
            return state
        state.cpu_share = psutil.cpu_percent() / 100
        state.agent_rss_bytes = self._process.memory_info().rss
        try:
            state.disk_free_bytes = psutil.disk_usage(str(self._folder)).free
        except OSError:
            state.ClearField("disk_free_bytes")
        if (temperature := _hottest_c()) is not None:
            state.temperature_c = temperature
        if (frequency := _frequency_hz()) is not None:
            state.frequency_hz = frequency
        _read_battery(state)
        return state


def run_telemetry(measured: Measured | Traced | Generated, sampled: Sampled | None = None) -> report_pb2.RunTelemetry:
    """Return the counters and samples of a pass; what the kernel does not report stays unset."""
    telemetry = report_pb2.RunTelemetry(
        cpu_time_ns=measured.cpu_ns,
        wall_time_ns=measured.wall_ns,
        voluntary_switches=measured.voluntary_switches,
        involuntary_switches=measured.involuntary_switches,
        minor_faults=measured.minor_faults,
        major_faults=measured.major_faults,
        psi_cpu_some_us=measured.cpu_pressure_us,
    )
    if sampled is not None:
        add_samples(telemetry, sampled)
    return telemetry


def add_samples(telemetry: report_pb2.RunTelemetry, sampled: Sampled) -> None:
    """Add the samples of the device to the counters of a pass."""
    telemetry.before.CopyFrom(sampled.before)
    telemetry.after.CopyFrom(sampled.after)
    telemetry.series.extend(sampled.series)
    telemetry.sampler_cpu_ns = sampled.cpu_ns


def _hottest_c() -> float | None:
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    try:
        sensors = [sensor for chip in psutil.sensors_temperatures().values() for sensor in chip]
    except OSError:
        return None
    # Some drivers report 0 for a sensor that is not connected.
    return max((sensor.current for sensor in sensors if sensor.current), default=None)


def _frequency_hz() -> int | None:
    try:
        mean = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return round(mean.current * 1_000_000) if mean is not None and mean.current else None


def _read_battery(state: device_pb2.DeviceTelemetry) -> None:
    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except OSError:
        # psutil lists a folder that may be missing in /sys.
        return
    if battery is None:
        return
    state.battery_share = battery.percent / 100
    if battery.power_plugged is not None:
        state.charging = battery.power_plugged
