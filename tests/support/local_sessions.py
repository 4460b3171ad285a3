"""Sessions of a farm, and the same ones on this machine's own runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from etfarm.client import LocalSession, Session
from tests.support.farm import FarmProcess
from tests.support.programs import cache_folder

Open = Callable[..., AbstractContextManager[Session]]
"""Makes a session of a program, on the farm or locally."""


@pytest.fixture(params=["farm", "local"])
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """What opens a session on the farm, and locally."""
    if request.param == "local":
        yield LocalSession
        return
    farm: FarmProcess = request.getfixturevalue("farm")
    with farm.client() as client:
        yield client.session


@pytest.fixture(scope="session", autouse=True)
def local_data() -> Iterator[None]:
    """Local runners are built once, outside of the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETFARM_DATA", str(cache_folder() / "data"))
        yield
