"""The cpus of a device, and whether threads have one each."""

from __future__ import annotations

import pytest

from etfarm.v1.device_pb2 import Cluster, Device
from etfarm.wire.cores import TooManyThreads, count_cpus, describe_cpus, has_cpus, require_cpus

BOARD = Device(name="board", cores=6, clusters=[Cluster(cpus=[4, 5]), Cluster(cpus=[0, 1, 2, 3])])


@pytest.mark.parametrize(
    ("device", "cores", "count"),
    [
        (BOARD, "", 6),
        (BOARD, "big", 2),
        (BOARD, "little", 4),
        (BOARD, "0,5", 2),
        (BOARD, "9", None),
        (Device(name="old", cores=4), "", 4),
        (Device(name="old", cores=4), "big", None),
        (Device(name="unknown"), "", None),
        (Device(name="partly", cores=8, clusters=[Cluster(cpus=[0, 1])]), "", 8),
    ],
)
def test_the_cpus_for_threads_are_counted_as_far_as_they_are_known(device: Device, cores: str, count: int | None) -> None:
    assert count_cpus(device, cores) == count
    assert has_cpus(device, count or 1000, cores)
    assert has_cpus(device, (count or 1000) + 1, cores) is (count is None)


@pytest.mark.parametrize("threads", [0, 1])
def test_one_thread_or_the_default_fits_every_device(threads: int) -> None:
    assert has_cpus(Device(name="tiny", cores=1), threads)


def test_an_error_names_some_devices_of_many() -> None:
    many = [Device(name=f"d{number:02}", cores=2) for number in range(40)]
    assert describe_cpus(many).endswith("d09 has 2, and 30 more")
    with pytest.raises(TooManyThreads) as refused:
        require_cpus(many, 3)
    assert "d09 has 2" in refused.value.message and "d10" not in refused.value.message
    assert refused.value.metadata["devices"].count(",") == 9
    require_cpus([], 3)
    require_cpus([*many, BOARD], 6)
