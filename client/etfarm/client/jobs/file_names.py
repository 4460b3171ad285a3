"""Names of the files that a job's results are saved as; a server's names never select a folder."""

from __future__ import annotations

from pathlib import Path


def data_file_name(name: str) -> str:
    """Return the file name of a program's named data: its name with .ptd, without any folder."""
    safe = safe_name(name)
    return safe if safe.endswith(".ptd") else f"{safe}.ptd"


def method_file(path: Path, method: str) -> Path:
    """Return the path of one method's file if there are several methods: x.METHOD.pt2 for x.pt2."""
    return path.with_name(safe_name(f"{path.stem}.{method}{path.suffix}"))


def safe_name(name: str) -> str:
    """Return a server's file name without any folder in it."""
    return name.replace("/", "_").replace("\\", "_").lstrip(".") or "_"
