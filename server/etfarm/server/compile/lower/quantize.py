"""PT2E quantization of an exported program that keeps its dynamic shapes.

ExportSession's QuantizeStage only accepts eager modules, and captures them without dynamic shapes: a .pt2 with an int8
recipe would silently stay fp32, and a dynamic model would silently become static. Therefore quantization happens here, before
the session, which then lowers the quantized program.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from executorch.export.stages import QuantizeStage
from torch._dynamo.exc import UserError
from torch.export import Dim
from torch.export.dynamic_shapes import _combine_args
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.constant_fold import ConstantFolder
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from etfarm.server.compile.errors import (
    QuantizedNothing,
    QuantizerFailed,
    StageFailed,
    calibration_mismatch,
    calibration_not_finite,
)
from etfarm.server.compile.inputs import InputMismatch, check_inputs
from etfarm.server.compile.inspect import signature
from etfarm.server.compile.lower import batch_norms, far_values, fusion, half_precision, integers
from etfarm.server.compile.lower.unseen_values import Common, State
from etfarm.server.compile.program import fp32_layers, loading, values
from etfarm.server.compile.program.descriptions import describe_place, find_line, first_line
from etfarm.server.compile.program.places import places
from etfarm.server.graphs.call_sequence import unchanged
from etfarm.server.graphs.quantized_outputs import QUANTIZING, is_quantized
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire import tensors
from etfarm.wire.errors import error_for
from etfarm.wire.recipes import Options
from etfarm.wire.shared_state import PREFIX, buffer_names, written_buffers

_LOG_INTERVAL_S: Final = 2.0
"""Interval of the log lines of a long calibration, in seconds."""

_VIOLATED: Final = re.compile(r"Constraints violated \((.+?)\)!")
_DEFAULTS: Final = Options()

Module = Callable[..., Any]

_log = logging.getLogger(__name__)


def is_static(program: Any) -> bool:
    """Return whether activations are quantized with scales from calibration."""
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return any(target.startswith("quantized_decomposed.quantize_per_tensor.default") for target in targets)


def check(program: Any, name: str, method: str) -> None:
    """Refuse a program that cannot be quantized, before anything expensive runs.

    Args:
        name: the recipe's name for the message.

    Raises:
        ALREADY_QUANTIZED: the program has quantized operators.
        NO_EXAMPLE_INPUTS: the program carries no example inputs.
    """
    if is_quantized(program):
        raise error_for(
            "ALREADY_QUANTIZED",
            f"{method} is already quantized, and recipe {name} would quantize it again.",
            "Lower it with xnnpack_fp32, which keeps its quantized operators, or export the fp32 model.",
            stage="QUANTIZE",
            recipe=name,
            method=method,
        )
    if program.example_inputs is None:
        raise error_for(
            "NO_EXAMPLE_INPUTS",
            f"The .pt2 has no example inputs for {method}, which calibration needs.",
            "Export it again: torch.export.save keeps the example inputs.",
            stage="QUANTIZE",
            method=method,
        )


def quantize(
    program: Any,
    recipe: Any,
    name: str,
    method: str,
    calibration: Sequence[Path],
    options: Options = _DEFAULTS,
    unused: set[str] | None = None,
    kept: far_values.Kept | None = None,
) -> torch.nn.Module:
    """Return the program as a module with quantize and dequantize operators, with the same arguments and outputs.

    Args:
        recipe: a new QuantizationRecipe of ExecuTorch with PT2E quantizers.
        name: the recipe's name for the message.
        calibration: tensor files in addition to the program's example inputs; one at a time is in memory, and then the up to
            sixteen from which `unseen_values` begins.
        options: `copy_shared_layers` and `fuse_activations` of the recipe.
        unused: names of options, from which those that have an effect are removed.
        kept: gets what stays in fp32 for its values; see `far_values`.

    Raises:
        CALIBRATION_MISMATCH: a sample does not fit the program.
        CALIBRATION_FAILED: the model fails on a sample that fits.
        QuantizerFailed: only the model with observers fails on a sample.
        CALIBRATION_NOT_FINITE: a sample contains or produces NaN or infinity.
        QuantizedNothing: no operator was quantized; the result would silently be fp32.
        StageFailed: the recipe requires quantization-aware training, the model changes a weight, or it has operators in half
            precision that XNNPACK does not compute.
    """
    if recipe.is_qat:
        why = f"recipe {name} trains while it quantizes, but {method} is an exported program"
        raise StageFailed(
            "QUANTIZE", "QuantizationAwareTraining", why, "Train the model first, or use a recipe that only calibrates."
        )
    stage = QuantizeStage(recipe)
    unused = set() if unused is None else unused
    quantizer = stage._get_quantizer_for_prepare_pt2e(recipe.quantizers)
    far_kept = None
    if keeps_integers(recipe):
        quantizer = far_kept = far_values.FarValuesKept(integers.IntegersKept(quantizer))
        if options.fuse_activations:
            quantizer = fusion.ActivationsFused(quantizer)
    initial = _changed_buffers(program)
    prepared = _prepare(program, recipe, stage, quantizer, options, unused)
    if far_kept is not None:
        far_kept.watch()
    common = Common()
    _calibrate(prepared, program, recipe, name, method, calibration, initial, common)
    indexed = enumerate(islice(_samples(program, recipe, method, calibration), max(common.chosen, default=-1) + 1))
    samples = (pytree.tree_leaves(sample) for index, sample in indexed if index in common.chosen)
    # What other methods write is as little seen in calibration as what inputs had in common.
    foreign = {name for name in buffer_names(program).values() if name.startswith(PREFIX)} - initial.keys()
    final = {name: buffer.clone() for name, buffer in prepared.named_buffers() if name in initial}

    def go_on() -> int:
        _restore(prepared, final)
        return common.count

    state = State(initial.keys(), foreign, partial(_restore, prepared, initial), go_on)
    if kept is not None:
        kept.is_blank = common.is_blank
    # Inputs that show nothing at all are no example of use: what never applied in them says nothing about any operator.
    has_found = far_kept is not None and far_kept.find(prepared, samples, {} if common.is_blank else common.same, state)
    if kept is not None and far_kept is not None:
        kept.clipped, kept.untried, kept.grown = far_kept.kept.clipped, far_kept.kept.untried, far_kept.kept.grown
    elif kept is not None and not common.is_blank:
        # What other quantizers make of other values is not followed.
        names, placeholders = values.input_names(program), prepared.graph.find_nodes(op="placeholder")
        kept.clipped = [names[position] for position in sorted(common.same) if placeholders[position].users]
    if far_kept is not None and has_found:
        del prepared
        prepared = _prepare(program, recipe, stage, quantizer, options, unused)
        _restore(prepared, initial)
        _calibrate(prepared, program, recipe, name, method, calibration, initial)
        if kept is not None:
            kept.nodes, kept.inputs, kept.buffers = far_kept.kept.nodes, far_kept.kept.inputs, far_kept.kept.buffers
    if isinstance(quantizer, fusion.ActivationsFused) and quantizer.has_fused:
        unused.discard("fuse_activations")
    prepared = stage._apply_passes(prepared, recipe.pre_convert_passes)
    with _unfolded({*initial, *foreign}):
        converted = convert_pt2e(prepared)
        batch_norms.show_what_was_kept(converted)
        converted = stage._apply_passes(converted, recipe.post_convert_passes)
    if fp32_layers.by_xnnpack(recipe.quantizers):
        fusion.copy_dynamic_scales(converted)
        fusion.widen_convolutions(converted)
        half_precision.require_computable(converted)
    for node in converted.graph.nodes:
        is_weight = str(node.target).startswith("quantized_decomposed.quantize_per_channel")
        weight = getattr(node.args[0], "target", None) if is_weight else None
        if weight in initial:
            line = describe_place(places([next(iter(node.users), node)]))
            why = f"the model changes {weight}, which is the weight of a quantized layer{f' at {line}' if line else ''}."
            raise StageFailed("QUANTIZE", "ChangedWeight", why, "XNNPACK takes constant weights only: use the recipe portable.")
    # Otherwise the program would start with the buffers of the calibration, such as a KV cache full of samples.
    _restore(converted, initial)
    if not is_quantized(converted):
        raise QuantizedNothing(name, method)
    scales = [a for node in converted.graph.nodes if str(node.target).startswith(QUANTIZING) for a in node.args]
    if any(isinstance(scale, float) and not math.isfinite(scale) for scale in scales):
        raise calibration_not_finite(method, "", "", "")  # min-max observers accept any value
    return converted


def _prepare(
    program: Any, recipe: Any, stage: QuantizeStage, quantizer: Any, options: Options, unused: set[str]
) -> torch.nn.Module:
    """Return the program as a module with observers."""
    # check_inputs checks the guards; as a submodule they would break prepare_pt2e.
    captured = stage._apply_passes(program.module(check_guards=False), recipe.pre_prepare_passes)
    if keeps_integers(recipe):
        integers.keep_integers(captured)
    if options.copy_shared_layers and fusion.copy_shared_layers(captured):
        unused.discard("copy_shared_layers")
    batch_norms.keep_what_cannot_be_folded(captured, recipe.quantizers)
    for quantizer_of_recipe in recipe.quantizers:
        if (selection := getattr(quantizer_of_recipe, "selection", None)) is not None:
            selection.rows.clear()
    prepared: torch.nn.Module = stage._apply_passes(prepare_pt2e(captured, quantizer), recipe.post_prepare_passes)
    return prepared


def _calibrate(
    prepared: torch.nn.Module, program: Any, recipe: Any, name: str, method: str, calibration: Sequence[Path],
    initial: Mapping[str, Any], common: Common | None = None,
) -> None:  # fmt: skip
    """Run all samples, so that observers see the values, and `common` the inputs."""
    last_logged = time.monotonic()
    with torch.no_grad():
        for index, (args, kwargs) in enumerate(_samples(program, recipe, method, calibration)):
            if common is not None:
                common.note(pytree.tree_leaves((args, kwargs)))
            try:
                _run(prepared, args, kwargs, initial)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                sample = f"calibration sample {index - 1}" if index else "the example inputs"
                if "is not finite" in str(error):
                    inputs, line = _not_finite(program, args, kwargs), _not_finite_line(program, args, kwargs)
                    raise calibration_not_finite(method, sample, inputs, line) from error
                if why := _failure_of_model(program, args, kwargs):
                    raise error_for(
                        "CALIBRATION_FAILED",
                        f"{method} fails on {sample}: {why}.",
                        "Give samples that the model accepts: indices within their tables, sizes within the ranges of the "
                        "dynamic dims.",
                        stage="QUANTIZE",
                        method=method,
                        sample=sample,
                        why=why,
                    ) from error
                raise QuantizerFailed(name, method, first_line(error), _failing_line(prepared, args, kwargs)) from error
            if time.monotonic() - last_logged > _LOG_INTERVAL_S:
                last_logged = time.monotonic()
                _log.info("calibrated %d of %d samples of %s", index + 1, len(calibration) + 1, method)


def _run(prepared: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], initial: Mapping[str, Any]) -> None:
    """Run a sample after those before, as the calls of a session follow each other, so that observers see what the state becomes.

    A sample that the model does not take then, such as the start of another sequence, runs from the initial state.
    """
    try:
        prepared(*args, **kwargs)
    except Exception as error:
        if not initial or is_out_of_memory(error):
            raise
        _restore(prepared, initial)
        prepared(*args, **kwargs)


@contextmanager
def _unfolded(buffers: Collection[str]) -> Iterator[None]:
    """Let no quantized value of buffers become a constant: torchao takes only those for state that copy_() or put_() changes.

    Source: torchao/quantization/pt2e/constant_fold.py 0.18.
    """
    find = ConstantFolder._find_mutable_buffers

    def find_all(folder: Any) -> set[Any]:
        return {*find(folder), *(node for node in folder.module.graph.find_nodes(op="get_attr") if node.target in buffers)}

    ConstantFolder._find_mutable_buffers = find_all
    try:
        yield
    finally:
        ConstantFolder._find_mutable_buffers = find


def keeps_integers(recipe: Any) -> bool:
    """Return whether a QuantizationRecipe's quantizers would turn integers into floats; see `integers`."""
    return fp32_layers.by_xnnpack(recipe.quantizers)


def _failure_of_model(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why the program itself fails on a sample; empty if it accepts the sample."""
    try:
        with unchanged(program):
            program.module(check_guards=False)(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return first_line(error)
    return ""


def _not_finite_line(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the source line of the operator that makes the first NaN of a sample, or else the first infinity; empty if none."""
    finder = _NotFinite(program.module(check_guards=False))
    with torch.no_grad(), unchanged(program):
        try:
            finder.run(*pytree.tree_leaves((args, kwargs)))
        except Exception as error:
            if is_out_of_memory(error):
                raise
    return describe_place(places([finder.nan or finder.infinite])) if finder.nan or finder.infinite else ""


class _NotFinite(torch.fx.Interpreter):  # type: ignore[misc]
    """Finds the first operators whose outputs have NaN and infinities."""

    nan: Any = None
    infinite: Any = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node, and look at its output until one has NaN."""
        value = super().run_node(n)
        if n.op == "call_function" and self.nan is None and isinstance(value, torch.Tensor) and value.is_floating_point():
            if bool(value.isnan().any()):
                self.nan = n
            elif self.infinite is None and not bool(value.isfinite().all()):
                self.infinite = n
        return value


def _failing_line(prepared: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the source line of the operator that fails in a prepared module; empty if it has none."""
    try:
        torch.fx.Interpreter(prepared).run(*args, *kwargs.values())
    except Exception as error:  # noqa: BLE001 - the message ends in the stack trace of the operator
        return find_line(str(error))
    return ""


def export_again(module: torch.nn.Module, program: Any, strict: bool) -> Any:
    """Export a quantized module with the inputs and the dynamic dims of its original program.

    Raises:
        StageFailed: a dynamic dim became static.
    """
    args, kwargs = program.example_inputs

    def export(checked: Collection[str] = ()) -> Any:
        shapes = _collect_dynamic_shapes(program, module, args, kwargs, checked)
        with torch.no_grad():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)

    try:
        exported = export()
    except UserError as error:
        # Of a program whose Dim.DYNAMIC has conditions, torch requires the same ones again, and does not prove them for a Dim.
        violated = _VIOLATED.match(str(error)) if program._guards_code else None
        if violated is None:
            raise
        exported = export(violated[1].split(", "))
    for before, after in zip(signature.of_exported(program).inputs, signature.of_exported(exported).inputs, strict=True):
        for dim, (was, now) in enumerate(zip(before.dims, after.dims, strict=True)):
            if was.min != was.max and now.min == now.max:
                why = f"dim {dim} of {before.name!r} became static ({now.min}) when it was quantized"
                raise StageFailed("TORCH_EXPORT", "Specialized", why, "Use a float recipe, or export with static shapes.")
    return exported


def settle_origins(program: Any) -> None:
    """Replace the addresses of nodes' source graphs by the numbers 1, 2, 3, so that equal programs have equal bytes.

    ExecuTorch derives debug handles from these numbers, and only compares them for equality.
    """
    numbers: dict[int, int] = {}
    seen: set[int] = set()

    def settle(sources: Sequence[Any]) -> None:
        for source in sources:
            info = source.node_info
            if info is not None and id(info) not in seen:
                seen.add(id(info))
                info.graph_id = numbers.setdefault(info.graph_id, len(numbers) + 1)
                source._dict = None
            settle(source.from_node)

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                settle(node.meta.get("from_node", ()))


def _changed_buffers(program: Any) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that a program changes, by name."""
    buffers = {**program.constants, **program.state_dict}
    return {name: buffers[name].clone() for name in sorted(written_buffers(program)) if name in buffers}


def _restore(module: torch.nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in initial:
            buffer.copy_(initial[name])


def _samples(
    program: Any, recipe: Any, method: str, calibration: Sequence[Path]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the recipe's samples, or else the program's example inputs; then the calibration samples."""
    if recipe.calibration_inputs_fn is not None:
        for arguments in recipe.calibration_inputs_fn():
            yield arguments, {}
    else:
        yield program.example_inputs
    expected = signature.of_exported(program)
    for index, path in enumerate(calibration):
        try:
            sample = tensors.decode(path.read_bytes())
            check_inputs(method, expected, sample)
        except (InputMismatch, tensors.BadTensorFile) as error:
            raise calibration_mismatch(method, index, error.message.rstrip(".")) from None
        yield values.to_arguments(program, [values.to_leaf(value) for value in sample])


def _not_finite(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the names of the inputs that contain NaN or infinity."""
    leaves = zip(values.input_names(program), pytree.tree_leaves((args, kwargs)), strict=True)
    return ", ".join(repr(name) for name, leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.isfinite().all())


def _collect_dynamic_shapes(
    program: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checked: Collection[str]
) -> Any:
    """Return torch.export's dynamic_shapes of an exported program, with a Dim for each symbol; None if all dims are static.

    Args:
        checked: symbols with conditions, of which each dim gets Dim.DYNAMIC.
    """
    dims: dict[str, Any] = {}
    by_name = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    specs = []
    for name in values.input_names(program):
        value = by_name.get(name)
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        dynamic = {i: _dim(program, n, dims, checked) for i, n in enumerate(shape) if isinstance(n, torch.SymInt)}
        specs.append(dynamic or None)
    if not any(specs):
        return None
    leaves, tree = pytree.tree_flatten((args, kwargs))
    assert len(leaves) == len(specs)
    arguments, keywords = pytree.tree_unflatten(specs, tree)
    return _combine_args(module, arguments, keywords)


def _dim(program: Any, size: torch.SymInt, dims: dict[str, Any], checked: Collection[str]) -> Any:
    expression = size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) == 1 and str(symbols[0]) not in checked:
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
