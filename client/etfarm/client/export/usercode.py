"""Step 1, client: a user's own Python files, which factories and metrics are in."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """The folder in front of sys.path, where a file's own imports are looked for; what was imported stays."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def import_file(path: Path, prefix: str) -> ModuleType:
    """The module of a .py file, run now.

    Its name hangs on the file's stem and not on its folder, since it is a part of what is exported: `PREFIX_STEM`, numbered
    where another file has that already.

    Raises:
        ImportError: it cannot be imported as Python.
        Whatever the file raises.
    """
    absolute = path.resolve()
    name, copies = f"{prefix}_{absolute.stem}", 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(absolute):
        copies += 1
        name = f"{prefix}_{absolute.stem}_{copies}"
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
    return module
