"""`etfarm report export`: reports for other programs and other people."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etfarm.client import formats
from etfarm.client.cli.commands.report import documents
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.files import require_writable, write_whole
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import put, tell
from etfarm.client.errors import OutputUnwritable
from etfarm.client.formats import tables, units
from etfarm.client.jobs.file_names import safe_name
from etfarm.wire import comparison
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm

_SUFFIXES = {
    "json": ".json", "csv": ".csv", "parquet": ".parquet", "html": ".html", "markdown": ".md", "junit": ".junit.xml",
    "perfetto": ".trace.json",    "model-explorer": ".graph.json",
}  # fmt: skip
_TO_STDOUT = ("json", "csv", "markdown", "junit")
"""Formats that are written to stdout without a file name, for pipes."""

_BINARY = ("parquet",)

_WITHOUT_SERIES = ("markdown", "junit")
"""Formats that show neither samples nor times of single iterations."""

_SLASHES = tuple(filter(None, (os.sep, os.altsep)))
"""Last characters of a path that names a folder, whether it exists or not."""


def export(
    outcome: Outcome,
    connection: Connection,
    job: documents.JobOrFile,
    format_: Annotated[str, typer.Option("--format", "-f", metavar="|".join(formats.NAMES), help="The format to write.")] = "",
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PATH", help="A file, or FOLDER/; - is stdout. [stdout, or a file here]"),
    ] = None,
    report: documents.Reports = None,
    what: Annotated[
        str | None,
        typer.Option("--what", metavar="|".join(tables.WHAT), help="Table of csv and parquet. [operators; a folder: all]"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="BASE", help="With html: an earlier job, tag or file to compare with."),
    ] = None,
) -> int:
    """Export a job's or a file's reports: JSON, CSV, Parquet, HTML, Markdown, JUnit, Perfetto, a graph, ExecuTorch's files."""
    must_be_format(format_)
    if what is not None and format_ not in ("csv", "parquet"):
        raise error_for("USAGE", f"--what requires csv or parquet, got {format_}.", "Leave it out.")
    if what is not None and what not in tables.WHAT:
        raise error_for(
            "USAGE", f"--what {what!r} is not a table.", f"Give {', '.join(tables.WHAT[:-1])} or {tables.WHAT[-1]}.", what=what
        )
    if against is not None and format_ != "html":
        raise error_for("USAGE", f"--against requires html, got {format_}.", "Use `etfarm compare` with --markdown or --json.")
    if format_ == "parquet":
        from etfarm.client.formats import parquet

        parquet.must_be_there()
    if format_ == "executorch":
        return save_raw_files(job, output, report or [], outcome, connection)
    target = None if output is None or output == STDOUT else Path(output)
    in_folder = target is not None and (str(output).endswith(_SLASHES) or target.is_dir())
    if target is not None:
        (must_be_folder if in_folder else require_writable)(target)
    if output == STDOUT or (output is None and format_ in _TO_STDOUT):
        if format_ in _BINARY and sys.stdout.isatty():
            raise error_for("USAGE", f"A terminal cannot show {format_}.", "Give -o FILE.")
        target = Path(STDOUT)
    source = documents.find(job, outcome, connection, with_series=format_ not in _WITHOUT_SERIES)
    document = formats.only(source.document, report or [])
    if against is not None:
        from etfarm.client.formats import html

        compared = comparison_of(against, job, outcome, connection)
        files = {f"{stem_of(document)}.html": html.write(document, compared)}
    else:
        files = written(document, format_, what, folder=in_folder)
    if target is not None and in_folder:
        make_folder(target)
    for name, data in files.items():
        if target == Path(STDOUT) and sys.stdout.isatty():
            put(data.decode())
            continue
        if target == Path(STDOUT):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            continue
        path = Path(name) if target is None else target / name if in_folder else target
        write_whole(path, data)
        tell(f"Wrote {path}, {units.size(len(data))}.", to_stderr=True)
    return 0


def comparison_of(base: str, candidate: str, outcome: Outcome, connection: Connection) -> Mapping[str, Any]:
    """Return the document etfarm.comparison/1.

    Raises:
        EtfarmError: as `etfarm.client.jobs.comparison.compare`.
    """
    from etfarm.client.jobs import comparison as comparisons

    async def compare() -> Mapping[str, Any]:
        if not comparisons.needs_farm(base, candidate):
            return (await comparisons.compare(None, base, candidate)).json()
        async with connection.farm() as farm:
            return (await farm.compare(base, candidate)).json()

    return run_async(compare, outcome)


def must_be_format(name: str) -> None:
    """Check that `--format` is a format.

    Raises:
        USAGE: it is not, or is missing.
    """
    if name not in formats.NAMES:
        message = f"--format {name!r} is not a known format." if name else "--format is missing."
        raise error_for("USAGE", message, f"Give one of {', '.join(formats.NAMES)}.", format=name)


def written(document: dict[str, Any], format_: str, what: str | None, *, folder: bool) -> dict[str, bytes]:
    """Return the files of a format by name: one, or both if they go to a folder: tables, or the graph and its nodes' times.

    Raises:
        EXTRA_MISSING: the format needs a library that is not installed.
    """
    stem = stem_of(document)
    suffix = _SUFFIXES[format_]
    if format_ in ("csv", "parquet"):
        from etfarm.client.formats import csv, parquet

        write = csv.write if format_ == "csv" else parquet.write
        chosen = [what] if what else tables.present(document) if folder else tables.WHAT[:1]
        return {f"{stem}.{table}{suffix}": write(document, table) for table in chosen}
    if format_ == "model-explorer" and folder:
        from etfarm.client.formats import model_explorer

        return {f"{stem}{suffix}": model_explorer.write(document), f"{stem}.times.json": model_explorer.write_times(document)}
    return {f"{stem}{suffix}": _writer(format_)(document)}


def _writer(format_: str) -> Callable[[dict[str, Any]], bytes]:
    from etfarm.client.formats import html, junit, markdown, model_explorer, perfetto
    from etfarm.wire import report

    writers: dict[str, Callable[[dict[str, Any]], bytes]] = {
        "html": html.write,
        "markdown": markdown.write,
        "junit": junit.write,
        "perfetto": perfetto.write,
        "model-explorer": model_explorer.write,
        "json": lambda document: report.dumps(document).encode(),
    }
    return writers[format_]


def stem_of(document: dict[str, Any]) -> str:
    """Return the stem of a document's files: its model, if it has one, and its job."""
    models = {report["model"]["name"] for report in document["reports"] if report["model"]}
    job = (document["job"] or {}).get("id") or "report"
    name = f"{models.pop()}-{job}" if len(models) == 1 else f"etfarm-{job}"
    return plain_name(name)


def plain_name(text: str) -> str:
    """Return a file name that needs no quotes in any shell."""
    return safe_name("".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text))


def save_raw_files(job: str, output: str | None, reports: list[str], outcome: Outcome, connection: Connection) -> int:
    """Save ExecuTorch's own files of a job's reports: one report into the folder, several into subfolders.

    Raises:
        USAGE: `job` is a file, or `output` is not a folder.
        EtfarmError: the job or report does not exist, or a file cannot be downloaded.
    """
    from etfarm.client.jobs import report_file

    job, choice = comparison.split_choice(job)
    if report_file.is_named(job):
        raise error_for(
            "USAGE",
            "ExecuTorch's files are in a farm's store, not in a report file.",
            "Name the job: etfarm report export JOB --format executorch.",
        )
    if output == STDOUT:
        raise error_for("USAGE", "--format executorch writes several files.", "Name a folder: -o FOLDER.")
    if output is not None:
        must_be_folder(Path(output))

    async def fetch(farm: AsyncFarm) -> list[Path]:
        handle = await farm.job(job)
        document = formats.only(documents.chosen(await handle.document(with_series=False), None, choice), reports)
        folder = Path(output) if output is not None else Path(f"{stem_of(document)}-executorch")
        cells = {cell.id: cell.index for cell in handle.info.cells}
        chosen = [(cells[entry["cell"]], entry) for entry in document["reports"]]
        if not chosen:
            raise error_for("USAGE", f"Job {handle.id} has no report yet.", f"Wait for it: etfarm jobs watch {handle.id}.")
        folders = []
        for index, entry in chosen:
            parts = (str(index), (entry["model"] or {}).get("name"), entry["recipe"], entry["method"])
            below = plain_name("-".join(part for part in parts if part))
            folders.append(folder if len(chosen) == 1 else folder / below)
            await handle.save_raw_files(folders[-1], index)
        return folders

    for folder in connection.call(fetch, outcome):
        tell(f"Wrote {folder}: see README.txt there.", to_stderr=True)
    return 0


def make_folder(folder: Path) -> None:
    """Create a folder if it does not exist; its parent must exist.

    Raises:
        OutputUnwritable: it cannot be created.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputUnwritable(
            f"{folder} cannot be created: {error.strerror or error}.", "Give another path.", path=folder
        ) from None


def must_be_folder(path: Path) -> None:
    """Check an option's path of a folder, which is created if it does not exist.

    Raises:
        USAGE: it is a file, or its parent does not exist.
        OutputUnwritable: this user may not write there.
    """
    if path.exists() and not path.is_dir():
        raise error_for("USAGE", f"{path} is not a folder.", "Name a folder.", path=path)
    if not path.exists() and not path.parent.is_dir():
        raise error_for("USAGE", f"There is no folder {path.parent} for {path}.", "Create it first.", path=path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputUnwritable(f"{path} cannot be written: Permission denied.", "Give another path.", path=path)
