"""`etfarm up` keeps the farm although a question to it has no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client.cli.commands.up import _report_bundle_error


async def test_an_error_while_the_bundle_is_built_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETFARM_SERVER_WAIT", "0")
    await _report_bundle_error(f"unix:{tmp_path / 'no.sock'}")
    printed = capsys.readouterr().err
    assert printed.startswith("warning: the state of the runner bundle is unknown: ")
    assert printed.count("\n") == 1
