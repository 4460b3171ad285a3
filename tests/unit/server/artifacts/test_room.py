"""Space on the disk: new work is refused before running work lacks space, and accepted again by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.server.artifacts.errors import DiskFull
from etfarm.server.artifacts.room import Room


class Disk:
    def __init__(self) -> None:
        self.free = 1000
        self.room = Room(Path("/"), reserve_bytes=100, work_bytes=200, free=lambda _: self.free)
        self.plain = Room(Path("/"), reserve_bytes=100, free=lambda _: self.free)

    def is_full(self) -> bool:
        return self.room.measure().is_full


@pytest.mark.remedy("DISK_FULL")
def test_new_work_is_refused_below_its_threshold_and_accepted_once_a_quarter_more_is_free() -> None:
    disk = Disk()
    disk.room.require_work()
    states = []
    for free in (200, 199, 200, 249, 250, 200, 199):
        disk.free = free
        states.append(disk.is_full())
    assert states == [False, True, True, True, False, False, True]
    with pytest.raises(DiskFull) as refused:
        disk.room.require_work()
    assert (refused.value.reason, refused.value.kind.value) == ("DISK_FULL", "RESOURCE_EXHAUSTED")
    assert refused.value.metadata == {"free_bytes": "199", "limit_bytes": "200"}
    assert "accepts work again by itself" in refused.value.remedy
    disk.free = 250
    disk.room.require_work()


def test_on_a_full_disk_results_still_fit_and_users_uploads_are_refused() -> None:
    disk = Disk()
    disk.free = 150
    with pytest.raises(DiskFull):
        disk.room.reserve("upload of a user", 1)
    disk.room.reserve("upload of an agent", 50, is_result=True)
    with pytest.raises(DiskFull):
        disk.room.reserve("another one", 1, is_result=True)


def test_without_a_threshold_of_its_own_new_work_needs_the_reserve() -> None:
    disk = Disk()
    disk.free, room = 100, disk.plain
    assert (room.measure().work_bytes, room.measure().is_full) == (100, False)


def test_what_is_announced_counts_once_and_what_is_written_no_more() -> None:
    disk = Disk()
    room = disk.plain
    room.reserve("a", 500)
    with pytest.raises(DiskFull) as refused:
        room.reserve("b", 401)
    assert refused.value.metadata == {"needed_bytes": "401", "free_bytes": "500"}
    room.reserve("b", 400)
    disk.free -= 300
    room.shrink("a", 200)
    with pytest.raises(DiskFull):
        room.reserve("c", 1)
    room.release("b")
    room.reserve("c", 400)


def test_results_use_what_attempts_set_aside_and_others_do_not() -> None:
    room = Disk().plain
    room.reserve_results("attempt", 600)
    with pytest.raises(DiskFull):
        room.reserve("upload", 301)
    room.reserve("result", 301, is_result=True)
    with pytest.raises(DiskFull):
        room.reserve_results("second", 1)
    room.release_results("attempt")
    room.release_results("attempt")
    room.reserve("upload", 301)
