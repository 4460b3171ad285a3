"""Attacks from inside a compile child, through real workers; each must fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from etfarm.server.workers import output_files, pool
from etfarm.server.workers.errors import BadWorkerAnswer, ChildDied, ChildOutOfMemory
from etfarm.server.workers.jail.measures import NAMES
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire.sandbox import cgroups
from tests.support import attack_tasks
from tests.support.farm import descendants, wait_until
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="starts workers for each kind of user")

ROOT = Path(__file__).resolve().parents[2]
TASKS = "tests.support.attack_tasks"
LIMITS = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1, processes=64)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module", params=["root", "an ordinary user"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Return the outcome of every attack in a child, for a server with and without root."""
    # A blank and letters beyond ASCII: paths are the installation's to choose.
    folder = tmp_path_factory.mktemp("Gerät vier")
    modules = ["tests.support.attacked"] if request.param == "root" else ["tests.support.unprivileged", "tests.support.attacked"]
    command = [sys.executable, "-m", *modules, str(folder / "ünder attack")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(attack_tasks.ATTACKS))
def test_an_attack_is_refused(outcomes: dict[str, object], name: str) -> None:
    assert str(outcomes[name]).startswith("refused: "), outcomes[name]


def test_every_measure_is_active_and_the_host_is_unharmed(outcomes: dict[str, object]) -> None:
    assert outcomes["measures"] == dict.fromkeys(NAMES, True)
    assert outcomes["victim lives"] is True


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    running = Workers(preload=[TASKS], limits=LIMITS, folder=tmp_path / "jobs", concurrency=2)
    running.start()
    yield running
    await running.stop()


@pytest.fixture(params=["control groups", "no control groups"])
async def limited(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    """Workers with what this host has for limits on trees, and as on a host that has nothing."""
    if request.param == "no control groups":
        monkeypatch.setattr(pool, "find_cgroup_place", lambda: None)
    running = Workers(preload=[TASKS], limits=LIMITS, folder=tmp_path / "jobs", concurrency=2)
    running.start()
    yield running
    await running.stop()


async def nothing_is_left(workers: Workers) -> None:
    """Require that no process of a child remains and that the next child works."""
    assert workers.forkserver_pid is not None
    forkserver_pid = workers.forkserver_pid
    assert await asyncio.to_thread(wait_until, lambda: not descendants(forkserver_pid)), "a supervisor lives"
    assert (await workers.describe_jail()).measures


@pytest.mark.remedy("CHILD_TOO_MANY_PROCESSES")
async def test_a_fork_bomb_ends_as_an_error_of_its_job(limited: Workers) -> None:
    with refuses("CHILD_TOO_MANY_PROCESSES", match="64 processes"):
        await limited.run(f"{TASKS}:fork_a_lot", None, deadline_s=120)
    async with await limited.run(f"{TASKS}:fork_a_lot", 2, deadline_s=120) as finished:  # with fewer threads
        assert finished.result == b"2 forks"
    await nothing_is_left(limited)


async def test_many_processes_share_one_limit_of_memory(limited: Workers) -> None:
    with pytest.raises(ChildOutOfMemory, match="256 MiB"):
        await limited.run(f"{TASKS}:eat_in_many_processes", 200, deadline_s=120)
    await nothing_is_left(limited)


async def test_shared_memory_counts_against_the_limit(limited: Workers) -> None:
    with pytest.raises(ChildOutOfMemory):
        await limited.run(f"{TASKS}:eat_shared_memory", 1024, deadline_s=120)
    await nothing_is_left(limited)


async def test_a_fork_bomb_that_hides_its_error_ends_as_what_the_host_can_count(limited: Workers) -> None:
    """Only a control group counts the forks that it refuses; without one, the bomb is a crash, in no more processes."""
    measure = (await limited.describe_jail()).measures[NAMES.index("process limit")]
    with refuses("CHILD_TOO_MANY_PROCESSES" if measure.detail.startswith("control group") else ChildDied.reason):
        await limited.run(f"{TASKS}:fork_a_lot_and_swallow_it", None, deadline_s=120)
    await nothing_is_left(limited)


async def test_a_child_is_killed_before_it_fills_the_disk(tmp_path: Path) -> None:
    # No disk has so much room: for a child it is as if it had filled it.
    limits = replace(LIMITS, reserve_bytes=1 << 60)
    running = Workers(preload=[TASKS], limits=limits, folder=tmp_path / "jobs", concurrency=1)
    running.start()
    try:
        with refuses("DISK_FULL"):
            await running.run(f"{TASKS}:wait_for_ever", None, deadline_s=120)
    finally:
        await running.stop()


async def test_only_real_files_of_its_own_leave_a_childs_folder(workers: Workers, tmp_path: Path) -> None:
    """The daemon moves files into the store: never what a link leads to, never what would make it wait."""
    (tmp_path / "secret").write_text("s3cret")
    no_files = [
        "symlink",
        "hardlink",
        "first",
        "fifo",
        "folder",
        "absent",
        "",
        ".",
        "..",
        "../home",
        "/etc/passwd",
        "x" * 300,
        "\0",
    ]
    async with await workers.run(f"{TASKS}:leave_traps", {"secret": str(tmp_path / "secret")}, deadline_s=60) as finished:
        for name in no_files:
            with pytest.raises(BadWorkerAnswer) as caught:
                output_files.claim(finished.folder, name)
            assert str(finished.folder) not in str(caught.value)
        assert (finished.folder / "good").stat().st_uid != os.geteuid()
        claimed = output_files.claim(finished.folder, "good").stat()
        assert (claimed.st_uid, claimed.st_gid, stat.S_IMODE(claimed.st_mode)) == (os.geteuid(), os.getegid(), 0o644)
    assert not finished.folder.exists()


async def test_a_folder_deeper_than_any_path_is_deleted(workers: Workers) -> None:
    async with await workers.run(f"{TASKS}:leave_a_nest", 1100, deadline_s=120) as finished:
        pass
    assert not finished.folder.exists()


async def test_a_finished_child_leaves_no_control_group(workers: Workers) -> None:
    await workers.describe_jail()
    assert not groups_of(workers)


def test_children_and_groups_of_a_killed_daemon_are_removed(tmp_path: Path) -> None:
    """Its forkserver's supervisors end the children and remove their groups; nothing else has to."""
    place = cgroups.find_place()
    command = [sys.executable, "-m", "tests.support.daemon", str(tmp_path / "jobs"), TASKS]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert daemon.stdout is not None
    daemon.stdout.readline()
    assert daemon.stdout.readline() == b"lingers\n"
    later = Workers(preload=[TASKS], limits=LIMITS, folder=tmp_path / "jobs", concurrency=1)
    assert place is None or groups_of(later)
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon.stdout.close()
    assert wait_until(lambda: not groups_of(later))


def test_leftover_control_groups_are_removed_at_the_next_start(tmp_path: Path) -> None:
    place = cgroups.find_place()
    if place is None:
        return
    family = f"etfarm-test-{os.getpid()}"
    group = cgroups.Group(place, family, "left", memory_bytes=64 << 20, processes=8)
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=group.join)
    cgroups.remove_family(place, family)
    assert sleeper.wait(60) == -signal.SIGKILL
    assert not [folder for folder in group.folders if folder.exists() or folder.parent.exists()]


def groups_of(workers: Workers) -> list[Path]:
    place = cgroups.find_place()
    roots = [] if place is None else [root for root in (place.memory, place.pids) if root is not None]
    return [Path(root) / workers._family for root in roots if (Path(root) / workers._family).exists()]


async def test_a_child_can_read_its_input_and_no_neighbouring_file(workers: Workers, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).write_text(name)
    seen = await asyncio.gather(*(read(workers, tmp_path / name, tmp_path / "mine") for name in ("mine", "other")))
    assert seen == ["mine", "FileNotFoundError"]


async def read(workers: Workers, path: Path, file: Path) -> str:
    """Return what a child can read at `path` when its request names `file`."""
    async with await workers.run(
        f"{TASKS}:read_text", {"path": str(path), "files": [{"one": (file,)}]}, deadline_s=60
    ) as finished:
        return finished.result.decode()
