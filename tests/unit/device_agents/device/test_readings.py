"""What the kernel's files say of a device: in the formats of its documentation, and nothing where they say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.device import readings

CPU = "/sys/devices/system/cpu/cpu{}/cpufreq/"
ZONE = "/sys/class/thermal/thermal_zone{}/"
BATTERY = "/sys/class/power_supply/battery/"
BOARD = {
    "/proc/stat": "cpu  100 20 30 4000 50 6 7 8 9 10\ncpu0 50 10 15 2000 25 3 3 4 4 5\nintr 1 2\n",
    "/proc/loadavg": "0.75 0.50 0.25 3/512 12345\n",
    "/proc/pressure/cpu": "some avg10=12.50 avg60=1.00 avg300=0.10 total=123456\nfull avg10=0.00 total=0\n",
    "/proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "/proc/meminfo": "MemTotal:        8000000 kB\nMemFree:          100000 kB\nMemAvailable:    4000000 kB\n",
    CPU.format(0) + "scaling_cur_freq": "600000\n",
    CPU.format(0) + "scaling_max_freq": "1800000\n",
    CPU.format(0) + "scaling_governor": "schedutil\n",
    CPU.format(10) + "scaling_cur_freq": "2400000\n",
    CPU.format(4) + "scaling_cur_freq": "<unknown>\n",
    CPU.format(4) + "scaling_governor": "performance\n",
    ZONE.format(0) + "type": "cpu-thermal\n",
    ZONE.format(0) + "temp": "48312\n",
    ZONE.format(1) + "type": "battery\n",
    ZONE.format(1) + "temp": "31\n",
    ZONE.format(2) + "type": "modem\n",
    ZONE.format(2) + "temp": "-273000\n",
    ZONE.format(3) + "temp": "0\n",
    ZONE.format(4) + "temp": "52000\n",
    "/sys/class/thermal/cooling_device0/type": "cpufreq-cpu0\n",
    "/sys/class/thermal/cooling_device0/cur_state": "2\n",
    "/sys/class/thermal/cooling_device1/type": "pwm-fan\n",
    "/sys/class/thermal/cooling_device1/cur_state": "3\n",
    "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "5\n",
    "/sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "7\n",
    "/sys/class/power_supply/mouse/type": "Battery\n",
    "/sys/class/power_supply/mouse/scope": "Device\n",
    "/sys/class/power_supply/mouse/capacity": "1\n",
    "/sys/class/power_supply/usb/type": "USB\n",
    BATTERY + "type": "Battery\n",
    BATTERY + "capacity": "87\n",
    BATTERY + "status": "Discharging\n",
}


def test_a_board_with_all_files_reports_all_facts() -> None:
    reported = readings.parse(BOARD, 12.5)
    cpus = [(cpu.cpu, cpu.frequency_hz, cpu.limit_hz, cpu.governor) for cpu in reported.cpus]
    assert cpus == [(0, 600_000_000, 1_800_000_000, "schedutil"), (4, 0, 0, "performance"), (10, 2_400_000_000, 0, "")]
    assert not reported.cpus[1].HasField("frequency_hz"), "an unknown clock is absent, not 0"
    zones = [(zone.name, zone.temperature_c) for zone in reported.zones]
    assert zones == [("cpu-thermal", 48.312), ("battery", 31.0), ("thermal_zone4", 52.0)]
    assert [(device.name, device.state) for device in reported.cooling] == [("cpufreq-cpu0", 2)], "a fan slows nothing down"
    assert reported.throttle_count == 12
    assert (reported.battery_share, reported.charging) == (0.87, False)
    assert (reported.load_1m, reported.runnable, reported.memory_available_bytes) == (0.75, 2, 4_096_000_000)
    assert (reported.psi_cpu_avg10, reported.psi_memory_avg10) == (0.125, 0.0) and not reported.HasField("psi_io_avg10")
    # Guests are in user and nice already; 10 ms a tick.
    assert (reported.cpu_busy_ns, reported.cpu_stolen_ns) == ((100 + 20 + 30 + 6 + 7) * 10_000_000, 80_000_000)
    assert reported.elapsed_ms == 12.5
    assert readings.hottest_c(BOARD) == 52.0
    assert readings.frequency_hz(BOARD, 10) == 2_400_000_000 and readings.frequency_hz(BOARD, 4) is None
    assert readings.waited_us(BOARD["/proc/pressure/cpu"]) == 123456


def test_a_machine_without_files_reports_no_facts() -> None:
    assert readings.parse({}).ListFields() == []


@pytest.mark.parametrize(("status", "charging"), [
    ("Charging", True), ("Full", True), ("Not charging", True), ("Discharging", False), ("Unknown", None),
])  # fmt: skip
def test_a_charger_is_there_unless_the_battery_empties(status: str, charging: bool | None) -> None:
    reported = readings.parse({BATTERY + "type": "Battery", BATTERY + "status": status})
    assert (reported.charging if reported.HasField("charging") else None) is charging


@given(st.dictionaries(st.sampled_from(sorted(BOARD)), st.text(max_size=40) | st.sampled_from(sorted(set(BOARD.values())))))
def test_nonsense_is_absent_and_never_an_error(facts: dict[str, str]) -> None:
    reported = readings.parse(facts)
    assert all(-40 <= zone.temperature_c <= 150 for zone in reported.zones)
    assert 0 <= reported.battery_share <= 1


def test_what_is_found_is_read_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for path, text in BOARD.items():
        file = tmp_path / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    paths = readings.find(tmp_path)
    assert set(BOARD) <= set(paths)
    facts = readings.collect(paths, tmp_path)
    assert readings.parse(facts) == readings.parse({path: BOARD[path] for path in paths if path in BOARD})
    (tmp_path / "proc/stat").unlink()
    (tmp_path / "proc/stat").mkdir()
    assert "/proc/stat" not in readings.collect(paths, tmp_path)


def test_this_machine_is_read() -> None:
    reported = readings.parse(readings.collect(readings.find()))
    assert reported.cpu_busy_ns > 0 and reported.memory_available_bytes > 0 and reported.HasField("runnable")
