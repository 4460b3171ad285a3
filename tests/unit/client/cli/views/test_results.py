"""A job's result as commands print it."""

from __future__ import annotations

import pytest

from etfarm.client.cli.views.results import print_result
from etfarm.client.reports import JobResult
from tests.support.documents import document, report


@pytest.mark.parametrize(("top", "shown"), [(None, True), (1, False), (0, True)])
def test_top_limits_the_operators(top: int | None, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    result = JobResult.from_dict(document(report()))
    print_result(result, to_stderr=False, top=top)
    assert ("models/resnet.py:44" in capsys.readouterr().out) == shown


def test_a_retried_cell_is_shown_again_from_its_own_job(capsys: pytest.CaptureFixture[str]) -> None:
    result = JobResult.from_dict(document(report(), report(id="r2", cell="c2")))
    first = result.job.id
    print_result(result, to_stderr=False, top=1, jobs={"r1": first, "r2": "second"})
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"etfarm report show {first} --top 0") == printed.count("etfarm report show second --top 0") == 1
    assert printed.endswith("etfarm report show second") and printed.count("job second") == 1
