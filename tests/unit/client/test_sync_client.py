"""The synchronous client: generated, complete, and with signatures and docstrings of its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from etfarm.client import AsyncFarm, AsyncJob, AsyncLocalSession, AsyncSession, Farm, Job, LocalSession, Session
from etfarm.client.admin.projects import AsyncProjects
from etfarm.client.client import Projects
from etfarm.client.transport.blocking import Blocking, OwnLoop
from etfarm.wire.errors import EtfarmError, error_for
from tests.support.refusals import refuses

ROOT = Path(__file__).resolve().parents[3]
TWINS = [
    (AsyncFarm, Farm), (AsyncJob, Job), (AsyncSession, Session), (AsyncLocalSession, LocalSession), (AsyncProjects, Projects)
]  # fmt: skip


def test_the_synchronous_client_is_what_would_be_generated() -> None:
    script = ROOT / "client" / "generate_sync.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("source", "twin"), TWINS, ids=[twin.__name__ for _, twin in TWINS])
def test_each_public_method_is_there_with_its_signature_and_docstring(source: type, twin: type) -> None:
    public = [name for name in dir(source) if not name.startswith("_")]
    assert public
    for name in public:
        own, other = inspect.getattr_static(source, name), inspect.getattr_static(twin, name)
        if isinstance(own, property):
            own, other = own.fget, other.fget
        assert own is not None and other is not None
        parameters = [str(parameter) for parameter in inspect.signature(other).parameters.values()]
        assert parameters == [str(parameter) for parameter in inspect.signature(own).parameters.values()], name
        text = inspect.getdoc(other) or ""
        assert not any(word in text for word in ("await", "async ", "Async")), name
        assert bool(text) == bool(inspect.getdoc(own)), name
        assert not inspect.iscoroutinefunction(other) and not inspect.isasyncgenfunction(other)


def test_examples_in_docstrings_are_synchronous() -> None:
    assert "    with Farm() as farm:\n        job = farm.bench(" in (inspect.getdoc(Farm) or "")
    assert issubclass(LocalSession, Session)


class _Numbers:
    """An asynchronous object that counts."""

    def __init__(self) -> None:
        self.is_open = False
        self.ended = 0

    async def __aenter__(self) -> _Numbers:
        self.is_open = True
        return self

    async def close(self) -> None:
        self.is_open = False

    def _not_open(self) -> EtfarmError:
        return error_for("NOT_CONNECTED", "not open")

    async def double(self, number: int) -> int:
        return 2 * number

    async def count(self) -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            self.ended += 1


class _BlockingNumbers(OwnLoop):
    def double(self, number: int) -> int:
        return self._run(self._async.double(number))

    def count(self) -> Iterator[int]:
        return self._each(self._async.count())


@pytest.mark.remedy("NOT_CONNECTED")
def test_a_loop_runs_from_start_to_stop() -> None:
    numbers = _Numbers()
    blocking = _BlockingNumbers(numbers)
    with refuses("NOT_CONNECTED"):
        blocking.double(1)
    blocking._start()
    assert numbers.is_open and blocking.double(4) == 8
    for number in blocking.count():
        if number == 2:
            break
    assert numbers.ended == 1, "the generator is closed where its reader stops"
    borrowed = Blocking(numbers, blocking._running)
    assert borrowed._run(numbers.double(5)) == 10
    blocking._stop()
    assert not numbers.is_open
    with refuses("NOT_CONNECTED"):
        borrowed._run(numbers.double(5))
