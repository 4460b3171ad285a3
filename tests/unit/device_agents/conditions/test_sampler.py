"""The series beside a timed pass: bounded, of what is there, and gone with the pass."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.conditions.sampler import MAX_POINTS, Sampler, _Points, point
from etfarm.v1 import report_pb2

CLOCK = "/sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_pass_has_a_reading_at_each_end_and_points_between() -> None:
    with Sampler([[0]], interval_s=0.001) as sampler:
        began_ns = time.monotonic_ns()
        sampler.begin()
        while len(sampler._points.taken) < 3:
            time.sleep(0.001)
        seen = sampler.end()
        took_ns = time.monotonic_ns() - began_ns
    assert seen is not None and not _watchers()
    assert 0 <= seen.before.elapsed_ms < seen.series[0].elapsed_ms < seen.series[-1].elapsed_ms < seen.after.elapsed_ms
    assert seen.after.cpu_busy_ns >= seen.before.cpu_busy_ns > 0
    assert 0 < seen.cpu_ns < took_ns
    assert all(each.busy_cpus >= 0 for each in seen.series)


def test_a_pass_that_never_began_has_no_series() -> None:
    with Sampler([]) as sampler:
        assert not sampler.begun
    assert sampler.end() is None and not _watchers()


def test_a_pass_that_is_given_up_leaves_no_thread() -> None:
    with pytest.raises(RuntimeError), Sampler([], interval_s=1000) as sampler:
        sampler.begin()
        raise RuntimeError
    for thread in _watchers():
        thread.join(10)
    assert not _watchers()


def test_the_thread_keeps_off_the_runners_cpus_and_the_agent_stays_where_it_was() -> None:
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two cpus")
    busy = {min(mine)}
    with Sampler([], busy, interval_s=1000) as sampler:
        sampler.begin()
        (thread,) = _watchers()
        while os.sched_getaffinity(thread.native_id or 0) == mine:
            time.sleep(0.001)
        assert os.sched_getaffinity(thread.native_id or 0) == mine - busy
        sampler.end()
    assert os.sched_getaffinity(0) == mine


@given(st.integers(0, 3000))
def test_a_long_pass_has_a_bounded_even_series(count: int) -> None:
    points = _Points(0.2)
    at_ms = 0.0
    for _ in range(count):
        at_ms += points.interval_s * 1e3
        points.add(report_pb2.TelemetryPoint(elapsed_ms=at_ms))
    assert len(points.taken) == count if count < MAX_POINTS else MAX_POINTS // 2 <= len(points.taken) < MAX_POINTS
    gaps = {round(after.elapsed_ms - before.elapsed_ms) for before, after in zip(points.taken, points.taken[1:], strict=False)}
    assert gaps <= {round(points.interval_s * 1e3)}


def test_a_point_has_each_clusters_fastest_clock_and_shares_since_the_one_before() -> None:
    earlier = {
        "/proc/stat": "cpu 100 0 0 0 0 0 0 0\n", "/proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n",
    }  # fmt: skip
    facts = {
        "/proc/stat": "cpu 130 0 0 0 0 0 0 0\n", "/proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=51000\n",
        "/proc/loadavg": "1.50 1.00 1.00 2/99 7\n", CLOCK.format(0): "600000", CLOCK.format(1): "900000",
        CLOCK.format(4): "2400000", "/sys/class/thermal/thermal_zone0/temp": "61500",
    }  # fmt: skip
    reported = point(facts, earlier, 400, 200, [[4, 5], [0, 1]])
    assert list(reported.frequency_hz) == [2_400_000_000, 900_000_000]
    assert (reported.temperature_c, reported.load_1m, reported.elapsed_ms) == (61.5, 1.5, 400)
    assert reported.psi_cpu == pytest.approx(0.25) and reported.busy_cpus == pytest.approx(1.5)


def test_a_point_of_a_machine_without_sensors_has_only_its_time() -> None:
    reported = point({}, {}, 200, 0, [[0, 1]])
    assert [field.name for field, _ in reported.ListFields()] == ["elapsed_ms"]
    assert not point({CLOCK.format(0): "600000"}, {}, 200, 0, [[0], [4]]).frequency_hz, "clusters must not change places"


def test_a_sensor_that_hangs_costs_the_readings_and_not_the_run(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    os.mkfifo(zone / "temp")
    sampler = Sampler([], root=tmp_path)
    sampler.begin()
    assert sampler.end(wait_s=0.01) is None
    (thread,) = _watchers()
    while thread.is_alive():  # The sensor answers: a fifo does for each reader that opens it.
        fd = os.open(zone / "temp", os.O_RDWR | os.O_NONBLOCK)
        os.close(fd)
        time.sleep(0.001)
