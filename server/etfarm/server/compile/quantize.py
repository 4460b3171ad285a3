"""PT2E quantization of an exported program, dynamic shapes kept.

ExportSession's own QuantizeStage takes eager modules only, and captures without the dynamic shapes: a .pt2 with an int8
recipe would come out as fp32, and a dynamic model as a static one, both without a word. So it is done here, in front of
the session, which then lowers the quantized program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.export.stages import QuantizeStage
from torch.export import Dim
from torch.export.dynamic_shapes import _combine_args
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from etfarm.server.compile import facts, loading, values
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.refusals import (
    AlreadyQuantized,
    BadCalibrationInput,
    InputMismatch,
    NoExampleInputs,
    QuantizedNothing,
    StageFailed,
)
from etfarm.wire import tensors

_QUANTIZED = ("quantized_decomposed.", "torchao.quantize_affine", "torchao.dequantize_affine", "torchao.choose_qparams")
_HEAVY = ("conv1d", "conv2d", "conv3d", "conv_transpose", "convolution", "linear", "matmul", "mm", "bmm", "addmm")

Module = Callable[..., Any]


def is_quantized(program: Any) -> bool:
    """Whether a graph has quantize or dequantize operators."""
    return any(str(node.target).startswith(_QUANTIZED) for node in program.graph.nodes if node.op == "call_function")


def quantize(program: Any, recipe: Any, name: str, method: str, calibration: Sequence[Path]) -> torch.nn.Module:
    """The program as a module with quantize and dequantize operators; same arguments, same outputs.

    Args:
        recipe: ExecuTorch's QuantizationRecipe with PT2E quantizers.
        name: the recipe's name, for the sentence.
        calibration: tensor files, beside the program's own example inputs.

    Raises:
        AlreadyQuantized, NoExampleInputs, BadCalibrationInput: as they say.
        QuantizedNothing: no operator was quantized; the result would be silent fp32.
    """
    if is_quantized(program):
        raise AlreadyQuantized(name, method)
    if program.example_inputs is None:
        raise NoExampleInputs(method)
    samples = list(_samples(program, method, calibration))
    stage = QuantizeStage(recipe)
    # Guards are checked by check_inputs; as a submodule they would be in prepare_pt2e's way.
    captured = stage._apply_passes(program.module(check_guards=False), recipe.pre_prepare_passes)
    prepared = prepare_pt2e(captured, stage._get_quantizer_for_prepare_pt2e(recipe.quantizers))
    prepared = stage._apply_passes(prepared, recipe.post_prepare_passes)
    with torch.no_grad():
        for args, kwargs in samples:
            prepared(*args, **kwargs)
    prepared = stage._apply_passes(prepared, recipe.pre_convert_passes)
    converted: torch.nn.Module = stage._apply_passes(convert_pt2e(prepared), recipe.post_convert_passes)
    if not is_quantized(converted):
        raise QuantizedNothing(name, method)
    return converted


def export_again(module: torch.nn.Module, program: Any, strict: bool) -> Any:
    """Exports a quantized module with the inputs, and the dynamic dims, of the program that it was.

    Raises:
        StageFailed: a dim that was dynamic became static.
    """
    args, kwargs = program.example_inputs
    shapes = _dynamic_shapes(program, module, args, kwargs)
    with torch.no_grad():
        again = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)
    for before, after in zip(facts.of_exported(program)["inputs"], facts.of_exported(again)["inputs"], strict=True):
        for dim, (was, now) in enumerate(zip(before["dims"] or [], after["dims"] or [], strict=True)):
            if isinstance(was, dict) and not isinstance(now, dict):
                why = f"dim {dim} of {before['name']!r} became static ({now}) when it was quantized"
                raise StageFailed("TORCH_EXPORT", "Specialized", why, "Use a float recipe, or export with static shapes.")
    return again


def stayed_fp32(program: Any) -> Mapping[str, int]:
    """How many convolutions, linears and matrix products take an input that no dequantize operator made, by operator."""
    left: Counter[str] = Counter()
    for node in program.graph.nodes:
        operator = str(node.target).removeprefix("aten.").partition(".")[0]
        if node.op != "call_function" or operator not in _HEAVY:
            continue
        source = node.args[1 if operator == "addmm" else 0]
        if "dequantize" not in str(getattr(source, "target", "")):
            left[operator] += 1
    return left


def _samples(program: Any, method: str, calibration: Sequence[Path]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    expected = facts.of_exported(program)
    found = [program.example_inputs]
    for index, path in enumerate(calibration):
        try:
            sample = tensors.decode(path.read_bytes())
            check_inputs(method, expected, sample)
        except (InputMismatch, tensors.BadTensorFile) as error:
            raise BadCalibrationInput(method, index, error.message.rstrip(".")) from None
        found.append(values.to_arguments(program, [values.to_leaf(value) for value in sample]))
    return found


def _dynamic_shapes(program: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.export's dynamic_shapes of an exported program, one Dim a symbol; None when all dims are static."""
    dims: dict[str, Any] = {}
    by_name = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    specs = []
    for name in values.input_names(program):
        value = by_name.get(name)
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        dynamic = {i: _dim(program, n, dims) for i, n in enumerate(shape) if isinstance(n, torch.SymInt)}
        specs.append(dynamic or None)
    if not any(specs):
        return None
    leaves, tree = pytree.tree_flatten((args, kwargs))
    assert len(leaves) == len(specs)
    arguments, keywords = pytree.tree_unflatten(specs, tree)
    return _combine_args(module, arguments, keywords)


def _dim(program: Any, size: torch.SymInt, dims: dict[str, Any]) -> Any:
    expression = size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) == 1:
        symbol = symbols[0]
        factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
        if factor.is_Integer and factor > 0 and offset.is_Integer and expression == factor * symbol + offset:
            limits = program.range_constraints[symbol]
            low = int(limits.lower) if limits.lower.is_Integer else 0
            dim = dims.setdefault(str(symbol), Dim(str(symbol), min=low, max=int(limits.upper)))
            scaled = dim if factor == 1 else int(factor) * dim
            return scaled + int(offset) if offset != 0 else scaled
    low, high = loading.bounds(program, size)
    return Dim.DYNAMIC(min=low, max=high)
