"""Inputs and properties of a .pt2 archive, read without torch.

Nothing here validates an archive: unknown facts are left out, and the server, which loads it with torch, refuses bad archives.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.wire.output_names import names_of_structure

_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
}  # fmt: skip
"""ScalarType values of torch/_export/serde/schema.py by the names in etfarm.wire.tensors."""

_QUANTIZED = "torch.ops.quantized_decomposed."
_TORCHAO = ("torch.ops.torchao.", "torch.ops.quant.")
"""Prefixes of the operators of linear weights, and of codebooks."""


@dataclass(frozen=True)
class InputType:
    """The type of one tensor input."""

    dtype: str
    sizes: tuple[int | None, ...]
    """The size of each dim, None for a dynamic dim."""

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.sizes)}]"


@dataclass(frozen=True)
class ArchiveFacts:
    """The facts that an archive contains about one exported program."""

    input_names: tuple[str, ...] = ()
    """Input names in flattened order; empty if unknown."""
    output_names: tuple[str, ...] = ()
    """Output names in flattened order, see `etfarm.wire.output_names`; empty if unknown."""
    input_types: tuple[InputType | None, ...] = ()
    """Types parallel to `input_names`; None for an input that is not a tensor, or has an unsupported dtype."""
    quantized: bool = False
    """Whether PT2E's quantize and dequantize are in the graph."""
    transformed: bool = False
    """Whether torchao's quantized weights are in the graph."""


def read_archive(source: bytes | Path) -> ArchiveFacts:
    """Return the facts of a torch.export.save archive, as bytes or path; empty facts for any other file.

    Source: GraphModule, InputSpec and TensorMeta of torch/_export/serde/schema.py.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("models/model.json"))
            module = json.loads(archive.read(entry))["graph_module"]
        graph = module["graph"]
        names = tuple(_user_inputs(module["signature"]["input_specs"]))
        outputs = _output_names(module)
        types = tuple(_type(graph["tensor_values"].get(name)) for name in names)
        targets = {str(node["target"]) for node in graph["nodes"]}
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile):
        return ArchiveFacts()
    return ArchiveFacts(
        names,
        outputs,
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


def _output_names(module: dict[str, Any]) -> tuple[str, ...]:
    try:
        entry = next((each for each in module["module_call_graph"] if not each["fqn"]), None)
        names = () if entry is None else names_of_structure(entry["signature"]["out_spec"])
        count = sum("user_output" in spec for spec in module["signature"]["output_specs"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return ()
    return names if len(names) == count else ()


def _type(meta: dict[str, Any] | None) -> InputType | None:
    if meta is None or meta["dtype"] not in _DTYPES:
        return None
    return InputType(_DTYPES[meta["dtype"]], tuple(size.get("as_int") for size in meta["sizes"]))
