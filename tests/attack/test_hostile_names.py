"""Hostile names of models, methods, devices, jobs and operators in the output of the real command line.

Spreadsheets must not evaluate them, terminals must not obey them, and Markdown must show them literally.
"""

from __future__ import annotations

import csv
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from etfarm.wire import report as projection
from tests.support.documents import document, report, row
from tests.support.farm import FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="a farm measures jobs with hostile names")

NAME = '=HYPERLINK("https://x.y","z")|[red]a[/red]`<img src=x>[b](javascript:alert(1))'
STEERING = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Job:
    """A job, its label and its device, all with the same name."""

    id: str
    server: str
    folder: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("hostile")
    with FarmProcess(folder, executes=True) as farm:
        farm.start(agents=0)
        farm.add_agent("--name", NAME)
        model = folder / "=1+1|`[x].py"
        made_of = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()"
        model.write_text(f"import torch\n\n\ndef net():\n    return {made_of}, (torch.ones(1, 4),)\n")
        done = etfarm(
            "bench", f"{model}:net", "--name", NAME, "--label", f"key={NAME}", "--min-time", "0.05", "--server", farm.address,
            "--json", str(folder / "report.json"), cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        created = projection.loads((folder / "report.json").read_text())
        yield Job(created["job"]["id"], farm.address, folder)


def _cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _kinds(text: str) -> set[str]:
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(text)
    return {child.type for token in tokens for child in (token.children or [token])}


def test_no_cell_of_a_real_jobs_csv_is_a_formula(job: Job) -> None:
    done = etfarm("report", "export", job.id, "--format", "csv", "--server", job.server, cwd=job.folder)
    assert done.returncode == 0, done.stderr
    rows = _cells(done.stdout)
    assert rows[0]["device"] == f"'{NAME}" and float(rows[0]["p50_ns"] or 1) > 0
    assert not [cell for one in rows for cell in one.values() if FORMULA.match(cell)]


def test_a_real_jobs_markdown_has_no_link_image_or_element_of_a_name(job: Job) -> None:
    done = etfarm("report", "export", job.id, "--format", "markdown", "--server", job.server, cwd=job.folder)
    assert done.returncode == 0, done.stderr
    assert not {"link_open", "image"} & _kinds(done.stdout)
    assert "<img" not in done.stdout
    table = done.stdout.split("\n\n")[0].splitlines()
    assert len(table) == 3, table


@pytest.mark.parametrize("command", [["devices", "list"], ["jobs", "list"], ["jobs", "show", "JOB"], ["report", "show", "JOB"]])
def test_a_name_is_shown_literally_and_not_as_markup(job: Job, command: list[str]) -> None:
    arguments = [job.id if word == "JOB" else word for word in command]
    done = etfarm(*arguments, "--server", job.server, cwd=job.folder, environment={"COLUMNS": "300"})
    assert done.returncode == 0, done.stderr
    assert "[red]a[/red]" in done.stdout


def _on_a_terminal(*arguments: str, cwd: Path) -> str:
    """Return what a command writes to a terminal of its own."""
    parent, child = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "etfarm.wire.command", *arguments],
            stdin=subprocess.DEVNULL, stdout=child, stderr=child, cwd=cwd, env={**os.environ, "NO_COLOR": "1", "TERM": "xterm"},
        )  # fmt: skip
    finally:
        os.close(child)
    parts = []
    try:
        while part := os.read(parent, 1 << 16):
            parts.append(part)
    except OSError:
        parts.append(b"")  # EIO: the other end is closed
    finally:
        os.close(parent)
    process.wait(timeout=120)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    "command", ["show", "show --by module", "export --format markdown", "export --format json", "export --format csv"]
)
def test_a_foreign_report_file_sends_no_control_sequence_to_a_terminal(tmp_path: Path, command: str) -> None:
    name = f"net{STEERING}"
    source = {"file": name, "line": 1, "code": name}
    rows = [row(0, "OPERATOR", name, 1.0, 10.0, op_types=[name], module=name, source=source, backend=name)]
    created = document(
        report(
            model={"name": name, "digest": "0" * 64}, recipe=name, method=name, operators=rows,
            device={"id": name, "name": name, "soc": name, "os": name},
        )
    )  # fmt: skip
    (tmp_path / "r.json").write_text(projection.dumps(created))
    verb, *options = command.split()
    shown = _on_a_terminal("report", verb, "r.json", *options, cwd=tmp_path)
    # What rich writes itself: bold and its end, and the carriage return of the terminal's own line ends.
    left = re.sub(r"\x1b\[[\d;]*m|\r\n", "", shown)
    assert "net" in left
    assert not ESCAPES.search(left), left
