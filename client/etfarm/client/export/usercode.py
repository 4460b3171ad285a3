"""Loading of a user's own Python files, which contain factories and metrics."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

_sources: Final[dict[str, bytes]] = {}
"""Contents of the files that were run, by the names of their modules."""


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put the folder in front of sys.path, where the file's own imports are searched; imported modules stay."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def import_file(path: Path, prefix: str) -> ModuleType:
    """Run a .py file and return its module; one that ran before runs again only if it was edited, as it may register operators.

    Its name depends on the file's stem and not on its folder, since it is part of the export: `PREFIX_STEM`, with a
    number if another file has that name.

    Raises:
        ImportError: the file cannot be imported as Python.
        OSError: the file cannot be read.
        Any exception of the file.
    """
    absolute = path.resolve()
    name, copies = f"{prefix}_{absolute.stem}", 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(absolute):
        copies += 1
        name = f"{prefix}_{absolute.stem}_{copies}"
    source = absolute.read_bytes()
    if name in sys.modules and _sources.get(name) == source:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, absolute)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _sources[name] = source
    return module
