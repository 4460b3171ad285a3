"""Fixtures of tests that break a farm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.credentials import USERS, Credentials
from tests.support.databases import postgres_databases  # noqa: F401 - a fixture
from tests.support.farm import FarmProcess


@pytest.fixture(scope="module", autouse=True)
def credentials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Credentials]:
    """TLS, tokens and two users in projects of their own: what farms ask for here, as those of companies do.

    Tests act as a user, or as `ACTS_AS` of their module says: what they operate may be an admin's matter.
    """
    acts_as = getattr(request.module, "ACTS_AS", next(iter(USERS)))
    with Credentials(tmp_path_factory.mktemp("credentials")).used(acts_as) as created:
        yield created


@pytest.fixture(scope="module")
def farm(credentials: Credentials, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server with one agent, for tests that break nothing of it: the one that other folders share has no credentials."""
    with FarmProcess(tmp_path_factory.mktemp("farm")) as running:
        yield running.start()
