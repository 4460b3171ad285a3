"""Which devices a data set is split over: equal ones, the idle first, and a sentence where there are none."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from etfarm.client.datasets.devices import choose
from etfarm.client.errors import EtfarmError
from etfarm.client.models import Device, DeviceState, Drain
from tests.support.golden import Golden
from tests.support.refusals import refuses

PI = Device(
    id="a",
    agent_id="agent",
    name="pi-a",
    arch="aarch64",
    soc="bcm2712",
    os="linux",
    cores=4,
    memory_bytes=1 << 30,
    state=DeviceState.IDLE,
)
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


@pytest.mark.remedy("DEVICES_DIFFER")
def test_devices_that_differ_are_refused_by_name(golden: Golden) -> None:
    with golden.refuses("DEVICES_DIFFER") as refused:
        choose([PHONE, *PIS], None)
    assert refused.value.reason == "DEVICES_DIFFER"
    with golden.refuses("DEVICES_DIFFER"):
        choose([PHONE, *PIS], 4)
    with golden.refuses("DEVICES_DIFFER"):
        choose([PHONE, *PIS], 4, "os=linux")
    assert len(choose([PHONE, *PIS], 4, mixed=True)) == 4
    assert len(choose([PHONE, *PIS], 3, "arch=aarch64")) == 3


@pytest.mark.remedy("TOO_FEW_DEVICES")
def test_devices_that_are_away_do_not_count(golden: Golden) -> None:
    away = replace(PIS[0], state=DeviceState.OFFLINE)
    with golden.refuses("TOO_FEW_DEVICES"):
        choose([away, PIS[1]], 2, "arch=aarch64")
    with golden.refuses("TOO_FEW_DEVICES"):
        choose([away], None)
    with refuses("TOO_FEW_DEVICES"):
        choose([away, PIS[1]], 2)
    assert ids(choose([away, PIS[1]], 1)) == [PIS[1].id]


def test_a_drained_device_does_not_count_and_its_reason_is_told() -> None:
    drain = Drain(reason="new cable", principal="ann", started_at=datetime(2026, 6, 1, tzinfo=UTC))
    drained = replace(PIS[0], state=DeviceState.DRAINING, drain=drain)
    with pytest.raises(EtfarmError, match="pi-a is drained: new cable"):
        choose([drained], None)
    away = replace(PIS[2], state=DeviceState.OFFLINE)
    with pytest.raises(
        EtfarmError, match="1, but 2 are required; pi-c is known and cannot be used now; pi-a is drained: new cable"
    ):
        choose([drained, PIS[1], away], 2)
