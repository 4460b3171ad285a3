"""Step 1, client: what a .pt2 archive says of itself, read without torch: its inputs, and what was done before.

Nothing here judges an archive: what cannot be told is left out, and the server, which loads it with torch, refuses it.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
}  # fmt: skip
"""ScalarType of torch/_export/serde/schema.py by etfarm.wire.tensors' names."""

_QUANTIZED = "torch.ops.quantized_decomposed."
_TORCHAO = ("torch.ops.torchao.", "torch.ops.quant.")
"""Of linear weights, and of codebooks."""


@dataclass(frozen=True)
class InputType:
    """What one tensor input takes."""

    dtype: str
    sizes: tuple[int | None, ...]
    """A size per dim, None where it is dynamic."""

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.sizes)}]"


@dataclass(frozen=True)
class ArchiveFacts:
    """One exported program, as its archive tells of it."""

    input_names: tuple[str, ...] = ()
    """In flattened order; empty where they cannot be told."""
    input_types: tuple[InputType | None, ...] = ()
    """Beside `input_names`; None for what is no tensor, or of a dtype that does not travel."""
    quantized: bool = False
    """PT2E's quantize and dequantize are in its graph."""
    transformed: bool = False
    """torchao's quantized weights are in its graph."""


def read_archive(source: bytes | Path) -> ArchiveFacts:
    """The facts of an archive of torch.export.save, given as its bytes or its path; none where it is no such archive.

    Source: GraphModule, InputSpec and TensorMeta of torch/_export/serde/schema.py.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("models/model.json"))
            module = json.loads(archive.read(entry))["graph_module"]
        graph = module["graph"]
        names = tuple(_user_inputs(module["signature"]["input_specs"]))
        types = tuple(_type(graph["tensor_values"].get(name)) for name in names)
        targets = {str(node["target"]) for node in graph["nodes"]}
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return ArchiveFacts()
    return ArchiveFacts(
        names,
        types,
        quantized=any(target.startswith(_QUANTIZED) for target in targets),
        transformed=any(target.startswith(_TORCHAO) for target in targets),
    )


def _user_inputs(specs: list[dict[str, Any]]) -> Iterator[str]:
    for spec in specs:
        if "user_input" in spec:
            yield str(next(iter(spec["user_input"]["arg"].values()))["name"])
        elif "constant_input" in spec:
            yield str(spec["constant_input"]["name"])


def _type(meta: dict[str, Any] | None) -> InputType | None:
    if meta is None or meta["dtype"] not in _DTYPES:
        return None
    return InputType(_DTYPES[meta["dtype"]], tuple(size.get("as_int") for size in meta["sizes"]))
