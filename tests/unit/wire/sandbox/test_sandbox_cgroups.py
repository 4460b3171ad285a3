"""Where control groups can be made, on hosts as they are described by /proc, and the settings of a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.wire.sandbox import cgroups
from etfarm.wire.sandbox.cgroups import Group, Place

V1 = """\
31 23 0:28 / {root} rw - tmpfs tmpfs rw,mode=755
35 31 0:32 / {root}/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / {root}/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / {root}/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 23 0:26 {above} {root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def host(tmp_path: Path, groups: str, mounts: str) -> Path:
    """Return a /proc/self of a host whose hierarchies are mounted below `tmp_path`/cgroup."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts.format(root=tmp_path / "cgroup", above="/"))
    return proc


def group(tmp_path: Path, path: str, **files: str) -> Path:
    """Return an existing group, with files by name; a dot in a name is written as two underscores."""
    folder = tmp_path / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ({"cgroup__procs": ""} | files).items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_1_is_used_where_its_controllers_are(tmp_path: Path) -> None:
    memory, pids = group(tmp_path, "memory/box/one"), group(tmp_path, "pids")
    proc = host(tmp_path, "8:pids:/\n4:memory:/box/one\n1:cpu,cpuacct:/\n0::/\n", V1)
    assert cgroups.find_place(proc) == Place(1, str(memory), str(pids))


def test_one_controller_of_version_1_is_better_than_none(tmp_path: Path) -> None:
    pids = group(tmp_path, "pids")
    assert cgroups.find_place(host(tmp_path, "8:pids:/\n4:memory:/box\n0::/\n", V1)) == Place(1, None, str(pids))


def test_a_sibling_is_made_where_the_parent_shares_its_controllers_out(tmp_path: Path) -> None:
    slice_ = group(tmp_path, "system.slice", cgroup__subtree_control="cpu memory pids\n")
    group(tmp_path, "system.slice/etfarm.service", cgroup__subtree_control="\n", cgroup__controllers="cpu memory pids\n")
    proc = host(tmp_path, "0::/system.slice/etfarm.service\n", V2)
    assert cgroups.find_place(proc) == Place(2, str(slice_), str(slice_))


def test_a_group_that_is_delegated_is_divided(tmp_path: Path) -> None:
    own = group(tmp_path, "app.slice/etfarm.service", cgroup__subtree_control="\n", cgroup__controllers="memory pids\n")
    group(tmp_path, "app.slice", cgroup__subtree_control="cpu\n")
    place = cgroups.find_place(host(tmp_path, "0::/app.slice/etfarm.service\n", V2))
    assert place is not None
    assert (place.version, place.memory, place.pids) == (2, str(own), str(own))
    assert place.leaf is not None
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (Path(place.leaf) / "cgroup.procs").read_text() == "0"  # the kernel's word for the writer


@pytest.mark.parametrize("groups", ["0::/\n", "0::/../elsewhere\n", "", "3:cpu:/\n"])
def test_a_host_without_a_writable_group_has_none(tmp_path: Path, groups: str) -> None:
    (tmp_path / "cgroup").mkdir()
    assert cgroups.find_place(host(tmp_path, groups, V2)) is None


def test_a_group_of_version_2_limits_the_tree_and_dies_as_one(tmp_path: Path) -> None:
    parent = group(tmp_path, "farm", cgroup__subtree_control="memory pids")
    created = Group(Place(2, str(parent), str(parent)), "etfarm-x", "job-1", memory_bytes=1 << 30, processes=64)
    folder = parent / "etfarm-x" / "job-1"
    assert created.folders == [folder]
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+memory +pids"
    limits = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")}
    assert limits == {"memory.max": str(1 << 30), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "64"}
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\n")
    (folder / "pids.events").write_text("max 5\n")
    assert (created.oom_kills(), created.refused_forks()) == (3, 5)


def test_a_real_group_of_this_host_is_made_and_removed() -> None:
    place = cgroups.find_place()
    if place is None:
        return
    created = Group(place, "etfarm-test-real", "job", memory_bytes=64 << 20, processes=8)
    assert all(folder.is_dir() for folder in created.folders)
    assert (created.oom_kills(), created.refused_forks()) == (0, 0)
    created.remove()
    assert not any(folder.exists() or folder.parent.exists() for folder in created.folders)
