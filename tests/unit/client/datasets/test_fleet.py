"""Which devices a data set is split over: equal ones, the idle first, and a sentence where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etfarm.client.datasets.devices import choose
from etfarm.client.errors import EtfarmError
from etfarm.client.models import Device, DeviceState

PI = Device(
    "a", "agent", "pi-a", "aarch64", "bcm2712", "linux", 4, 1 << 30, False, (), (), {}, (), DeviceState.IDLE, None, "", None
)  # fmt: skip
PIS = [replace(PI, id=name, name=f"pi-{name}") for name in "abc"]
PHONE = replace(PI, id="0", name="phone", soc="sm8650")


def ids(devices: list[Device]) -> list[str]:
    return [device.id for device in devices]


def test_the_first_devices_that_are_equal_are_chosen() -> None:
    assert ids(choose([PHONE, *PIS], 2)) == ["a", "b"]
    assert ids(choose(PIS, None)) == ["a", "b", "c"]
    assert ids(choose([PHONE, *PIS], 2, mixed=True)) == ["0", "a"]


def test_idle_devices_come_before_busy_ones_and_emulated_ones_last() -> None:
    busy, emulated = replace(PIS[0], state=DeviceState.BUSY), replace(PIS[1], emulated=True)
    assert ids(choose([busy, emulated, PIS[2]], 2)) == ["c", "a"]


def test_devices_that_differ_are_refused_by_name() -> None:
    with pytest.raises(EtfarmError, match=r"phone: aarch64 sm8650; pi-a, pi-b, pi-c: aarch64 bcm2712.*--mixed") as refused:
        choose([PHONE, *PIS], None)
    assert refused.value.reason == "DEVICES_DIFFER"
    with pytest.raises(EtfarmError, match=r"^No 4 of the connected devices are equal"):
        choose([PHONE, *PIS], 4)
    with pytest.raises(EtfarmError, match=r"^No 4 of the connected devices that match 'os=linux' are equal"):
        choose([PHONE, *PIS], 4, "os=linux")


def test_devices_that_are_away_do_not_count() -> None:
    away = replace(PIS[0], state=DeviceState.OFFLINE)
    with pytest.raises(EtfarmError, match=r"'arch=aarch64': 1, and 2 are wanted; pi-a is known and cannot be used now\."):
        choose([away, PIS[1]], 2, "arch=aarch64")
    with pytest.raises(EtfarmError, match=r"^Connected devices: 0, and 1 are wanted"):
        choose([away], None)
