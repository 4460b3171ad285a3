"""The file of names beside a compiled program: `x.inputs.json` beside `x.pte`, which itself has no names.

{"schema": "etfarm.inputs/1", "program": SHA256, "methods": {"forward": ["x", "mask"]}, "outputs": {"forward": ["logits"]},
 "types": {"forward": [["float32", [[2, 16], 4]], null]}, "relations": {"forward": ["mask.shape[0] == x.shape[0]"]}}

`methods` has the names of inputs; `outputs` those of outputs; `types` the dtype and sizes of inputs, where a dynamic dim has its
minimum and maximum; `relations` those of `etfarm.wire.size_relations`. Older files have `methods` only.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from etfarm.client.errors import OutputUnwritable
from etfarm.client.submit.value_names import ValueNames
from etfarm.wire import digest
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.pt2 import InputType

SCHEMA: Final = "etfarm.inputs/1"
_MAX_BYTES: Final = 16 << 20


def names_path(program: Path) -> Path:
    """Return the path of the file that belongs to a program."""
    return program.with_name(f"{program.stem}.inputs.json")


def write_names(program: Path, names: ValueNames) -> Path:
    """Write the names of a program's inputs and outputs beside it, and return the file's path.

    Raises:
        OutputUnwritable: the file cannot be written.
    """
    path = names_path(program)
    document = {
        "schema": SCHEMA,
        "program": digest.of_file(program),
        "methods": {method: list(inputs) for method, inputs in names.inputs.items()},
        "outputs": {method: list(outputs) for method, outputs in names.outputs.items()},
        "types": {method: [each and [each.dtype, each.sizes] for each in types] for method, types in names.types.items()},
        "relations": {method: list(relations) for method, relations in names.relations.items()},
    }
    try:
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another -o.", path=path) from None
    return path


def read_names(program: Path) -> ValueNames:
    """Return the names from the file beside a program; none if it is missing or is another program's."""
    path = names_path(program)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return ValueNames()
        document = json.loads(path.read_bytes())
        names = ValueNames(_read(document["methods"]), _read(document.get("outputs", {})))
        belongs = document["schema"] == SCHEMA and document["program"] == digest.of_file(program)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ValueNames()
    if not belongs:
        return ValueNames()
    try:
        types = {str(method): tuple(map(_read_type, types)) for method, types in document.get("types", {}).items()}
        return replace(names, types=types, relations=_read(document.get("relations", {})))
    except (ValueError, TypeError, AttributeError):  # of another release: the device checks sizes
        return names


def _read_type(value: Any) -> InputType | None:
    """Return an input's type.

    Raises:
        ValueError, TypeError: it is none.
    """
    if value is None:
        return None
    dtype, sizes = value
    return InputType(str(dtype), tuple(_read_size(size) for size in sizes))


def _read_size(size: Any) -> int | tuple[int, int] | None:
    if isinstance(size, list):
        low, high = size
        return int(low), int(high)
    return None if size is None else int(size)


def _read(names: Any) -> dict[str, tuple[str, ...]]:
    return {str(method): tuple(map(str, of_method)) for method, of_method in names.items()}
