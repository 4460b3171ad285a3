"""The payload configs of a .pt2, which map weights and constants to the archive's members. Stdlib only.

torch loads each member as a flat tensor and views it with the sizes and strides of the config. It checks that a view stays within
the member, but not the size of views of empty members or of views that repeat elements.
Source: torch/export/pt2_archive/_package.py, _build_file_map and _load_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from etfarm.server.compile.screening.errors import NotAPt2, UnsafeModel

MAX_DIMS: Final = 64
"""Maximum number of dims that torch's kernels support."""
MAX_REPEATED: Final = 1 << 28
"""Maximum number of elements of a view that repeats elements (a stride of 0), such as an expanded mask."""


def check(name: str, config: object, sizes: Mapping[str, int]) -> None:
    """Refuse a config whose tensors are pickles or objects, or do not lie within the members that it names.

    Args:
        name: name of the config's member.
        config: the config's JSON.
        sizes: sizes of the archive's members; views of members without a size are left to torch's check.

    Raises:
        NotAPt2: the JSON is not a payload config.
        UnsafeModel: a tensor is a pickle or an object, or exceeds its member.
    """
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise NotAPt2(f"{name} is not a payload config")
    folder = name.rpartition("/")[0]
    for payload in config["config"].values():
        if not isinstance(payload, dict):
            raise NotAPt2(f"{name} is not a payload config")
        if payload.get("use_pickle"):
            raise UnsafeModel(
                "PICKLED_WEIGHTS", name, "has tensors of a subclass, which are unpickled",
                "Give etfarm the module itself, or file.py:factory: it exports plain tensors. Or call torchao's "
                "unwrap_tensor_subclass(module) before torch.export.",
            )  # fmt: skip
        file = payload.get("path_name")
        if not isinstance(file, str) or not file.startswith(("weight_", "tensor_")) or "/" in file:
            raise UnsafeModel("CODE_CONSTANT", name, f"names {str(file)[:80]!r}, which is not a plain tensor")
        meta = payload.get("tensor_meta")
        if not isinstance(meta, dict):
            raise NotAPt2(f"{name} has no tensor_meta for {file[:80]}")
        if (size_bytes := sizes.get(f"{folder}/{file}")) is not None:
            _check_view(name, file, meta, size_bytes)


def _check_view(name: str, file: str, meta: Mapping[str, object], size_bytes: int) -> None:
    """Check a view of a member, assuming elements of one byte; torch checks the rest by the dtype."""
    shape, strides = _ints(name, meta.get("sizes")), _ints(name, meta.get("strides"))
    (offset,) = _ints(name, [meta.get("storage_offset")])
    if len(shape) != len(strides) or len(shape) > MAX_DIMS:
        raise UnsafeModel("OUT_OF_BOUNDS", name, f"has {len(shape)} sizes and {len(strides)} strides for {file[:80]}")
    count = 1
    for dim in shape:
        count *= dim
    last = offset + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    if count and (last >= size_bytes or count > max(size_bytes, MAX_REPEATED)):
        raise UnsafeModel("OUT_OF_BOUNDS", name, f"has a view of {file[:80]} that is larger than its {size_bytes} bytes")


def _ints(name: str, values: object) -> list[int]:
    """Return the numbers of a list of SymInts.

    Raises:
        NotAPt2: an item is not a plain number, which torch requires for payloads.
    """
    if not isinstance(values, list):
        raise NotAPt2(f"{name} has a tensor without sizes, strides and an offset")
    numbers = [value.get("as_int") if isinstance(value, dict) and len(value) == 1 else None for value in values]
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 62 for number in numbers):
        raise NotAPt2(f"{name} has a size, a stride or an offset that is not a plain number")
    return [number for number in numbers if isinstance(number, int)]
