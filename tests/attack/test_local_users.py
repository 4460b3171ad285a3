"""What other users of the server's machine can do with what etfarm writes: nothing, also where an older version left it open."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.server.artifacts.blobs import place_of
from etfarm.server.backup.backup import back_up
from etfarm.server.state.databases import create_database
from etfarm.wire import digest as digests
from etfarm.wire.private import FolderNotPrivate, make_private
from tests.support.farm import Daemon

pytestmark = pytest.mark.slow(reason="starts a server for each kind of folder")

OTHER = 4712
"""A user of this machine who has nothing to do with the farm."""
BYTES = b"the weights of a project"
UNPRIVILEGED = [
    sys.executable, "-c",
    "import os, sys; from tests.support.unprivileged import become_unprivileged; become_unprivileged(); "
    "os.execv(sys.argv[1], sys.argv[1:])",
]  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user of the machine may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="etfarm-local-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["root", "unprivileged"])
def within(request: pytest.FixtureRequest) -> list[str]:
    """How to start a process as root, and as an ordinary user."""
    return UNPRIVILEGED if request.param == "unprivileged" else []


async def create_farm(data: Path) -> Path:
    """Create the data folder of a farm as servers before this rule left it: open. Return an artifact's file."""
    blob = place_of(data / "artifacts" / "blobs", digests.of_bytes(BYTES))
    blob.parent.mkdir(parents=True)
    blob.write_bytes(BYTES)
    database = create_database(data / "farm.sqlite")
    await database.open()
    database.close()
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return blob


def try_as_other(*command: str, folder: Path = Path("/")) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=folder, user=OTHER, group=OTHER, extra_groups=[], capture_output=True, check=False)


@contextmanager
def standing_inside(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let another user's process have a folder as its working folder; what it gets on stdin it runs as a shell."""
    with subprocess.Popen(
        ["sh"], cwd=folder, user=OTHER, group=OTHER, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as shell:  # fmt: skip
        yield shell


@contextmanager
def serving(data: Path, within: list[str], *arguments: str) -> Iterator[Daemon]:
    options = ["--listen", "127.0.0.1:0", "--no-bundle", "--no-prewarm", "--exit-with-stdin", *arguments]
    with Daemon(["serve", "--data", str(data), *options], data.parent / "log", within=within, executes=True) as daemon:
        daemon.expect("listening on")
        yield daemon


def open_files(data: Path) -> list[Path]:
    """Return what others may read or change by its own mode, apart from artifacts, which only closed folders protect."""
    paths = [data, *(path for path in data.rglob("*") if not path.is_symlink())]
    return [path for path in paths if path.stat().st_mode & 0o077 and path.stat().st_mode & 0o222]


async def test_a_server_closes_a_folder_that_was_open_also_to_those_who_are_inside(place: Path, within: list[str]) -> None:
    data = place / "data"
    blob = await create_farm(data)
    assert try_as_other("cat", str(blob)).stdout == BYTES  # the attack works before
    with standing_inside(blob.parent.parent) as shell, serving(data, within):
        (place / "log").chmod(0o600)
        for path in (data / "farm.sqlite", data / "farm.sqlite-wal", data / "server.lock", blob):
            assert b"Permission denied" in try_as_other("cat", str(path)).stderr
        assert b"Permission denied" in try_as_other("ls", str(data)).stderr
        output, _ = shell.communicate(f"cat {blob.parent.name}/{blob.name}; ls {blob.parent.name}".encode())
        assert BYTES not in output and output.count(b"Permission denied") == 2
    assert open_files(data) == [blob]  # below folders that nobody else may enter
    assert not any(path.stat().st_mode & 0o077 for path in (data, blob.parent, blob.parent.parent, data / "farm.sqlite"))


def test_what_a_server_creates_is_for_its_user_alone(place: Path, within: list[str]) -> None:
    data = place / "data"
    before = os.umask(0)
    try:
        with serving(data, within, "--address-file", str(data.parent / "address")):
            assert (place / "address").stat().st_mode & 0o777 == 0o600
            assert open_files(data) == []
    finally:
        os.umask(before)


def test_a_folder_of_another_user_is_refused_and_the_remedy_works(place: Path, within: list[str]) -> None:
    data = place / "data"
    data.mkdir()
    os.chown(data, OTHER, OTHER)
    with pytest.raises(AssertionError, match="it ended before"), serving(data, within):
        pass
    message = (place / "log").read_text()
    assert f"{data} belongs to user " in message and message.count("\n") == 1
    assert list(data.iterdir()) == []
    assert f"chown -R {4711 if within else 0} {data}" in message
    os.chown(data, 0, 0)  # the same user, as seen from outside of its namespace
    with serving(data, within):
        pass


def test_a_file_that_another_user_has_put_into_the_folder_is_refused(place: Path) -> None:
    data = place / "data"
    data.mkdir()
    planted = data / "farm.sqlite"
    planted.touch()
    os.chown(planted, OTHER, OTHER)
    with pytest.raises(FolderNotPrivate, match=f"{planted} belongs to user {OTHER}"):
        make_private(data)


async def test_a_link_is_followed_where_it_is_ours_and_refused_else(place: Path) -> None:
    elsewhere, data, foreign = place / "disk", place / "data", place / "foreign"
    blob = await create_farm(elsewhere)
    data.symlink_to(elsewhere)
    foreign.symlink_to(elsewhere)
    os.chown(foreign, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(FolderNotPrivate, match=f"{foreign} belongs to user {OTHER}"):
        make_private(foreign)
    assert try_as_other("cat", str(blob)).stdout == BYTES
    make_private(data)
    assert try_as_other("cat", str(blob)).returncode != 0


async def test_links_and_devices_below_an_open_folder_are_left_alone(place: Path) -> None:
    data, outside = place / "data", place / "outside"
    await create_farm(data)
    outside.mkdir()
    (outside / "file").write_text("")
    for path in (outside, outside / "file"):
        path.chmod(0o755)
    (data / "to-folder").symlink_to(outside)
    (data / "artifacts" / "to-file").symlink_to(outside / "file")
    os.mkfifo(data / "fifo", 0o666)
    make_private(data)
    assert {path.stat().st_mode & 0o777 for path in (outside, outside / "file")} == {0o755}


async def test_a_closed_folder_is_not_walked(place: Path) -> None:
    data = place / "data"
    blob = await create_farm(data)
    data.chmod(0o700)
    make_private(data)
    assert blob.parent.stat().st_mode & 0o777 == 0o755  # unreachable: its own entries only were looked at
    assert (data / "farm.sqlite").stat().st_mode & 0o777 == 0o600


async def test_the_shared_folder_of_artifacts_follows_the_same_rule(place: Path) -> None:
    data, shared = place / "data", place / "shared"
    blob = await create_farm(shared)
    data.mkdir(mode=0o700)
    (data / "artifacts").symlink_to(shared / "artifacts")
    (shared / "farm.sqlite").rename(data / "farm.sqlite")
    with serving(data, []):
        assert try_as_other("cat", str(blob)).returncode != 0
    os.chown(shared / "artifacts", OTHER, OTHER)
    with pytest.raises(AssertionError, match="it ended before"), serving(data, []):
        pass
    assert f"{data / 'artifacts'} belongs to user {OTHER}" in (place / "log").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--listen", "127.0.0.1:0", "--data"],
        ["agent", "--server", "127.0.0.1:1", "--data"],
        ["tokens", "init", "ann", "--data"],
        ["backup", "elsewhere", "--data"],
        ["up", "--no-web"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_ends_alike_for_a_folder_of_another_user(place: Path, command: list[str]) -> None:
    data = place / "farm"
    data.mkdir()
    os.chown(data, OTHER, OTHER)
    words = [*command, str(data)] if command[-1] == "--data" else command
    environment = os.environ | {"ETFARM_DATA": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", *words],
        check=False, cwd=place, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and f"{data} belongs to user {OTHER}" in done.stderr, done
    assert list(data.iterdir()) == []


async def test_a_check_names_an_open_folder_and_fails_for_a_foreign_one(place: Path) -> None:
    data = place / "data"
    await create_farm(data)

    def check() -> tuple[int, str]:
        command = [sys.executable, "-m", "etfarm.wire.command", "serve", "--check", "--data", str(data)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, output = check()
    assert code == 0 and f"warning: Other users may enter {data} (mode 0755)." in output
    assert data.stat().st_mode & 0o777 == 0o755  # a check changes nothing
    os.chown(data, OTHER, OTHER)
    code, output = check()
    assert code == 1 and f"problem: {data} belongs to user {OTHER}" in output


async def test_a_backup_and_an_agents_folder_are_closed(place: Path) -> None:
    data, backup, agent = place / "data", place / "backup", place / "agent"
    await create_farm(data)
    for folder in (backup, agent, agent / "cache"):
        folder.mkdir()
        folder.chmod(0o755)
    DataFolder(agent).close()
    assert not any(path.stat().st_mode & 0o077 for path in (agent, agent / "cache"))
    os.chown(backup, OTHER, OTHER)
    with pytest.raises(FolderNotPrivate):
        await asyncio.to_thread(back_up, data, backup)
    os.chown(backup, 0, 0)
    await asyncio.to_thread(back_up, data, backup)
    assert open_files(backup) == []
    os.chown(agent, OTHER, OTHER)
    with pytest.raises(FolderNotPrivate):
        DataFolder(agent)
