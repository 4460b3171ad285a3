"""What notebooks show, in a real kernel: tables of results, and a bar while a job runs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console
from rich.progress import Progress as RichProgress

from etfarm.client.jobs.progress_bar import JobProgress, TerminalBar, is_notebook, open_bar
from etfarm.client.models import Cell, CellChanged, JobInfo, JobState, Progress
from etfarm.client.transport.decode import decoded
from etfarm.v1 import common_pb2, job_pb2
from etfarm.wire import report as projection
from tests.support import documents
from tests.support.documents import HOSTILE
from tests.support.farm import FarmProcess
from tests.support.programs import program

NOW = decoded(JobInfo, job_pb2.Job()).submitted_at


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the kernel's files, which are otherwise in the user's own."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    yield tmp_path


def _run(folder: Path, *cells: str) -> list[Any]:
    """Run cells in one kernel, and return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def _job(states: str) -> JobProgress:
    cells = [
        job_pb2.Cell(id=str(place), state=common_pb2.CellState.Value(f"CELL_STATE_{state}"), candidate_name=HOSTILE)
        for place, state in enumerate(states.split())
    ]
    return JobProgress(decoded(JobInfo, job_pb2.Job(id="j", state=job_pb2.JOB_STATE_RUNNING, cells=cells)))


def test_a_bar_counts_the_steps_of_all_cells() -> None:
    progress = _job("QUEUED SUCCEEDED")
    assert (progress.done, progress.total, progress.text) == (5, 10, "running")
    cell = decoded(Cell, job_pb2.Cell(id="0", state=common_pb2.CELL_STATE_RUNNING, candidate_name="net"))
    progress.observe(CellChanged(1, NOW, cell, JobState.RUNNING))
    assert (progress.done, progress.text) == (8, "net: running")
    progress.observe(Progress(at=NOW, cell_id="0", actor="board", phase="TIMED", done=50, total=200))
    assert str(progress) == "8/10 net: measuring 25 %"
    assert progress._repr_html_() == '<div><progress value="8" max="10"></progress> 8/10 net: measuring 25 %</div>'


def test_a_bar_shows_names_literally() -> None:
    progress = _job("RUNNING")
    progress.observe(CellChanged(1, NOW, decoded(Cell, job_pb2.Cell(id="0", state=1, candidate_name=HOSTILE)), JobState.RUNNING))
    assert "<script" not in progress._repr_html_() and "&lt;script&gt;" in progress._repr_html_()
    shown = io.StringIO()
    progress.text = "[red]x[/red]\x1b[2J"
    with RichProgress(console=Console(width=300, force_terminal=True, color_system=None, file=shown)) as bar:
        TerminalBar(bar, progress)
    assert "[red]x[/red]\ufffd[2J" in shown.getvalue()


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert not is_notebook()
    progress = _job("RUNNING")
    with open_bar(progress) as bar:
        bar.show(progress)
    assert capfd.readouterr() == ("", "")


def test_a_kernel_shows_a_bar_and_tables(jupyter: Path) -> None:
    file = jupyter / "report.json"
    file.write_text(projection.dumps(projection.loads(json.dumps(documents.document(documents.report())))))
    bar = """
import threading
from etfarm.client.jobs.progress_bar import JobProgress, open_bar
from etfarm.client.models import JobInfo
from etfarm.client.transport.decode import decoded
from etfarm.v1 import common_pb2, job_pb2
progress = JobProgress(decoded(JobInfo, job_pb2.Job(state=2, cells=[job_pb2.Cell(id="0", state=2)])))
def show():
    with open_bar(progress) as bar:
        progress.text = "TIMED"
        bar.show(progress)
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""
    result = f"""
from pathlib import Path
from etfarm.client import JobResult
result = JobResult.loads(Path({str(file)!r}).read_text())
result
"""
    shown, table, report, operators = _run(jupyter, bar, result, "result.report", "result.report.operators")
    (output,) = shown
    assert output.data["text/html"] == '<div><progress value="1" max="5"></progress> 1/5 TIMED</div>'
    assert "<td>1.84 ms</td>" in table[0].data["text/html"] and "JobResult(" in table[0].data["text/plain"]
    assert "Slowest operators" in report[0].data["text/html"]
    assert operators[0].data["text/html"].count("<tr>") == 7


@pytest.mark.slow(reason="runs a job on a farm from a kernel")
def test_a_job_runs_with_a_bar(farm: FarmProcess, jupyter: Path) -> None:
    code = f"""
from etfarm.client import Farm
with Farm({farm.address!r}) as farm:
    result = farm.bench({str(program("add").path)!r}, iterations=20).result(progress=True)
result.report
"""
    (outputs,) = _run(jupyter, code)
    bar, report = outputs
    assert '<progress value="5" max="5">' in bar.data["text/html"] and ": succeeded, p50 " in bar.data["text/html"]
    assert "<td>program" in report.data["text/html"]
