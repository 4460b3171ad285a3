"""Fixtures of the tests of models as people have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from etfarm.client import Farm
from tests.support.farm import FarmProcess


@pytest.fixture(scope="session")
def client(farm: FarmProcess) -> Iterator[Farm]:
    """A client of the farm that breaks nothing."""
    with farm.client() as opened:
        yield opened
