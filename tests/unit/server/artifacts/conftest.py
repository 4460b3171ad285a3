"""Every test of a store runs with its bytes in files, and in a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stores import KINDS, Stores, stores_of

SLOW = pytest.mark.slow(reason="starts an S3 server; test_s3_blobs.py has one in the quick ring")


@pytest.fixture(params=[pytest.param(kind, marks=SLOW if kind == "s3" else ()) for kind in KINDS])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    with stores_of(request.param, request) as created:
        yield created
