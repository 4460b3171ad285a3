"""Report files that `--json` wrote, which need no farm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def is_named(name: str) -> bool:
    """Return whether a name is the path of a file, not a job: it ends in .json or contains a folder.

    Ids and tags do neither.
    """
    return name.lower().endswith(".json") or os.sep in name


def read(path: Path) -> dict[str, Any]:
    """Read the document etfarm.report/1 in a file, with every key that this version knows.

    Raises:
        BadDocument: the file does not exist, cannot be read, or has other content.
    """
    from etfarm.wire import report

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        where = f"Paths start at the working folder, {Path.cwd()}."
        raise report.BadDocument(f"There is no file {path}.", where, path=path) from None
    except OSError as error:
        raise report.BadDocument(
            f"{path} cannot be read: {error.strerror}.", "Give a file that --json wrote.", path=path
        ) from None
    try:
        return report.loads(data)
    except report.BadDocument as error:
        raise report.BadDocument(f"{path}: {error.message}", error.remedy, path=path) from None
