"""etfarm 0.1.0 and 0.2.0 from this repository's history, and data folders that they wrote.

The tree of a commit is extracted beside the other things that tests keep in the user's cache, and runs with the installed
packages of this environment: PYTHONPATH puts its code before the current one. The data folders are made once for the commit and
the jobs below, which takes about two minutes for 0.1.0.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.farm import EXPORTING, WAIT_FOR_NOTHING, Daemon, wait_until
from tests.support.forks import exporting
from tests.support.programs import cache_folder


class Release(NamedTuple):
    """A release, by its commit."""

    version: str
    commit: str


RELEASE_0_1: Final = Release("0.1.0", "9431c99")
RELEASE_0_2: Final = Release("0.2.0", "4a2fce5")
_ROOT: Final = Path(__file__).parents[2]
_PACKAGES: Final = ("proto", "server", "client", "device_agents")

_BENCH: Final = ("bench", "demo:ds_cnn", "--warmup", "2", "--iterations", "40", "--min-time", "0")
JOBS: Final[dict[str, tuple[str, ...]]] = {
    "measured": (*_BENCH, "--recipe", "xnnpack_fp32", "--recipe", "portable", "--numerics", "--name", "measured"),
    "again": (*_BENCH, "--recipe", "xnnpack_fp32"),
    "interleaved": (*_BENCH, "--recipe", "xnnpack_fp32", "--recipe", "portable", "--interleave"),
    "compiled": ("compile", "demo:ds_cnn", "--recipe", "portable", "-o", "ds_cnn.pte"),
    "failed": ("bench", "broken.pte", "--iterations", "5", "--min-time", "0"),
}
"""The commands that make the data folder's jobs. The last one fails."""

_LIVE: Final = ("bench", "demo:ds_cnn", "--recipe", "xnnpack_fp32", "--min-time", "60", "--detach")
"""A job that still runs when the server is killed."""

_LOST: Final = "BOARD_ON_FIRE"
"""The reason of the error in the result that the agent keeps for that job."""

_PUT_RESULT: Final = f"""
import asyncio, sys
from pathlib import Path
from etfarm.device_agents.agent import Results
from etfarm.v1 import agent_pb2, common_pb2
result = agent_pb2.RunResult(attempt_id=sys.argv[2], device_id=sys.argv[3])
candidate = result.candidates.add(cell_id=sys.argv[4])
candidate.runner.kind, candidate.runner.executorch = "native", "1.5.1"
candidate.phases.add(actor="DEVICE", phase="LOAD", start_ms=1, duration_ms=2)
candidate.error.MergeFrom(common_pb2.Error(fault=common_pb2.FAULT_USER, reason="{_LOST}", message="It burns."))
asyncio.run(Results(Path(sys.argv[1])).put(result))
"""
"""Code of 0.1.0 that leaves a result in an agent's data folder as if no server had acknowledged it."""


def is_available(release: Release = RELEASE_0_1) -> bool:
    """Whether this checkout has the commit; a shallow clone has not."""
    result = subprocess.run(
        ["git", "cat-file", "-e", f"{release.commit}^{{commit}}"], cwd=_ROOT, capture_output=True, check=False
    )
    return result.returncode == 0


def tree(release: Release = RELEASE_0_1) -> Path:
    """The files of a release, extracted on first use."""
    folder = cache_folder() / f"etfarm-{release.version}-{release.commit}"
    with _alone("old-release.lock"):
        if not folder.exists():
            archive = subprocess.run(
                ["git", "archive", release.commit, *_PACKAGES, "pyproject.toml"], cwd=_ROOT, capture_output=True, check=True
            )
            part = Path(tempfile.mkdtemp(dir=cache_folder()))
            subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
            _describe(part, release)
            for package in _PACKAGES:
                _close(part / package / "etfarm")
            part.rename(folder)
    return folder


def _close(folder: Path) -> None:
    """Make every folder a package of its own, which the current one of the same name cannot extend or replace."""
    for path in folder.rglob("*.py"):
        for inner in path.relative_to(folder).parents[:-1]:
            (folder / inner / "__init__.py").touch()


def _describe(folder: Path, release: Release) -> None:
    """Write the package's metadata, which name its version and its commands as an installation would."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / "proto" / f"etfarm-{release.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: etfarm\nVersion: {project['version']}\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["etfarm.commands"].items()]
    (about / "entry_points.txt").write_text("\n".join(["[etfarm.commands]", *lines, ""]))


def environment(release: Release = RELEASE_0_1) -> dict[str, str]:
    """The variables with which this Python runs a release."""
    return {"PYTHONPATH": os.pathsep.join(str(tree(release) / package) for package in _PACKAGES)}


def run(*arguments: str, cwd: Path, returncodes: Sequence[int] = (0,), release: Release = RELEASE_0_1) -> str:
    """Run one command of a release; return its stdout."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ETFARM_")}
    variables = {**clean, **environment(release), "COLUMNS": "140"}
    if arguments[0] in EXPORTING:
        done = exporting.run(arguments, cwd, variables, 600.0)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "etfarm.wire.command", *arguments],
            cwd=cwd, env=variables, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode in returncodes, (arguments, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def start_server(folder: Path, release: Release = RELEASE_0_1) -> tuple[Daemon, str]:
    """Start a server of a release on a data folder; return it with its address."""
    server = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "server"), "--exit-with-stdin", "--no-bundle"],
        folder / "serve.log", environment(release), knows_health=False,
    )  # fmt: skip
    server.start()
    return server, server.expect("listening on").rpartition(" ")[2]


def agent(folder: Path, address: str) -> Daemon:
    """An agent of 0.1.0, not yet started."""
    arguments = ["agent", "--server", address, "--data", str(folder / "agent"), "--name", "board", "--exit-with-stdin"]
    return Daemon([*arguments, *WAIT_FOR_NOTHING], folder / "agent.log", environment())


def data_folder() -> Path:
    """The folder with `server` and `agent`, the data folders of a farm of 0.1.0, and what 0.1.0 said of its jobs.

    `documents.json` has the documents that `etfarm report export --format json` wrote, by the names in JOBS, and of
    `live` the job's id; `history.json` and `comparison.json` are those of ds_cnn. Copy the folder before you use it.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    folder = cache_folder() / f"farm-{RELEASE_0_1.version}-{RELEASE_0_1.commit}-{recipe}"
    tree()
    with _alone("old-farm.lock"):
        if not folder.exists():
            part = Path(tempfile.mkdtemp(dir=cache_folder()))
            try:
                _fill(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def data_folder_of_0_2() -> Path:
    """The folder with `server`, the data folder of a farm of 0.2.0 without devices.

    `document.json` is what 0.2.0 exported of its job, which has the tag `baseline`. Copy the folder before you use it.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    folder = cache_folder() / f"farm-{RELEASE_0_2.version}-{RELEASE_0_2.commit}-{recipe}"
    tree(RELEASE_0_2)
    with _alone("old-farm.lock"):
        if not folder.exists():
            part = Path(tempfile.mkdtemp(dir=cache_folder()))
            try:
                _fill_0_2(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _fill_0_2(folder: Path) -> None:
    server, address = start_server(folder, RELEASE_0_2)
    farm = ("--server", address)
    try:
        run(*JOBS["compiled"], *farm, "--json", "job.json", cwd=folder, release=RELEASE_0_2)
        job = json.loads((folder / "job.json").read_text())["job"]["id"]
        run("report", "tag", job, "baseline", *farm, cwd=folder, release=RELEASE_0_2)
        document = run("report", "export", job, "--format", "json", *farm, cwd=folder, release=RELEASE_0_2)
        (folder / "document.json").write_text(document)
    finally:
        server.kill9()


def _fill(folder: Path) -> None:
    bundle = folder / "runner.tar.gz"
    (folder / "broken.pte").write_bytes(b"\x20\0\0\0ET12" + bytes(200))
    run("bundle", "build", "-o", str(bundle), cwd=folder)
    server, address = start_server(folder)
    board = agent(folder, address)
    farm = ("--server", address)
    try:
        run("bundle", "add", str(bundle), *farm, cwd=folder)
        board.start()
        board.expect("connected to")
        documents: dict[str, Any] = {}
        for name, command in JOBS.items():
            run(*command, *farm, "--json", f"{name}.json", cwd=folder, returncodes=(1,) if name == "failed" else (0,))
            job = json.loads((folder / f"{name}.json").read_text())["job"]["id"]
            if name == "measured":
                run("report", "tag", job, "baseline", *farm, cwd=folder)
            documents[name] = json.loads(run("report", "export", job, "--format", "json", *farm, cwd=folder))
        again = documents["again"]["job"]["id"]
        run("history", "ds_cnn", "--json", "history.json", *farm, cwd=folder)
        run("compare", "baseline#0", again, "--json", "comparison.json", *farm, cwd=folder)
        run(*_LIVE, *farm, cwd=folder)
        documents["live"] = _live_job(folder, farm)
        (folder / "documents.json").write_text(json.dumps(documents))
    finally:
        server.kill9()
        if board.process is not None and board.process.poll() is None:
            board.signal(signal.SIGKILL)
            board.process.wait()
    attempt = _attempt(folder / "server" / "farm.sqlite", documents["live"])
    subprocess.run(
        [sys.executable, "-c", _PUT_RESULT, str(folder / "agent" / "results"), *attempt],
        env={**os.environ, **environment()}, check=True, timeout=120,
    )  # fmt: skip


def _live_job(folder: Path, farm: Sequence[str]) -> str:
    """The id of the job that runs, once a device measures it."""
    database = folder / "server" / "farm.sqlite"
    job: str = _query(database, "SELECT id FROM jobs ORDER BY number DESC LIMIT 1")[0][0]
    running = f"SELECT 1 FROM cells JOIN attempts ON attempts.cell_id = cells.id WHERE job_id = '{job}' AND state = 'RUNNING'"
    assert wait_until(lambda: bool(_query(database, running)), 120.0)
    return job


def _attempt(database: Path, job: str) -> tuple[str, str, str]:
    """The attempt of the live job: its id, its device and its cell."""
    query = f"SELECT attempts.id, device_id, cell_id FROM attempts JOIN cells ON cells.id = cell_id WHERE job_id = '{job}'"
    ((attempt_id, device_id, cell_id),) = _query(database, query)
    return attempt_id, device_id, cell_id


def _query(database: Path, query: str) -> list[tuple[Any, ...]]:
    import sqlite3

    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep other test processes out."""
    with (cache_folder() / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(data_folder())
