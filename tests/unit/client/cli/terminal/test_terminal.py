"""Names of others on a terminal: none of them moves the cursor, clears the screen, or turns the direction of writing."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.terminal import capabilities, output
from etfarm.client.cli.terminal.display import PlainDisplay
from etfarm.client.cli.views import render
from etfarm.wire import report as projection
from tests.support.documents import document, report, row

STEERING = "\x1b[2J\x1b[31m\x1b]0;owned\x07\x9b31m\x85\r\x08\x7f\u202e\u2066\u200f\u2028\ud800"
NAMES = st.text(st.sampled_from([*STEERING, *"[2Jab ü漢\n\t"]), max_size=12) | st.text(max_size=12)


def assert_harmless(text: str) -> None:
    kept = [one for one in text if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in "\n\t"]
    turned = [
        one for one in text if unicodedata.bidirectional(one) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    ]
    assert not kept and not turned, text


@given(NAMES)
def test_what_steers_is_a_mark_and_all_else_stays(name: str) -> None:
    shown = capabilities.printable(name)
    assert_harmless(shown)
    assert len(shown) == len(name)
    assert all(after in (before, capabilities.MARK) for before, after in zip(name, shown, strict=True))
    assert capabilities.printable(shown) == shown
    assert not set(capabilities.in_a_line(name)) & set("\n\t")


@given(NAMES, st.booleans())
@settings(max_examples=60, deadline=None)
def test_nothing_that_a_console_is_given_steers_the_terminal(name: str, is_terminal: bool) -> None:
    console = output.PlainConsole(
        file=io.StringIO(),
        width=80,
        markup=False,
        highlight=False,
        force_terminal=is_terminal,
        color_system=None,
        legacy_windows=False,
    )
    grid = Table.grid()
    grid.add_row(name, Text(name))
    console.print(name, Text(name), output.facts([(name, grid)]))
    assert_harmless(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_reports_names_lines_and_code_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    source = {"file": STEERING[:-1], "line": 1, "code": STEERING[:-1]}
    rows = [row(0, "OPERATOR", STEERING[:-1], 1.0, 10.0, op_types=[STEERING[:-1]], module=STEERING[:-1], source=source)]
    created = document(report(model={"name": f"net{STEERING[:-1]}", "digest": "0" * 64}, operators=rows))
    output.show(render.reports(projection.loads(projection.dumps(created))["reports"], width=160, job="j"))
    output.show_table(("NAME", "WHAT"), [(f"net{STEERING}", Text(f"a\nb{STEERING}", style="red"))], shrink=("WHAT",))
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert f"net{capabilities.MARK}[2J" in printed and f"a{capabilities.MARK}b" in printed
    assert len(printed.splitlines()[-1].split(capabilities.MARK)) > 10, "a newline in a name begins no line of its own"


def test_progress_errors_and_logs_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    from etfarm.client.cli.app import execute
    from etfarm.client.cli.terminal.display import open_display
    from etfarm.wire.errors import Fault, error_of

    def failing() -> None:
        raise error_of(Fault.USER, "NO", f"The model {STEERING} is none.")

    with open_display() as display:
        assert isinstance(display, PlainDisplay), "stderr is no terminal here"
        display.status(f"Waiting for {STEERING}.")
        display.log(STEERING, "cell")
    assert execute(failing, [], "failing") == 2
    printed = capsys.readouterr().err
    assert_harmless(printed)
    assert printed.count("\n") == 3 and "The model" in printed


def test_a_file_of_others_is_shown_and_a_pipe_gets_its_json_as_it_is(tmp_path: Path) -> None:
    name = "net\x9b31m\u202e"
    created = projection.dumps(document(report(model={"name": name, "digest": "0" * 64})))
    (tmp_path / "r.json").write_text(created)
    command = [sys.executable, "-m", "etfarm.wire.command", "report"]
    shown = subprocess.run([*command, "show", "r.json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert_harmless(shown.stdout + shown.stderr)
    assert f"net{capabilities.MARK}31m{capabilities.MARK}" in shown.stdout
    exported = [*command, "export", "r.json", "--format", "json"]
    piped = subprocess.run(exported, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert name in piped.stdout


MARKUP = "[red]x[/red] [link=https://x.y]y[/link] [/] :skull: [bold"


def test_no_name_is_markup_in_the_live_table() -> None:
    from datetime import UTC, datetime

    from etfarm.client.cli.terminal.display import LiveDisplay
    from etfarm.client.models import Cell, CellState, Progress

    def cell(number: int) -> Cell:
        return Cell(
            id=f"c{number}", index=number, state=CellState.RUNNING, model=f"{MARKUP} {number}", recipe="r", method="forward",
            threads=None, device=None, attempts=0, error=None, waiting_for=MARKUP,
        )  # fmt: skip

    display = LiveDisplay()
    display.cells([cell(0), cell(1)])
    display.event(Progress(at=datetime.now(UTC), cell_id="c0", message=MARKUP))
    console = output.PlainConsole(file=io.StringIO(), width=240, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(display)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(MARKUP) == 4, shown
    assert "\x1b]8;" not in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_servers_log_does_not_steer_the_terminal_that_shows_it(is_terminal: bool, tmp_path: Path) -> None:
    program = (
        "import sys, structlog\n"
        f"sys.stderr.isatty = lambda: {is_terminal}\n"
        "from etfarm.server.operation import logs\n"
        "logs.configure()\n"
        f"name = {STEERING[:-1]!r}\n"
        "log = structlog.get_logger()\n"
        "log.warning('a device' + name, device=name)\n"
        "try:\n    raise ValueError(name)\nexcept ValueError:\n    log.exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True, cwd=tmp_path)
    shown = done.stderr.decode()
    assert_harmless(re.sub(r"\x1b\[\d+m", "", shown))  # structlog's own colours
    assert "a device" in shown and "failed" in shown


def test_an_agents_log_is_one_line_that_steers_nothing() -> None:
    import logging

    from etfarm.device_agents.logs import OneLine

    record = logging.LogRecord("n", logging.INFO, "f", 1, "a phone %s", (f"x\ny{STEERING}",), None)
    shown = OneLine("%(message)s").format(record)
    assert_harmless(shown)
    assert "\n" not in shown and shown.startswith("a phone x | y")


def test_an_agents_log_has_instants_in_utc_as_the_servers() -> None:
    import logging

    from etfarm.device_agents.logs import OneLine

    record = logging.LogRecord("n", logging.INFO, "f", 1, "text", (), None)
    record.created, record.msecs = 1_767_323_045.25, 250.0
    assert OneLine("%(asctime)s %(message)s").format(record) == "2026-01-02T03:04:05.250Z text"


def test_a_run_of_several_is_written_with_its_median() -> None:
    from datetime import UTC, datetime

    from etfarm.client.models import Progress

    lines: list[str] = []
    progress = Progress(
        at=datetime.now(UTC), cell_id="c0", actor="pi", phase="TIMED", duration_ms=1000.0, message="run 2 of 5", p50_ns=2e6
    )
    PlainDisplay(lines.append).event(progress)
    assert lines[0].endswith("on pi, run 2 of 5, p50 2.00 ms"), lines
