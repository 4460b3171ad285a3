"""The file of input names beside a compiled program: `x.inputs.json` beside `x.pte`, which itself has no names.

{"schema": "etfarm.inputs/1", "program": SHA256, "methods": {"forward": ["x", "mask"]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from etfarm.client.errors import OutputUnwritable
from etfarm.wire import digest
from etfarm.wire.atomic_write import write_atomically

SCHEMA: Final = "etfarm.inputs/1"
_MAX_BYTES: Final = 1 << 20


def names_path(program: Path) -> Path:
    """Return the path of the file that belongs to a program."""
    return program.with_name(f"{program.stem}.inputs.json")


def write_names(program: Path, names: Mapping[str, Sequence[str]]) -> Path:
    """Write the input names of a program's methods beside it, and return the file's path.

    Raises:
        OutputUnwritable: the file cannot be written.
    """
    path = names_path(program)
    document = {
        "schema": SCHEMA,
        "program": digest.of_file(program),
        "methods": {method: list(inputs) for method, inputs in names.items()},
    }
    try:
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another -o.", path=path) from None
    return path


def read_names(program: Path) -> dict[str, tuple[str, ...]]:
    """Return the input names by method from the file beside a program; empty if it is missing or is another program's."""
    path = names_path(program)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return {}
        document = json.loads(path.read_bytes())
        names = {str(method): tuple(map(str, inputs)) for method, inputs in document["methods"].items()}
        belongs = document["schema"] == SCHEMA and document["program"] == digest.of_file(program)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return names if belongs else {}
