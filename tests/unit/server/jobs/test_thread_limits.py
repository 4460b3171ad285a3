"""Jobs with more threads than devices have cpus."""

from __future__ import annotations

import pytest

from etfarm.v1.device_pb2 import Cluster, Device, DeviceState
from etfarm.v1.job_pb2 import DeviceChoice, JobSpec, Measurement
from etfarm.wire.cores import TooManyThreads
from tests.support.golden import Golden
from tests.support.submissions import PI, World, world

__all__ = ["world"]


def board(name: str, *cpus: int) -> Device:
    """Return a device with a cluster of cpus."""
    return Device(id=name, name=name, state=DeviceState.DEVICE_STATE_IDLE, cores=len(cpus), clusters=[Cluster(cpus=cpus)])


async def with_threads(world: World, threads: int, selector: str, cores: str = "", *, all_: bool = False) -> JobSpec:
    """Return a job with a number of threads on some devices."""
    choice = DeviceChoice(selector=selector, all=all_)
    return JobSpec(candidates=[await world.model()], devices=[choice], threads=[1, threads], measurement=Measurement(cores=cores))


@pytest.mark.parametrize(
    ("threads", "selector", "cores"),
    [(3, "name=two", ""), (9, "id!=pi", ""), (2, "name=two", "1"), (3, "id!=pi", "0,1"), (2000, "name=four", "")],
)
async def test_more_threads_than_any_matching_device_has_cpus_are_refused(
    golden: Golden, world: World, threads: int, selector: str, cores: str
) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3), PI]
    with golden.refuses("TOO_MANY_THREADS") as refused:
        await world.make(await with_threads(world, threads, selector, cores))
    assert refused.value.metadata["threads"] == str(threads)


@pytest.mark.parametrize(
    ("threads", "selector", "cores"), [(2, "name=two", ""), (4, "id!=pi", ""), (2, "", "0-1"), (64, "id=pi", "")]
)
async def test_threads_that_one_matching_device_has_cpus_for_are_accepted(
    world: World, threads: int, selector: str, cores: str
) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3), PI]  # the cpus of the last one are not known
    assert len((await world.make(await with_threads(world, threads, selector, cores))).cells) == 2


async def test_all_devices_are_accepted_if_one_has_enough_cpus(world: World) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3)]
    assert len((await world.make(await with_threads(world, 4, "", all_=True))).cells) == 4
    with pytest.raises(TooManyThreads):
        await world.make(await with_threads(world, 5, "", all_=True))


async def test_the_most_threads_of_several_counts_are_what_a_device_needs_cpus_for(world: World) -> None:
    world.devices = [board("two", 0, 1)]
    spec = await with_threads(world, 3, "name=two")
    spec.threads.extend([5, 4])
    with pytest.raises(TooManyThreads) as refused:
        await world.make(spec)
    assert (refused.value.metadata["threads"], refused.value.metadata["cpus"]) == ("5", "2")
