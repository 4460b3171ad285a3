"""Expectation of an error by its reason, since most errors have no class of their own."""

from __future__ import annotations

import re

import pytest

from etfarm.wire.errors import EtfarmError


def refuses(reason: str, match: str | re.Pattern[str] | None = None) -> pytest.RaisesExc[EtfarmError]:
    """Expect an error with a reason in the block, as `pytest.raises`."""
    return pytest.raises(EtfarmError, match=match, check=lambda error: error.reason == reason)
