"""Errors of models and recipes that compilation detects, each with a reason, a message and a remedy.

Standard library only. Errors of uploaded bytes are in `screening.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from etfarm.server.compile.alternatives import use_instead
from etfarm.wire.dim_guards import WHOLE_NUMBERS, computes_in_floats, how_to_exclude, name_dims
from etfarm.wire.errors import EtfarmError, UserError, error_for
from etfarm.wire.fixed_numbers import how_to_vary


def recipe_needs_eager_module(recipe: str, model: str) -> EtfarmError:
    """Return the error of a recipe that replaces modules, which an exported program lacks: the result would silently be fp32.

    Args:
        model: the candidate's name.
    """
    return error_for(
        "RECIPE_NEEDS_EAGER_MODULE",
        f"Recipe {recipe} quantizes an eager module before the export, but {model} is an exported program: nothing "
        "of it would be quantized.",
        "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel.",
        recipe=recipe, model=model,
    )  # fmt: skip


class QuantizedNothing(UserError):
    """The recipe quantizes, but the program has no quantized operator.

    A warning where the quantizers find none to quantize; an error where the client says that it has quantized.
    """

    reason = "QUANTIZED_NOTHING"

    def __init__(self, recipe: str, method: str, stage: str = "QUANTIZE") -> None:
        super().__init__(
            f"Recipe {recipe} found nothing to quantize in {method}: it is plain fp32.",
            "Use xnnpack_fp32, or a recipe that quantizes the operators of this model.",
            stage=stage, recipe=recipe, method=method,
        )  # fmt: skip


def name_not_found(argument: str, name: str, methods: str, why: str, nearest: Sequence[str]) -> EtfarmError:
    """Return the error of a name in a recipe file's quantizer that selects nothing in the model."""
    remedy = f"Did you mean {' or '.join(map(repr, nearest))}?" if nearest else "Leave it out."
    return error_for(
        "RECIPE_NAME_NOT_FOUND",
        f"{argument} names {name!r}, which selects nothing in {methods}: {why}.", remedy,
        stage="QUANTIZE", argument=argument, name=name, methods=methods, nearest=",".join(nearest),
    )  # fmt: skip


def dim_without_maximum(method: str, argument: str, dim: int, symbol: str) -> EtfarmError:
    """Return the error that a dynamic dimension has no finite maximum; ExecuTorch plans memory for the largest input."""
    return error_for(
        "DIM_WITHOUT_MAXIMUM",
        f"{method}: dim {dim} of {argument!r} has no maximum, and ExecuTorch plans memory for the largest input.",
        f'Give one, for example dynamic_shapes={{"{argument}": {{{dim}: Dim("{symbol}", max=64)}}}}.',
        stage="TORCH_EXPORT", method=method, argument=argument, dim=dim, symbol=symbol,
    )  # fmt: skip


def dynamic_number(method: str, argument: str, kind: str) -> EtfarmError:
    """Return the error that an input is a Python number that was declared dynamic.

    Args:
        kind: `int` or `double`.
    """
    name = "float" if kind == "double" else kind
    return error_for(
        "UNSUPPORTED_INPUT",
        f"{method}: input {argument!r} is a dynamic {name}: programs of ExecuTorch take numbers that vary only as tensors.",
        f"{how_to_vary(kind)} To keep it constant, give None for it in dynamic_shapes.",
        stage="TORCH_EXPORT", method=method, argument=argument, got=f"a dynamic {name}",
    )  # fmt: skip


def training_mode(method: str, operator: str, stage: str = "TORCH_EXPORT", where: str = "") -> EtfarmError:
    """Return the error that the program computes an operator in training mode.

    Args:
        where: the operator's source line, like `models/net.py:31 (F.dropout(x, 0.5))`; may be empty.
    """
    return error_for(
        "TRAINING_MODE",
        f"{method} computes {operator} in training mode{f' at {where}' if where else ''}, which would change results at "
        "inference.",
        "Call .eval() on the module before the export. Functions take the mode from their caller: F.dropout(x, p, "
        "training=self.training), and dropout_p=0.0 of scaled_dot_product_attention. A batch norm without running statistics "
        "always computes those of the batch: use nn.GroupNorm or nn.InstanceNorm2d instead.",
        stage=stage, method=method, operator=operator, source=where,
    )  # fmt: skip


_NEGATIVE: Final = re.compile(r"u\d+ < 0")
"""The condition of a slice that starts at a number which depends on values."""
_BELOW: Final = re.compile(r"<= -u\d+ - 1$")
"""At the end of a condition that torch puts on a negative index."""


def data_dependent_branch(stage: str, expression: str, where: str) -> EtfarmError:
    """Return the error that the model branches on a tensor's value, which an exported program cannot do.

    Args:
        expression: the condition in torch's notation, like `u0 > 3`; may be empty.
        where: the source line, like `models/net.py:31 (if x.sum() > 0:)`; may be empty.
    """
    return error_for(
        "DATA_DEPENDENT_BRANCH",
        f"The model branches on a tensor's value{f' at {where}' if where else ''}, but an exported program has a single path"
        f"{f' ({expression})' if expression else ''}.",
        "Use torch.where or torch.cond, remove the branch from the model, or bound a size with torch._check."
        + (" Index with one dim: x[i.reshape(1)].squeeze(0) instead of x[i]." if _BELOW.search(expression) else "")
        + (
            " Before a slice that starts at a number, say that it is not negative and fits: torch._check(i >= 0) and "
            "torch._check(i + n <= x.shape[0]) for x[i : i + n]." if _NEGATIVE.fullmatch(expression) else ""
        ),
        stage=stage, expression=expression, source=where,
    )  # fmt: skip


def inner_size(stage: str, expression: str, operator: str) -> EtfarmError:
    """Return the error that a dim behind the first has a size that depends on values, so that ExecuTorch cannot sort the strides.

    Args:
        expression: the condition in torch's notation, like `20*u16 < 20`; may be empty.
        operator: the operator with its line, like `aten::index at models/net.py:31 (x[:, y > 0.5])`.
    """
    return error_for(
        "DATA_DEPENDENT_BRANCH",
        f"ExecuTorch takes a size that depends on values in the first dim only, and a later one has it in {operator}"
        f"{f' ({expression})' if expression else ''}.",
        "Keep all elements, those left out as zeros: torch.where(c[:, None, None], x, 0.0) for x[:, c] of four dims. Or keep "
        "that dim first, in what you return, too: x.transpose(0, 1)[c] for x[:, c].",
        stage=stage, expression=expression, source=operator,
    )  # fmt: skip


def dim_specialized(stage: str, dims: str, why: str, where: str) -> EtfarmError:
    """Return the error that a dim that was declared dynamic can only have one size or a narrower range.

    Args:
        dims: names of the dims.
        why: torch's explanation.
    """
    bounds, why = how_to_exclude(why), name_dims(why)
    return error_for(
        "DIM_SPECIALIZED",
        f"Dim {dims} cannot be dynamic as requested{f' at {where}' if where else ''}: {why}.",
        WHOLE_NUMBERS
        if computes_in_floats(why)
        else f"Give the dim {bounds}, or export it as static."
        if bounds
        else "Remove what fixes the size (a number in a reshape, an assert) from the model, or export the dim as static.",
        stage=stage, dims=dims, why=why, source=where,
    )  # fmt: skip


def unbounded_size(stage: str, symbol: str, operators: str) -> EtfarmError:
    """Return the error that a tensor's size depends on values and has no bound."""
    return error_for(
        "UNBOUNDED_SIZE",
        f"The size {symbol} depends on values and has no maximum{f' (produced by {operators})' if operators else ''}, but "
        "ExecuTorch plans memory for the largest size.",
        "Bound it in the model, for example torch._check(n <= 1024), or use operators whose output sizes follow "
        "from input sizes.",
        stage=stage, symbol=symbol, operators=operators,
    )  # fmt: skip


def missing_out_variants(stage: str, operators: str, names: str) -> EtfarmError:
    """Return the error of operators that no delegate took, and for which ExecuTorch has no kernel.

    Args:
        operators: the operators with their source lines, like `aten::bincount at models/net.py:31 (torch.bincount(x))`.
        names: the operators without source lines.
    """
    return error_for(
        "MISSING_OUT_VARIANTS",
        f"ExecuTorch has no kernel for operators that no delegate took: {operators}.",
        f"{use_instead(names)}: ExecuTorch's portable kernels lack some Core ATen operators too. "
        "Or use a recipe whose backend supports them.",
        stage=stage, operators=names, places=operators,
    )  # fmt: skip


_TORCHAO: Final = (
    "Of torchao's configurations, recipes of XNNPACK take Int8DynamicActivationIntxWeightConfig for linears, with int4 weights "
    "in groups of a multiple of 32 or int8 weights per channel (PerAxis(0)). The recipe portable, too, takes "
    "Int8WeightOnlyConfig. For embeddings, all recipes take IntxWeightOnlyConfig with int8, int4 or int2 weights, unless the "
    "recipe file sets do_quant_fusion_and_const_prop = false. Or leave these layers in fp32."
)


_TORCHAO_IN_BRANCHES: Final = (
    "No delegate computes within branches and loops. Quantize these layers with torchao's Int8WeightOnlyConfig, and use the "
    "recipe xnnpack_fp32 or portable, which take it there. Or, with Int8DynamicActivationIntxWeightConfig and a recipe of "
    "XNNPACK, compute them outside: before torch.cond, and choose with torch.where(c, self.a(x), y); and in place of map or scan "
    "in a loop of Python, as in torch.stack([self.a(v[None])[0] for v in x.unbind()])."
)


def unsupported_quantized_op(stage: str, operators: str, names: str, *, is_in_branch: bool = False) -> EtfarmError:
    """Return the error of operators as in `missing_out_variants` that are all quantized ones.

    Args:
        is_in_branch: whether one of them is within a branch or loop.
    """
    torchao = _TORCHAO_IN_BRANCHES if is_in_branch else _TORCHAO
    return error_for(
        "UNSUPPORTED_QUANTIZED_OP",
        "The recipe's backend does not support these quantized operators, and ExecuTorch has no kernel for them: "
        f"{operators}.",
        torchao if "torchao::" in names
        else "Use a backend that supports this quantization (XNNPACK: per-tensor and per-channel int8, 4-bit linears), or "
        "leave these layers in fp32.",
        stage=stage, operators=names, places=operators,
    )  # fmt: skip


def zero_points_ignored(method: str, operators: str, names: str) -> EtfarmError:
    """Return the error that weights have zero points, which XNNPACK ignores."""
    return error_for(
        "UNSUPPORTED_QUANTIZED_OP",
        f"In {method}, the quantized weights of these operators have zero points, which XNNPACK ignores: {operators}.",
        "Quantize weights symmetrically, as by weight_mapping_type=MappingType.SYMMETRIC in torchao's configuration.",
        stage="TO_EDGE_TRANSFORM_AND_LOWER", operators=names, places=operators,
    )  # fmt: skip


def operator_not_core_aten(stage: str, operators: str, names: str, *, has_kernel: bool = True) -> EtfarmError:
    """Return the error that the edge dialect's verifier refuses an operator outside of Core ATen.

    Args:
        has_kernel: whether ExecuTorch has a kernel for it all the same.
    """
    exceptions = (
        "or list it in the recipe file's [edge] core_aten_exceptions, as ExecuTorch has a kernel for it."
        if has_kernel
        else "ExecuTorch has no kernel for it, so that [edge] core_aten_exceptions in a recipe file helps only where the "
        "recipe's backend or the device's runtime adds one."
    )
    use = use_instead(names)
    return error_for(
        "OPERATOR_NOT_CORE_ATEN",
        f"ExecuTorch has kernels for Core ATen only, which does not include {operators}.",
        f"{use}; {exceptions}" if has_kernel else f"{use}. {exceptions}",
        stage=stage, operators=names, places=operators,
    )  # fmt: skip


def unsupported_dtypes(stage: str, operators: str, names: str, dtypes: str) -> EtfarmError:
    """Return the error that the edge dialect's verifier refuses complex dtypes or mixed dtypes, which no kernel accepts."""
    is_complex = "complex" in dtypes
    return error_for(
        "UNSUPPORTED_DTYPES",
        f"ExecuTorch has no kernel for these dtypes ({dtypes}): {operators}.",
        "ExecuTorch has no complex numbers: compute real and imaginary parts separately." if is_complex
        else "Convert one of the inputs with .to(dtype) before the operator.",
        stage=stage, operators=names, places=operators, dtypes=dtypes,
    )  # fmt: skip


def operator_with_effects(stage: str, operators: str, names: str) -> EtfarmError:
    """Return the error that the model has an operator with a side effect, which ExecuTorch's passes cannot order."""
    return error_for(
        "OPERATOR_WITH_EFFECTS",
        f"The model has operators with side effects{f': {operators}' if operators else ''}, which ExecuTorch cannot lower.",
        f"{use_instead(names.replace('aten.', 'aten::'))}." if "linalg" in names
        else "Remove prints, asserts and checks of values from the model.",
        stage=stage, operators=names, places=operators,
    )  # fmt: skip


class QuantizerFailed(UserError):
    """The model accepts a sample, but no longer once the recipe's quantizer has inserted its observers.

    Args:
        where: the operator's source line, like `models/net.py:31 (y = self.table(x))`; may be empty.
    """

    reason = "QUANTIZER_FAILED"

    def __init__(self, recipe: str, method: str, why: str, where: str) -> None:
        super().__init__(
            f"{method} fails once recipe {recipe} has prepared it for calibration{f', at {where}' if where else ''}: {why}.",
            "The model itself runs: leave this part in fp32 with a recipe file (`skip_modules` of its quantizer), or use another "
            "recipe.",
            stage="QUANTIZE", recipe=recipe, method=method, why=why, source=where,
        )  # fmt: skip


def calibration_mismatch(method: str, sample: int, why: str) -> EtfarmError:
    """Return the error that a calibration sample does not fit the model."""
    return error_for(
        "CALIBRATION_MISMATCH",
        f"Calibration sample {sample} does not fit {method}: {why}.",
        "Give each sample the model's inputs in their order, with their dtypes and shapes.",
        stage="QUANTIZE", method=method, sample=sample, why=why,
    )  # fmt: skip


def calibration_not_finite(method: str, sample: str, inputs: str, line: str) -> EtfarmError:
    """Return the error that a sample contains or produces NaN or infinity, and quantization takes its ranges from samples.

    Args:
        sample: the sample's name in the message, like "calibration sample 3" or "the example inputs"; empty if unknown.
        inputs: the sample's inputs that are not finite; empty if the model computes such values.
        line: the source line that computes the first one; empty if unknown.
    """
    where = f"{sample} of {method}" if sample else f"the calibration of {method}"
    inside = f"gives NaN or infinity inside the model{f', first at {line}' if line else ''}"
    what = f"has NaN or infinity in {inputs}" if inputs else inside
    return error_for(
        "CALIBRATION_NOT_FINITE",
        f"{where[0].upper()}{where[1:]} {what}, and quantization takes its ranges from it.",
        "Give finite samples, and write a mask as torch.where(mask, torch.finfo(scores.dtype).min, scores): 0 * -inf, and "
        "the softmax of a row of -inf, are NaN.",
        stage="QUANTIZE", method=method, sample=sample, inputs=inputs, source=line,
    )  # fmt: skip


class StageFailed(UserError):
    """A stage of ExecuTorch's pipeline failed on the model.

    Args:
        why: the line of the stage's message that states the problem.
    """

    reason = "STAGE_FAILED"
    UNKNOWN: Final = "The job's log has the whole message."
    """The remedy where none is known."""

    def __init__(self, stage: str, kind: str, why: str, remedy: str = "") -> None:
        super().__init__(
            f"{stage} failed: {why}",
            remedy or self.UNKNOWN,
            stage=stage, exception=kind, why=why,
        )  # fmt: skip


_KERNEL_CRASHES: Final = (
    "One of ExecuTorch's own kernels crashes, as no delegate takes part: write the operator in another form, and report "
    "the crash to ExecuTorch."
)
FORMATS: Final = re.compile(r"dim[_ ]?order|memory.?format|channels.?last|contiguous|same_strides", re.IGNORECASE)
"""What the runtime says of tensors with different memory formats."""

_RUN_REMEDIES: Final = (
    (
        "Padding values must be non-negative",
        "Crop with slices instead of negative pads, and pad the rest: F.pad(x[..., :-4], (3, 0)) for F.pad(x, (3, -4)).",
    ),
    (
        "Expect input tensor to be 3-D or 4-D",
        "ExecuTorch has no convolutions in 3-D: add the outputs of a 2-D one for each step of the kernel along the depth.",
    ),
    (
        "onesided=False",
        "ExecuTorch has torch.fft.rfft only: with r = torch.fft.rfft(x).abs(), "
        "torch.cat([r, r[..., 1 : (n + 1) // 2].flip(-1)], -1) is torch.fft.fft(x).abs() along the last dim of size n.",
    ),
    ("planned memory", "ExecuTorch plans too little memory for sizes that depend on others: export narrower or static dims."),
    (
        "no kernel",
        "Replace the operator: ExecuTorch's portable kernels lack some Core ATen operators too. Or use a recipe whose backend "
        "supports it.",
    ),
    (
        "at most 6 dims",
        "Reshape to at most six dims around that line, by joining dims that it treats alike; or use the recipe portable.",
    ),
    (
        "xnn_status",
        "XNNPACK accepted the operator when it was lowered, and refuses its shapes or dtypes now: compile with the recipe "
        "portable, or write that line in another form.",
    ),
    (
        "delegate could not be created",
        "Compile with the recipe portable: if that runs, the backend does not support what it was handed.",
    ),
    (
        "it crashed with",
        "Compile with the recipe portable: if that runs, the backend is at fault; report the crash to ExecuTorch.",
    ),
)
"""Remedies by a part of the runtime's reason."""


def program_cannot_run(
    method: str,
    why: str,
    at: str = "",
    operator: str = "",
    *,
    delegates: bool = True,
    formats: str = "",
    advice: str = "",
) -> EtfarmError:
    """Return the error that the program compiled, but ExecuTorch's runtime on this host cannot execute it.

    Args:
        why: the runtime's reason, as returned by `smoke.explain`.
        at: the inputs, like "at its largest inputs (x: 64x3)"; empty for the example inputs.
        operator: the operator with its line, like `aten::histc at models/net.py:31 (torch.histc(x))`, or several without kernels.
        delegates: whether a backend runs a part of the method.
        formats: inputs and weights that are not contiguous, such as `x, weight`; or empty.
        advice: what to do about the reason, if the graph tells more of it; or empty.
    """
    remedy = next((remedy for cause, remedy in _RUN_REMEDIES if cause in why), None)
    if not delegates and "it crashed with" in why:
        remedy = _KERNEL_CRASHES
    if remedy is not None and "no kernel" in why and not use_instead(f"{why}{operator}").startswith("Use other"):
        remedy = f"{use_instead(f'{why}{operator}')}: ExecuTorch has no kernel for it."
    if advice:
        remedy = advice
    elif "Unhandled dtype Float8" in why:
        remedy = "ExecuTorch does not compute in float8: use weights in int8 (torchao's Int8WeightOnlyConfig), or in fp32."
    elif "Tensors do not match: dtype" in why:
        remedy = "Give the operator's tensors one dtype, as in layer(x.float()).half() for a layer with weights in float32."
    elif "Unhandled dtype" in why:
        remedy = "The kernel does not support this dtype: use another one, starting with the inputs, such as int32 or float32."
    elif operator.startswith("aten::_fft_") and FORMATS.search(why):
        remedy = (
            "ExecuTorch transforms along the last dim only: write torch.fft.rfft(x.transpose(dim, -1).contiguous()).abs()"
            ".transpose(dim, -1) for torch.fft.rfft(x, dim=dim).abs()."
        )
    elif FORMATS.search(why) or (formats and ("Propagating input shapes" in why or (remedy is None and operator))):
        remedy = (
            f"Tensors have different memory formats: give {formats or 'inputs and weights'} the usual one with "
            ".clone(memory_format=torch.contiguous_format), weights before the export and inputs as examples."
        )
    elif remedy is None and at:
        remedy = "It runs at the example inputs: narrow the dynamic dims to sizes that work, or export them as static"
        remedy += ", or use another recipe." if delegates else "."
    elif remedy is None and operator:
        remedy = (
            "Write that line in another form: ExecuTorch has no complex numbers, and its kernels take fewer shapes and "
            "dtypes than PyTorch's. Or use another recipe."
        )
    return error_for(
        "PROGRAM_CANNOT_RUN",
        f"{method} compiled, but ExecuTorch's runtime cannot run it{f' {at}' if at else ''}: {why}"
        f"{f', of {operator}' if operator else ''}.",
        remedy or "Replace the operators that the runtime refuses (for example on complex numbers), or use another recipe.",
        stage="SMOKE_RUN", method=method, why=why, at=at, places=operator,
    )  # fmt: skip


def recipe_unavailable(recipe: str, missing: str, stage: str = "") -> EtfarmError:
    """Return the error that this server lacks what the recipe, or one of its stages, needs.

    Args:
        recipe: the recipe's name; empty if only the stage is known.
    """
    return error_for(
        "RECIPE_UNAVAILABLE",
        f"This server cannot {f'compile recipe {recipe}' if recipe else f'run {stage}'}: {missing}.",
        "Install it on the server, or choose a recipe that `etfarm recipes list` shows as available.",
        stage=stage, recipe=recipe, missing=missing,
    )  # fmt: skip
