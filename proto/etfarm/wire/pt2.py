"""Inputs and properties of a .pt2 archive, read without torch.

Nothing here validates an archive: unknown facts are left out, and the server, which loads it with torch, refuses bad archives.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.wire.output_names import names_of_structure
from etfarm.wire.size_relations import relations_of

_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
}  # fmt: skip
"""ScalarType values of torch/_export/serde/schema.py by the names in etfarm.wire.tensors."""

_QUANTIZED = "torch.ops.quantized_decomposed."
_TORCHAO = ("torch.ops.torchao.", "torch.ops.quant.")
"""Prefixes of the operators of linear weights, and of codebooks."""

_SYMBOL: Final = r"Symbol\('(\w+)'[^()]*\)"
_EXPRESSIONS: Final = (
    (re.compile(_SYMBOL), r"\1"),
    (re.compile(rf"Mul\(Integer\((\d+)\), {_SYMBOL}\)"), r"\1*\2"),
    (re.compile(rf"Add\({_SYMBOL}, Integer\((\d+)\)\)"), r"\1 + \2"),
    (re.compile(rf"Add\({_SYMBOL}, Integer\(-(\d+)\)\)"), r"\1 - \2"),
    (re.compile(rf"Add\(Mul\(Integer\((\d+)\), {_SYMBOL}\), Integer\((\d+)\)\)"), r"\1*\2 + \3"),
    (re.compile(rf"Add\(Mul\(Integer\((\d+)\), {_SYMBOL}\), Integer\(-(\d+)\)\)"), r"\1*\2 - \3"),
)
"""The symbolic sizes of dims in sympy's srepr, and as sympy writes them: a Dim, or one derived from it."""


@dataclass(frozen=True)
class InputType:
    """The type of one tensor input."""

    dtype: str
    sizes: tuple[int | tuple[int, int] | None, ...]
    """The size of each dim; of a dynamic dim its minimum and maximum, or None where these are unknown."""

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(_format_size, self.sizes))}]"


def _format_size(size: int | tuple[int, int] | None) -> str:
    if isinstance(size, tuple):
        return f"{size[0]}..{size[1]}"
    return "?" if size is None else str(size)


@dataclass(frozen=True)
class ArchiveFacts:
    """The facts that an archive contains about one exported program."""

    input_names: tuple[str, ...] = ()
    """Input names in flattened order; empty if unknown."""
    output_names: tuple[str, ...] = ()
    """Output names in flattened order, see `etfarm.wire.output_names`; empty if unknown."""
    input_types: tuple[InputType | None, ...] = ()
    """Types parallel to `input_names`; None for an input that is not a tensor, or has an unsupported dtype."""
    relations: tuple[str, ...] = ()
    """The relations between the sizes of the inputs, see `etfarm.wire.size_relations`."""
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
            document = json.loads(archive.read(entry))
        module = document["graph_module"]
        graph = module["graph"]
        names = tuple(_user_inputs(module["signature"]["input_specs"]))
        outputs = _output_names(module)
        metas = [graph["tensor_values"].get(name) for name in names]
        ranges = _ranges(document.get("range_constraints"))
        types = tuple(_type(meta, ranges) for meta in metas)
        sizes = {name: [_size(size) for size in meta["sizes"]] if meta else [] for name, meta in zip(names, metas, strict=True)}
        relations = relations_of(sizes, [guard for guard in document.get("guards_code") or () if isinstance(guard, str)])
        targets = {str(node["target"]) for node in graph["nodes"]}
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile):
        return ArchiveFacts()
    return ArchiveFacts(
        names,
        outputs,
        types,
        tuple(relations),
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


def _type(meta: dict[str, Any] | None, ranges: Mapping[str, tuple[int, int]]) -> InputType | None:
    if meta is None or meta["dtype"] not in _DTYPES:
        return None
    sizes = (_size(size) for size in meta["sizes"])
    return InputType(_DTYPES[meta["dtype"]], tuple(ranges.get(size) if isinstance(size, str) else size for size in sizes))


def _size(size: dict[str, Any]) -> int | str | None:
    """Return a dim's size, a symbolic one as sympy writes it; None for other expressions."""
    if "as_int" in size:
        return int(size["as_int"])
    text = str(size.get("as_expr", {}).get("expr_str"))
    return next((match.expand(shown) for pattern, shown in _EXPRESSIONS if (match := pattern.fullmatch(text))), None)


def _ranges(constraints: Any) -> dict[str, tuple[int, int]]:
    """Return the minimum and maximum of each symbolic size that has both."""
    ranges = {}
    for size, limits in constraints.items() if isinstance(constraints, dict) else ():
        low, high = limits["min_val"], limits["max_val"]
        if type(low) is type(high) is int and 0 <= low <= high < 1 << 62:
            ranges[str(size)] = low, high
    return ranges
