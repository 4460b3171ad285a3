"""Messages of bad arguments in etfarm's words, with the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client.cli.arguments import require_file
from etfarm.client.cli.help_texts import describe_bad_value
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("message", "argv", "expected"),
    [
        (
            "Invalid value for '--iterations': Input should be greater than or equal to 1",
            ["x.pte", "--iterations", "5", "--iterations", "0"],
            "--iterations must be at least 1, got 0",
        ),
        (
            "Invalid value for '--limit' / '-n': Input should be less than or equal to 9.",
            ["--limit=10"],
            "--limit must be at most 9, got 10",
        ),
        (
            "Invalid value for '--top': Input should be a valid integer, unable to parse string as an integer",
            ["--top", "x"],
            "--top must be an integer, got x",
        ),
        ("Invalid value for '--top': Input should be a valid number, unable to parse", [], "--top must be a number"),
        ("No such option: --nosuch", ["--nosuch"], "No such option: --nosuch"),
    ],
)
def test_a_bad_value_is_named_with_what_it_must_be(message: str, argv: list[str], expected: str) -> None:
    assert describe_bad_value(message, argv) == expected


def test_a_folder_in_the_place_of_a_file_is_named_as_one(tmp_path: Path) -> None:
    with refuses("USAGE", match="is a folder"):
        require_file(tmp_path)
    with refuses("USAGE", match="There is no file"):
        require_file(tmp_path / "in.npz")
