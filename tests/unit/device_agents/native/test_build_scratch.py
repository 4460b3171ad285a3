"""What builds of the runner leave on the disk: nothing, however they end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.device_agents.native.build import scratch_folder

HOLD = """
import sys
from pathlib import Path
from etfarm.device_agents.native.build import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "object.o").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of a build in the test's folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def theirs(builder: subprocess.Popen[str]) -> Path:
    assert builder.stdout is not None
    return Path(builder.stdout.readline().strip())


def test_a_folder_is_gone_with_its_build_whether_it_fails_or_not(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "new") as folder:
        (folder / "sub").mkdir()
    with pytest.raises(ZeroDivisionError), scratch_folder(tmp_path / "new"):
        raise ZeroDivisionError
    assert list((tmp_path / "new").iterdir()) == []


def test_the_next_build_sweeps_what_a_killed_one_left(tmp_path: Path, builder: subprocess.Popen[str]) -> None:
    left = theirs(builder)
    builder.kill()
    builder.wait()
    assert left.exists()
    with scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_build_that_lives_keeps_its_folder(tmp_path: Path, builder: subprocess.Popen[str]) -> None:
    other = theirs(builder)
    with scratch_folder(tmp_path) as folder:
        assert {folder, other} == set(tmp_path.iterdir())
        assert (other / "object.o").exists()
    builder.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_ends_with_its_stdin_leaves_nothing(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler: apt-get install g++")
    command = [sys.executable, "-m", "etfarm.wire.command", "bundle", "build", "--exit-with-stdin", "-o", "out.tar.gz"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None and process.stdin is not None
        assert "compiling" in process.stderr.readline()
        while not list(tmp_path.glob(".etfarm-bundle-*/objects/*")):  # compilers are at work
            assert process.poll() is None
            time.sleep(0.01)
        process.stdin.close()
        assert process.wait(120) != 0
    assert list(tmp_path.iterdir()) == []
