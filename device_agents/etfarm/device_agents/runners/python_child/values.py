"""Conversion of tensors between the protocol's bytes and torch, and the input checks that ExecuTorch itself does not make.

Part of the child that runs programs with ExecuTorch's Python binding; the agent does not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch

from etfarm.device_agents.runners.python_child.pte import FileValue
from etfarm.wire.tensors import ITEM_BYTES

_MASK: Final = (1 << 64) - 1
_MANTISSA_BITS: Final = {"float32": 24, "float64": 53, "float16": 11, "bfloat16": 8}
"""Number of random bits below 1 that a dtype represents exactly."""
INTEGERS: Final = ("int64", "int32")
"""Dtypes of tokens and positions."""
_LOGITS: Final = (torch.float32, torch.float16, torch.bfloat16)


class Mismatch(ValueError):
    """An input that does not match the one that the program was exported with."""


def checked_tensor(
    index: int, expected: FileValue, dtype: str, shape: list[int], dim_order: list[int], data: bytes
) -> torch.Tensor:
    """Return the input tensor.

    Raises:
        Mismatch: the message states the difference.
    """
    subject = f"input {index}" + (f" '{expected.name}'" if expected.name else "")
    bounds = list(expected.shape)
    if expected.dtype not in ITEM_BYTES:
        raise Mismatch(f"{subject} has a dtype that etfarm does not carry")
    if dtype != expected.dtype:
        raise Mismatch(f"{subject} must be {expected.dtype}, not {dtype}")
    if len(shape) != len(bounds):
        raise Mismatch(f"{subject} must have {len(bounds)} dims {bounds}, not {len(shape)} {shape}")
    fits = all(size <= bound for size, bound in zip(shape, bounds, strict=True)) if expected.dynamic else shape == bounds
    if not fits:
        raise Mismatch(f"{subject} must have the shape {bounds}{' at most' if expected.dynamic else ''}, not {shape}")
    if sorted(dim_order) != list(range(len(shape))):
        raise Mismatch(f"{subject} has the dim order {dim_order}, which is no order of its {len(shape)} dims")
    size = prod(shape) * ITEM_BYTES[dtype]
    # ExecuTorch accepts any dim order but reads the bytes in the program's own, which gives wrong numbers without an error.
    order = list(expected.dim_order)
    if size and _physical(shape, dim_order) != _physical(shape, order):
        raise Mismatch(f"{subject} must lie in memory in the dim order {order}, not {dim_order}")
    if len(data) != size:
        raise Mismatch(f"{subject} has {len(data)} bytes where {dtype} {shape} needs {size}")
    return tensor_of(data, dtype, shape, order)


def integer_tensor(values: Sequence[int], dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a contiguous tensor of integers."""
    return torch.tensor(list(values), dtype=getattr(torch, dtype)).reshape(tuple(shape))


def most_likely(outputs: Sequence[Any]) -> tuple[int | None, int]:
    """Return the index of the largest logit in the last row of the first output, and the row's length.

    The lowest index of equal ones; None if no logit is above minus infinity. NaN is ignored.

    Raises:
        Mismatch: the first output does not hold logits.
    """
    row = last_logits(outputs)
    best = int(row.argmax())
    if float(row[best]) != float(row[best]):
        row = row.masked_fill(row.isnan(), float("-inf"))  # argmax regards NaN as the largest
        best = int(row.argmax())
    return None if float(row[best]) == float("-inf") else best, int(row.shape[0])


def last_logits(outputs: Sequence[Any]) -> torch.Tensor:
    """Return the last row of the first output: [vocabulary], a floating-point dtype.

    Raises:
        Mismatch: the first output does not hold logits.
    """
    logits = outputs[0] if outputs else None
    if not isinstance(logits, torch.Tensor) or not logits.dim() or not logits.numel():
        raise Mismatch("its first output must be logits")
    if logits.dtype not in _LOGITS:
        dtype = str(logits.dtype).removeprefix("torch.")
        raise Mismatch(f"logits must be float32, float16 or bfloat16, not {dtype}")
    return logits.reshape(-1, logits.shape[-1])[-1]


def embedding_rows(outputs: Sequence[Any], dtype: str, width: int, decoder: str) -> torch.Tensor:
    """Return a copy of the first output as rows of embeddings, [1, number of rows, width].

    Args:
        outputs: outputs of a method, which another one may overwrite where both share memory.
        dtype, width: what the decoder takes.
        decoder: its name, for errors.

    Raises:
        Mismatch: the first output does not hold such rows.
    """
    output = outputs[0] if outputs else None
    if not isinstance(output, torch.Tensor) or not output.dim() or not output.numel():
        raise Mismatch("its first output must be embeddings")
    own = str(output.dtype).removeprefix("torch.")
    if own != dtype or output.shape[-1] != width:
        raise Mismatch(f"it returns {own} {list(output.shape)}, but '{decoder}' takes rows of {width} {dtype} values")
    return output.reshape(1, -1, width).clone()


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all rows of tensors [1, number of rows, width]."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def tensor_of(data: bytes | np.ndarray[Any, Any], dtype: str, shape: Sequence[int], dim_order: Sequence[int]) -> torch.Tensor:
    """Return the tensor whose elements lie in `data` in the order of `dim_order`, outermost first. It owns its memory."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch_dtype)
    strides, step = [0] * len(shape), 1
    for dim in reversed(dim_order):
        strides[dim], step = step, step * shape[dim]
    return flat.as_strided(tuple(shape), tuple(strides))


def bytes_of(tensor: torch.Tensor, dim_order: Sequence[int]) -> bytes:
    """Return the tensor's elements in the order of `dim_order`, outermost first."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().permute(tuple(dim_order)).contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def default_tensor(expected: FileValue, seed: int, index: int) -> torch.Tensor:
    """Return floats uniform in [0, 1) by splitmix64, everything else 0; the same values as in the C++ runner.

    Raises:
        Mismatch: etfarm does not support the dtype.
    """
    if expected.dtype not in ITEM_BYTES:
        raise Mismatch(f"input {index} has a dtype that etfarm does not carry")
    elements = prod(expected.shape)
    bits = _MANTISSA_BITS.get(expected.dtype)
    if bits is None:
        return tensor_of(bytes(elements * ITEM_BYTES[expected.dtype]), expected.dtype, expected.shape, expected.dim_order)
    start = seed ^ (0xD1342543DE82EF95 * (index + 1) & _MASK)
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, elements + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    uniform = (z >> np.uint64(64 - bits)).astype(np.float64) / float(1 << bits)
    exact = torch.from_numpy(uniform).to(getattr(torch, expected.dtype))
    return tensor_of(bytes_of(exact, (0,)), expected.dtype, expected.shape, expected.dim_order)


def _physical(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the dims in their memory order, without those of size 1, whose position has no effect."""
    return [dim for dim in order if shape[dim] != 1]


def described_value(index: int, value: FileValue) -> dict[str, Any]:
    """Return a value of a method's plan as in the answer to `method`."""
    event: dict[str, Any] = {"index": index, "kind": value.kind}
    if value.kind == "tensor":
        event |= {"name": value.name, "dtype": value.dtype, "shape": list(value.shape), "dim_order": list(value.dim_order)}
        event |= {"size_bytes": value.size_bytes, "planned": value.planned}
    return event


def heads_of(values: Sequence[Any], expected: Sequence[FileValue]) -> tuple[list[dict[str, Any]], bytes]:
    """Return the values' headers as the protocol carries them, and the tensors' bytes."""
    heads: list[dict[str, Any]] = []
    payload = bytearray()
    for index, (value, described) in enumerate(zip(values, expected, strict=True)):
        head: dict[str, Any] = {"index": index, "name": described.name}
        if value is None:
            head["kind"] = "none"
        elif isinstance(value, bool):
            head |= {"kind": "bool", "value": str(int(value))}
        elif isinstance(value, int):
            head |= {"kind": "int", "value": str(value)}
        elif isinstance(value, float):
            head |= {"kind": "double", "value": value.hex()}
        elif described.kind == "tensor":
            dtype = str(value.dtype).removeprefix("torch.")
            data = bytes_of(value, described.dim_order)
            head |= {"kind": "tensor", "dtype": dtype if dtype in ITEM_BYTES else "unsupported", "shape": list(value.shape)}
            head |= {"dim_order": list(described.dim_order), "offset": len(payload), "size_bytes": len(data)}
            payload += data
        else:
            head["kind"] = "unsupported"
        heads.append(head)
    return heads, bytes(payload)
