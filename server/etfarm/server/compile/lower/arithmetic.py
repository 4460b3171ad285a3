"""Arithmetic that ExecuTorch computes in another dtype than PyTorch, or in fewer bits: written so that it has PyTorch's results.

ExecuTorch makes tensors of Python numbers, of float32 or int64, which are inexact beside float64, and whose dtype counts beside a
tensor without dims: an int32 plus 1 becomes an int64. Of kernels, some compute integers in floats, or float64 in float32.

Source: exir/passes/scalar_to_tensor_pass.py, kernels/optimized/cpu/op_sum.cpp, and op_fmod.cpp, op_div.cpp, op_pow.cpp,
op_remainder.cpp and pattern/unary_ufunc_realhbf16.cpp of kernels/portable/cpu, of executorch 1.5.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from executorch.exir.pass_base import ProxyValue, map_args
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass as Pass
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

Make = Callable[..., Any]
"""Function that adds a call of an operator with arguments to the new graph, and returns its value."""

_ATEN: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)


@contextmanager
def exact() -> Iterator[None]:
    """Compute as PyTorch does in programs that become edge programs inside the context."""
    call_operator = Pass.call_operator

    def call_exactly(own: Any, operator: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        def make(operator: Any, *args: Any, **kwargs: Any) -> Any:
            return call_operator(own, operator, *_with_tensors(operator, args, kwargs, make), meta)

        is_integer = bool(args) and _is_tensor(args[0]) and _is_integer(_dtype(args[0]))
        rewrite = (_OF_INTEGERS if is_integer else _OF_FLOATS).get(operator)
        result = rewrite(make, *args, **kwargs) if rewrite is not None else None
        if result is None:
            result = make(operator, *args, **kwargs)
        wanted = meta.data.get("val")
        if isinstance(wanted, torch.Tensor) and _is_tensor(result) and _dtype(result) != wanted.dtype:
            return call_operator(own, _ATEN._to_copy.default, (result,), {"dtype": wanted.dtype}, meta)
        return result

    Pass.call_operator = call_exactly
    try:
        yield
    finally:
        Pass.call_operator = call_operator


def _with_tensors(operator: Any, args: Any, kwargs: Any, make: Make) -> tuple[Any, Any]:
    """Return arguments with tensors in place of numbers whose dtype matters; ExecuTorch makes the others."""
    values = [value.to_tensor() for value in (*args, *kwargs.values()) if _is_tensor(value)]
    numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, int | float)]
    if not values:
        return args, kwargs
    has_dims = any(value.dim() for value in values)

    def convert(value: Any, argument: Any) -> Any:
        number = value.data if isinstance(value, ProxyValue) else value
        if not isinstance(argument.type, torch.TensorType) or number is None:
            return value
        if _is_tensor(value):
            is_too_narrow = any(_exceeds(each, _dtype(value)) for each in numbers)
            return make(_ATEN._to_copy.default, value, dtype=torch.float32) if is_too_narrow else value
        _, dtype = elementwise_dtypes(*values, number, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        if dtype in _HALF or (has_dims and dtype not in (torch.int64, torch.float64)):
            return value
        if isinstance(value, ProxyValue):
            wide = torch.int64 if isinstance(number, torch.SymInt) else torch.float64
            tensor = make(_ATEN.scalar_tensor.default, value, dtype=wide)
            return tensor if dtype == wide else make(_ATEN._to_copy.default, tensor, dtype=dtype)
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.tensor(value).to(dtype) if type(value) is int else torch.tensor(value, dtype=dtype)

    converted: tuple[Any, Any] = map_args(operator, convert, args, kwargs)
    return converted


def _exceeds(number: float, dtype: torch.dtype) -> bool:
    """Return whether a number is infinite in a dtype of half precision."""
    return dtype in _HALF and math.isfinite(number) and abs(number) > torch.finfo(dtype).max


def _round(make: Make, x: Any) -> Any:
    """Return integers as they are; they are rounded in float32."""
    return x


def _sum(make: Make, x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum one dim as two, the first of which has the size 1: the kernel for one computes all dtypes in float32."""
    rank = x.to_tensor().dim()
    if not isinstance(dims, list | tuple) or len(dims) != 1 or not rank or dtype not in (None, _dtype(x)):
        return None
    dim = dims[0] % rank
    if dtype is None and _dtype(x) not in (torch.int64, torch.float64):
        return None  # the sum is of int64
    total = make(_ATEN.sum.dim_IntList, make(_ATEN.unsqueeze_copy.default, x, dim), [dim, dim + 1], dtype=_dtype(x))
    return make(_ATEN.unsqueeze_copy.default, total, dim) if keepdim else total


def _sum_of_floats(make: Make, x: Any, *args: Any, **kwargs: Any) -> Any:
    return _sum(make, x, *args, **kwargs) if _is_tensor(x) and _dtype(x) == torch.float64 else None


def _divide(make: Make, x: Any, by: Any, *, rounding_mode: str | None = None) -> Any:
    """Round a quotient towards 0 from one that is rounded down; that towards 0 is computed in float64."""
    if rounding_mode != "trunc" or torch.int64 not in map(_dtype, (x, by)) or not _is_integer(_dtype(by)):
        return None
    down = make(_ATEN.div.Tensor_mode, x, by, rounding_mode="floor")
    is_negative = make(_ATEN.lt.Scalar, down, 0)
    is_rounded = make(_ATEN.ne.Tensor, make(_ATEN.mul.Tensor, down, by), x)
    return make(_ATEN.add.Tensor, down, make(_ATEN.bitwise_and.Tensor, is_negative, is_rounded))


def _fmod(make: Make, x: Any, by: Any) -> Any:
    quotient = _divide(make, x, by, rounding_mode="trunc")
    return None if quotient is None else make(_ATEN.sub.Tensor, x, make(_ATEN.mul.Tensor, quotient, by))


def _power(make: Make, x: Any, exponent: Any) -> Any:
    """Multiply, which overflows as in PyTorch; powers are computed in float64."""
    if type(exponent) is not int or exponent < 1 or _dtype(x) == torch.bool:
        return None
    result = None
    for bit in f"{exponent:b}":
        if result is not None:
            result = make(_ATEN.mul.Tensor, result, result)
        if bit == "1":
            result = x if result is None else make(_ATEN.mul.Tensor, result, x)
    return result


def _remainder(make: Make, x: Any, by: Any) -> Any:
    """Compute a remainder of float64 from fmod, which has the sign of the dividend; it is computed in float32."""
    if torch.float64 not in map(_dtype, (x, by)):
        return None
    remainder = make(_ATEN.fmod.Tensor, x, by)
    has_other_sign = make(_ATEN.lt.Scalar, make(_ATEN.mul.Tensor, make(_ATEN.sign.default, remainder), by), 0)
    return make(_ATEN.where.self, has_other_sign, make(_ATEN.add.Tensor, remainder, by), remainder)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ProxyValue) and value.is_tensor()


def _dtype(value: Any) -> torch.dtype:
    """Return the dtype of a tensor; of a number, int64 or float32."""
    if _is_tensor(value):
        return value.to_tensor().dtype
    return torch.int64 if isinstance(getattr(value, "data", value), int | torch.SymInt) else torch.float32


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


_OF_INTEGERS: Final[Mapping[Any, Make]] = {
    _ATEN.floor.default: _round,
    _ATEN.ceil.default: _round,
    _ATEN.round.default: _round,
    _ATEN.trunc.default: _round,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.div.Tensor_mode: _divide,
    _ATEN.div.Scalar_mode: _divide,
    _ATEN.fmod.Tensor: _fmod,
    _ATEN.fmod.Scalar: _fmod,
    _ATEN.pow.Tensor_Scalar: _power,
}
"""Functions that compute operators of integers otherwise, or return None."""
_OF_FLOATS: Final[Mapping[Any, Make]] = {
    _ATEN.sum.dim_IntList: _sum_of_floats,
    _ATEN.remainder.Tensor: _remainder,
    _ATEN.remainder.Scalar: _remainder,
}
"""The same of floats."""
