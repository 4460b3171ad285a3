"""Fixtures of the tests of the web page: one farm with tokens, its page, and one browser for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.simulated_web import SimulatedWebFarm
from tests.support.visits import Visits, open_simulated
from tests.support.web import Tab, Visit, WebFarm, chromium


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebFarm]:
    """A farm with tokens and an agent, and its page. Tests leave it as it was."""
    with WebFarm(tmp_path_factory.mktemp("web")) as farm:
        yield farm.start()


@pytest.fixture
def visit(web: WebFarm) -> Visit:
    """A visitor without a browser."""
    return Visit(web.url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; each tab has cookies of its own. While it runs, tests of its module cannot be asynchronous."""
    with chromium() as running:
        yield running


@pytest.fixture
def tab(web: WebFarm, browser: Browser) -> Iterator[Tab]:
    """A tab that has not signed in."""
    opened = Tab(browser, web.url, viewport={"width": 1280, "height": 900})
    try:
        yield opened
    finally:
        opened.context.close()


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedWebFarm]:
    """A farm with tokens and simulated devices of several kinds, and its page."""
    with open_simulated(tmp_path_factory.mktemp("simulated")) as running:
        yield running


@pytest.fixture(scope="module")
def visits(simulated: SimulatedWebFarm, browser: Browser) -> Visits:
    """Visitors of the simulated farm's page."""
    return Visits(simulated, browser)
