"""The bytes of a request, which name its files by their indices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from etfarm.server.workers import request_files
from tests.support.refusals import refuses


@dataclass(frozen=True)
class Request:
    models: dict[str, Path]
    samples: tuple[Path, ...]
    name: str


def test_a_request_has_the_files_where_the_reader_has_them() -> None:
    request = Request({"forward": Path("/store/a")}, (Path("/store/b"), Path("/store/a")), "/store/a")
    files = request_files.files_of(request)
    data = request_files.encode(request, files)
    assert b"store" not in data.replace(b"/store/a", b"", 1)  # the name is text
    assert request_files.decode(data, files) == request
    elsewhere = [Path("/node") / path.name for path in files]
    assert request_files.decode(data, elsewhere) == Request(
        {"forward": Path("/node/a")}, (Path("/node/b"), Path("/node/a")), "/store/a"
    )


@pytest.mark.remedy("TOO_MANY_FILES")
def test_more_files_than_a_child_can_see_are_refused() -> None:
    samples = tuple(Path(f"/store/{number}") for number in range(request_files.MAX_READABLE + 1))
    with refuses("TOO_MANY_FILES"):
        request_files.files_of(Request({}, samples, "one sample a file"))
    assert len(request_files.files_of(Request({}, samples[:10], "several samples a file"))) == 10
