"""Options whose libraries are not installed."""

from __future__ import annotations

import pytest

from etfarm.server.extras import ExtraMissing, require_extra


def test_an_option_whose_library_is_missing_names_its_extra() -> None:
    require_extra("--anything", "scale", "json")
    with pytest.raises(ExtraMissing) as missing:
        require_extra("--anything", "scale", "no_such_library")
    assert missing.value.metadata == {"extra": "scale", "missing": "no_such_library"}
