"""The inventory's parser, on this machine's own facts and on values that hold for any."""

from __future__ import annotations

import os

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etfarm.device_agents.device.inventory import (
    choose_cpus,
    choose_threads,
    collect,
    format_cpu_list,
    parse,
    parse_cpu_list,
)
from etfarm.v1 import device_pb2
from etfarm.wire.cores import CoresUnknown
from tests.support import dumps

CPUS = st.frozensets(st.integers(0, 300), min_size=1)


@pytest.fixture(scope="module")
def facts() -> dict[str, str]:
    """What this machine says of itself."""
    return collect()


def test_this_machine_is_described_as_other_sources_describe_it(facts: dict[str, str]) -> None:
    device = parse(facts)
    allowed = os.sched_getaffinity(0)
    assert device.arch == os.uname().machine
    assert device.cores == len(allowed)
    assert device.memory_bytes == psutil.virtual_memory().total
    assert device.page_size_bytes == os.sysconf("SC_PAGESIZE")
    assert os.uname().release in device.os and device.soc
    assert sorted(cpu for cluster in device.clusters for cpu in cluster.cpus) == sorted(allowed)
    if len(allowed) == os.cpu_count():
        # Some virtual machines do not tell.
        known = psutil.cpu_count(logical=False)
        assert known is None or sum(cluster.physical_cores for cluster in device.clusters) == known


def test_features_are_those_that_the_kernel_lists(facts: dict[str, str]) -> None:
    words = set(facts["/proc/cpuinfo"].split())
    features = set(parse(facts).features)
    for name in ("avx2", "avx512f", "fma", "i8mm", "sve", "sve2", "sme"):
        assert (name in features) == (name in words)
    assert ("dotprod" in features) == ("asimddp" in words)
    assert ("vnni" in features) == bool(words & {"avx512_vnni", "avx_vnni"})


def test_a_feature_that_one_cpu_lacks_is_not_a_feature_of_the_device() -> None:
    facts = dumps.load("xeon-offline")
    stanzas = facts["/proc/cpuinfo"].strip().split("\n\n")
    features = list(parse(facts).features)
    assert "processor\t: 20\n" in stanzas[20] and "avx2" in features
    stanzas[20] = stanzas[20].replace(" avx2 ", " ")  # of the last one that is switched on
    less = {**facts, "/proc/cpuinfo": "\n\n".join(stanzas)}
    assert list(parse(less).features) == [name for name in features if name != "avx2"]


def test_a_restriction_narrows_what_is_offered(facts: dict[str, str]) -> None:
    first = min(os.sched_getaffinity(0))
    device = parse(facts, cores={first})
    assert device.cores == 1
    assert [list(cluster.cpus) for cluster in device.clusters] == [[first]]
    assert parse(facts, cores={4096}).cores == 0


def test_fields_without_a_fact_are_unset() -> None:
    device = parse({})
    assert device == device_pb2.Device()
    assert not device.HasField("page_size_bytes")


@example({"/proc/cpuinfo": "processor: ²\ncpu part: ²", "/proc/meminfo": "MemTotal: ² kB", "getconf PAGESIZE": "²"})
@example({"getconf PAGESIZE": str(2**63), "/proc/meminfo": f"MemTotal: {2**63} kB"})
@given(st.dictionaries(st.sampled_from(sorted(collect())), st.text(max_size=200)))
def test_odd_facts_never_break_the_parser(facts: dict[str, str]) -> None:
    # Cpus_allowed_list is the kernel's own and always well-formed.
    facts.pop("/proc/self/status", None)
    device = parse(facts)
    assert device.cores >= 0 and device.memory_bytes >= 0


@given(CPUS)
def test_a_cpu_list_says_which_cpus(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "1-2-3", "99999999"])
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


def device(*clusters: tuple[list[int], int]) -> device_pb2.Device:
    """Return a device of (cpus, physical cores), fastest first."""
    created = [device_pb2.Cluster(cpus=cpus, physical_cores=cores) for cpus, cores in clusters]
    return device_pb2.Device(name="board", clusters=created)


BIG_LITTLE = device(([4, 5, 6, 7], 4), ([0, 1, 2, 3], 4))
TWO_THREADS_A_CORE = device(([0, 1, 2, 3], 2))


@pytest.mark.parametrize(
    ("wanted", "restricted", "cpus"),
    [
        ("", False, None),
        ("", True, set(range(8))),
        ("big", False, {4, 5, 6, 7}),
        ("little", False, {0, 1, 2, 3}),
        ("2-5", False, {2, 3, 4, 5}),
    ],
)
def test_cores_are_chosen_by_name_or_number(wanted: str, restricted: bool, cpus: set[int] | None) -> None:
    assert choose_cpus(BIG_LITTLE, wanted, restricted) == cpus


@pytest.mark.remedy("CORES_UNKNOWN")
@pytest.mark.parametrize("wanted", ["8", "0-8", "medium", "4;5"])
def test_cores_that_the_device_lacks_are_refused(wanted: str) -> None:
    with pytest.raises(CoresUnknown) as refused:
        choose_cpus(BIG_LITTLE, wanted, False)
    assert refused.value.metadata["allowed"] == "0-7"
    assert choose_cpus(BIG_LITTLE, "0-3", False) and choose_cpus(BIG_LITTLE, "big", False)


def test_threads_are_the_physical_cores_of_the_fastest_cluster() -> None:
    assert choose_threads(BIG_LITTLE, None) == 4
    assert choose_threads(BIG_LITTLE, frozenset({0, 1})) == 2
    assert choose_threads(BIG_LITTLE, frozenset({0, 1, 2, 7})) == 1
    assert choose_threads(TWO_THREADS_A_CORE, None) == 2
    assert choose_threads(TWO_THREADS_A_CORE, frozenset({0})) == 1
    assert choose_threads(device_pb2.Device(), None) == 1
