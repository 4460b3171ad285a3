"""Fixtures that several test folders share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.support.adbd import adb_phone  # noqa: F401 - a fixture
from tests.support.farm import Daemon, FarmProcess
from tests.support.forks import Template
from tests.support.golden import golden  # noqa: F401 - a fixture
from tests.support.runner import runner_bundle  # noqa: F401 - a fixture
from tests.support.s3 import s3_server  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from etfarm.server.workers.pool import Workers

QUICK_RING = "not slow"
"""Of markers: the tests that `pytest` alone runs."""

SLOW_RING = "slow"
"""Of markers: the tests of the second ring."""

SLOW_MARK = "mark." + SLOW_RING
"""What the file of a slow test, or a conftest.py above it, must contain: the second ring imports no other files."""

LONG_FILES = ("test_join.py", "test_numeric_gap.py", "test_real_models.py", "test_board_vm.py", "test_phone_vm_farm.py")
"""Files that take the longest, or wait for what a first run makes: they come first, so that all processes end together."""

# Pytest's processes inherit the width of a terminal that they do not write to.
os.environ.pop("COLUMNS", None)

# Hundreds of processes of tests would compile etfarm's modules anew, a third of a server's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What servers, agents, pages and commands load at their start, but for grpc: its import reads a variable that some of them set.
Daemon.template = Template(
    "anyio._backends._asyncio", "asyncio", "google.protobuf.json_format", "google.rpc.error_details_pb2", "google.rpc.status_pb2",
    "http.cookies", "jinja2", "psutil", "psycopg", "rich.table", "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite", "starlette.applications", "structlog", "typer", "uvicorn",
)  # fmt: skip

# No clock decides over a property, and the same commit is tried with the same examples each time.
settings.register_profile("etfarm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("etfarm")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites golden files."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden sentences of the tests that run")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose the quick ring, in a process for each core and a few more, where neither paths nor a ring are named.

    Who names a file wants all of its tests, also the slow ones, and a process more would only load torch once more.
    """
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = config.option.markexpr or QUICK_RING
    if config.option.markexpr == SLOW_RING:
        config.args = [str(path) for path in slow_files()]
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("xdist"):
        return
    if config.option.numprocesses is None and not config.option.usepdb:
        # More than cores: tests also wait, for processes and deadlines, above all slow ones.
        config.option.numprocesses = len(os.sched_getaffinity(0)) + (2 if config.option.markexpr == SLOW_RING else 1)
    if config.option.numprocesses:
        # The tests of a file stay together, as they share farms. Folders with long files come first by their names.
        config.option.dist, config.option.loadscopereorder = "loadfile", False
        # A process that stands still is ended and replaced, and its test repeated.
        config.option.maxworkerrestart = config.option.maxworkerrestart or "2"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while torch and the tests are imported, nor among what stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def slow_files() -> list[Path]:
    """Return the files that may have slow tests: to import all others would load torch and half of the tests for nothing."""
    tests = Path(__file__).parent
    marked = {path for path in tests.rglob("*.py") if path != Path(__file__) and SLOW_MARK in path.read_text()}
    folders = {path.parent for path in marked if path.name == "conftest.py"}
    return sorted(path for path in tests.rglob("test_*.py") if path in marked or not folders.isdisjoint(path.parents))


class RotatedFolder(pytest.Dir):
    """A folder that each process of a ring collects from another file on."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Return what is in the folder."""
        nodes = [*super().collect()]
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(nodes) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        return nodes[first:] + nodes[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Let each process of a ring begin with other files.

    Each process imports all tests, and pytest compiles a test that has not been imported before: the processes share that work.
    """
    return RotatedFolder.from_parent(parent, path=path) if "PYTEST_XDIST_WORKER" in os.environ else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a slow test that does not say why it is slow, or that its ring would miss, and put the longest files first.

    The quick ring collects all files, and thereby looks at each slow test.
    """
    of_ring = set(slow_files())
    for item in items:
        if item.get_closest_marker(SLOW_RING) is not None and item.path not in of_ring:
            raise pytest.UsageError(f"{item.nodeid} is slow, but `pytest -m slow` would miss it: write {SLOW_MARK} in its file.")
        for marker in item.iter_markers("slow"):
            if not marker.kwargs.get("reason"):
                raise pytest.UsageError(f'{item.nodeid} is slow without a reason: @pytest.mark.slow(reason="...").')
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, item.path))


@pytest.fixture(scope="session", autouse=True)
def own_umask() -> int:
    """The umask with which the tests were started."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


@pytest.fixture(autouse=True)
def keep_umask(own_umask: int) -> Iterator[None]:
    """Give each test the same umask: commands close it for their process, which is that of the tests if these call them."""
    os.umask(own_umask)
    yield
    os.umask(own_umask)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """One warm forkserver for all tests that compile in its children, which find their tasks beside the tests. Tests that use
    it share an event loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`."""
    from tests.support.compiling import warm_workers

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        async with warm_workers(tmp_path_factory.mktemp("workers")) as pool:
            await pool.ready()
            yield pool


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server with one agent, for tests that break nothing. Its workers are warm after the first job."""
    with FarmProcess(tmp_path_factory.mktemp("farm")) as running:
        yield running.start()


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of the test's own, not yet started."""
    with FarmProcess(tmp_path_factory.mktemp("breakable")) as running:
        yield running
