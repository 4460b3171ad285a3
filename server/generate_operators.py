"""Generates the operators that an uploaded .pt2 may use; `--check` compares the committed list with the installed toolchain.

The list is `etfarm/server/compile/screening/operators.txt`. It is computed from the tables of the pinned torch, torchao and
ExecuTorch, in three steps, so that a new version's new operators are refused until somebody has generated and reviewed the list
again:

1. Candidates. ATen operators that carry `torch.Tag.core`, are decomposed by an export's default table, are composites of
   other operators, or are named in ExecuTorch's kernel and edge-dialect tables; their other overloads and in-place forms;
   and those named in ALSO, which common networks use and no table has.
2. Signatures. Every argument is a tensor, a number, a bool, a dtype, a layout, a device, or a text with a reviewed name,
   every result a tensor or a number. That drops files, storages, streams, process groups, and packed C++ objects. `out=`
   overloads are dropped as well: no exported program has them.
3. Review. REFUSED names the families that reach memory, files, or the state of the process through such a signature.

Operators of other namespaces and of the `higher_order` one are allowed one by one, here.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

LIST: Final = Path(__file__).resolve().parent / "etfarm/server/compile/screening/operators.txt"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TYPE: Final = re.compile(r"(Optional\[)?(List\[)?(Optional\[)?(Tensor|int|bool|float|number|Device)\]*")
_RETURN: Final = re.compile(r"(List\[)?(Tensor|int|bool|float|number)\]?")
_TEXT: Final = frozenset({"str", "Optional[str]"})
_TEXTS: Final = _words(
    "UPLO approximate assert_msg driver equation indexing mapping_type mode norm ord p pad_mode padding padding_side reduce "
    "rounding_mode side"
)
"""Arguments whose text only chooses among ways to compute, or is a message."""

REFUSED: Final = {
    # Files and the process.
    r"from_file|save|_?set_data|data|set_?|requires_grad_|retains?_grad|_?record_stream|_print|_backward|_debug.*|_version":
        "reads or writes files, or changes what a tensor is",
    r"output_nr|is_leaf|get_device|_has_.*|is_set_to|_use_.*|is_vulkan_available|is_pinned|_?pin_memory|"
    r"can_cast|is_inference|is_distributed|_?cufft.*|cudnn_is_acceptable|_nnpack_available|_test_.*":
        "asks for the state of the process",
    # Memory: sizes, strides or indices that nothing checks, or memory that nothing wrote.
    r"_reshape_alias(_copy)?|_reshape_copy|_?resize.*|_resize_output_?|_reshape_from_tensor|_rowwise_prune|_lazy_clone|"
    r"_make_dep_token|_index_put_impl_?|_unsafe_index_put_|segment_reduce|_segment_reduce.*|_copy_from.*|_neg_view.*":
        "is not checked against the bounds of memory",
    r".*sparse.*|smm|sspaddmm|hspmm|_?coalesced?_?|_?indices.*|_?values.*|_nnz|_dim[IV]|_?sobol.*|.*col_indices.*|"
    r".*row_indices.*|to_dense|_to_dense|_spdiags|_spsolve|_validate.*":
        "takes sparse tensors, whose indices can be created without a check",
    r".*nested.*|_?jagged.*|_padded_dense.*|.*padded_tensor|_pack_padded.*|_pad_packed.*|_nested.*":
        "takes nested tensors, whose offsets can be created without a check",
    r"_?(cudnn|miopen|mkldnn|fbgemm|mps|nnpack|cslt|thnn|triton|efficient_attention|flash_attention|native_multi_head)_.*|"
    r"to_mkldnn.*|.*_prepack(ed)?|_wrapped_.*|quantized_.*|_?choose_qparams_.*|_saturate.*|_weight_int.*|_dyn_quant.*|"
    r"_lu_with_info|_mixed_dtypes.*|_scaled_(grouped_)?mm.*|_grouped_mm|_transformer_encoder.*|_convert_weight.*":
        "is a kernel of another backend, or takes packed weights",
    r"_?ctc_loss|_scaled_dot_product_flash_attention_for_cpu|_batch_norm_with_update.*|_batch_norm_no_update|_chunk_cat|"
    r"_fused_dropout|_to_cpu":
        "trusts the shapes or the values of its tensors",
    # Training and functorch.
    r".*backward.*|_foreach_.*|_fused_(sgd|adam|adamw|adagrad)_?|_amp_.*|.*_double_backward|infinitely_.*|.*_batch_dim|_make_dual.*|"
    r"_unpack_dual|_fw_primal.*|_autocast_to_.*|.*_observer.*|fused_moving_avg.*|_fused_moving_avg.*":
        "belongs to training",
}  # fmt: skip
"""Base names of ATen operators that are refused whatever their signature, with the reason for the reviewer."""

_STATE: Final = re.compile(r"sym_constrain_range(_for_size)?|_assert_(async|scalar|tensor_metadata)|_linalg_check_errors")
"""Checks, which give nothing."""

ALSO: Final = _words(
    "__lshift__ __rshift__ _assert_async _assert_scalar _assert_tensor_metadata _conj _fft_c2c _functional_assert_async "
    "_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size _int_mm "
    "_is_all_true _is_any_true _linalg_check_errors _logcumsumexp _trilinear _unique _unique2 addbmm angle as_strided_ "
    "bartlett_window bernoulli_ bincount blackman_window cummax cummin detach_ detach_copy empty_permuted equal fft_fftfreq "
    "fft_rfftfreq grid_sampler_3d hamming_window histc kaiser_window kthvalue lift_fresh_copy linalg_cholesky_ex linalg_eig "
    "linalg_inv_ex linalg_qr linalg_solve_triangular logcumsumexp lu_unpack masked_select median mode multinomial nanmedian "
    "nonzero_static poisson polygamma rand_like randint randint_like randn randn_like random range searchsorted sort "
    "special_bessel_y0 squeeze_ sym_constrain_range sym_constrain_range_for_size t_ transpose_ triangular_solve "
    "unique_consecutive unique_dim unique_dim_consecutive unsqueeze_ upsample_bicubic2d view_as_complex "
    "view_as_complex_copy view_as_real view_as_real_copy"
)
"""ATen operators that no table of step 1 has and that are as harmless as those: they compute, or check."""

HIGHER_ORDER: Final = _words(
    "associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention hints_wrapper invoke_subgraph map_impl "
    "out_dtype scan strict_mode tag_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled while_loop"
)
"""What torch.export makes of control flow, of regions with another mode, and of operators that write to their arguments. Their
graphs and operators are screened like any other. Not allowed: those that call script objects, compiled or Triton code, format
texts, or look functions up by name."""

OTHERS: Final = {
    "dim_order_ops": r"_(clone_dim_order|empty_dim_order|to_dim_order_copy)",
    "executorch_prim": r"\w+",
    "llama": r"(custom_sdpa|custom_quantized_sdpa|fallback|fast_hadamard_transform|sdpa_with_kv_cache|update_cache\w*)",
    "prims": r"(convert_element_type|view_of)",
    "quant": r"dequantize_codebook",
    "quantized_decomposed": r"\w+",
    "torchao": r"(choose_qparams_affine|(de)?quantize_affine|choose_scale_float8|(de)?quantize_affine_float8_non_decomposed)",
    # Registered by torchvision, which a server needs not have.
    "torchvision": r"",
}
"""Operators of other namespaces by pattern, as far as their signatures pass."""

TORCHVISION: Final = ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
"""Pure functions of torchvision, by name: its library may be missing where the list is generated."""

PYTHON: Final = (
    _words(
        "_operator.add _operator.and_ _operator.eq _operator.floordiv _operator.ge _operator.getitem _operator.gt _operator.le "
        "_operator.lshift _operator.lt _operator.mod _operator.mul _operator.ne _operator.neg _operator.or_ _operator.pos "
        "_operator.pow _operator.rshift _operator.sub _operator.truediv"
    )
    | _words("math.ceil math.floor math.sqrt math.trunc")
    | _words("torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sum")
    | _words("torch.sym_sqrt torch._sym_sqrt")
)
"""Arithmetic on sizes, and the items of a tuple; targets as they are."""


def load_tables() -> None:
    """Registers the operators that the server's children have.

    Raises:
        ImportError: the toolchain is not installed.
    """
    from etfarm.server.compile import prewarm

    prewarm.load_toolchain()
    for module in ("torchao.prototype.quantization.codebook_coreml", "executorch.extension.llm.custom_ops.custom_ops"):
        importlib.import_module(module)


def candidates() -> frozenset[str]:
    """The base names of ATen operators that a network may have."""
    import torch
    from torch._decomp import decomposition_table
    from torch.export import default_decompositions

    names = {_base(op) for table in (decomposition_table, default_decompositions()) for op in table if hasattr(op, "_schema")}
    names |= ALSO | _executorch_kernels()
    for name in _aten():
        operator = _operator(name)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if composite or torch.Tag.core in operator.tags:
            names.add(_base(operator))
    return frozenset(names)


def _executorch_kernels() -> frozenset[str]:
    """Base names of ATen operators in ExecuTorch's tables of kernels and of the edge dialect."""
    import executorch

    root = Path(next(iter(executorch.__path__)))
    names = set()
    for file in ("kernels/portable/functions.yaml", "kernels/portable/custom_ops.yaml", "exir/dialects/edge/edge.yaml"):
        names |= set(re.findall(r"^- (?:op|func): (?:aten::)?(\w+)", (root / file).read_text(), re.MULTILINE))
    return frozenset(names)


def _aten() -> list[str]:
    import torch

    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))


def _operator(name: str) -> Any:
    """The OpOverload of a dispatcher's name such as `aten::add.Tensor`."""
    import torch

    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _base(operator: Any) -> str:
    return str(operator._schema.name.partition("::")[2])


def is_plain(operator: Any) -> bool:
    """Whether an operator's signature has only tensors, numbers, and what chooses among ways to compute."""
    schema = operator._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only
           for argument in schema.arguments):  # fmt: skip
        return False
    for argument in schema.arguments:
        text = str(argument.type)
        if text in _TEXT and argument.name not in _TEXTS:
            return False
        if text not in _TEXT and text != "Optional[Generator]" and not _TYPE.fullmatch(text):
            return False
    returns = [str(value.type) for value in schema.returns]
    return all(_RETURN.fullmatch(value) for value in returns) and (bool(returns) or bool(_STATE.fullmatch(_base(operator))))


def is_refused(base: str) -> bool:
    """Whether the review refuses an ATen operator, by its name without the overload."""
    return any(re.fullmatch(pattern, base) for pattern in REFUSED)


def allowed_aten() -> Iterator[str]:
    """ATen operators, `aten.NAME.OVERLOAD`."""
    names = candidates()
    for name in _aten():
        operator = _operator(name)
        base = _base(operator)
        plain = base if base in names else re.sub(r"(?<=[a-z0-9])_$", "", base)
        if plain not in names or is_refused(base) or not is_plain(operator):
            continue
        yield f"aten.{base}.{operator._overloadname}"


def allowed_elsewhere() -> Iterator[str]:
    """Operators of other namespaces."""
    import torch
    from torch._ops import _higher_order_ops

    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        pattern = OTHERS.get(namespace, "")
        if pattern and re.fullmatch(pattern, rest.partition(".")[0]) and is_plain(_operator(name)):
            base, _, overload = rest.partition(".")
            yield f"{namespace}.{base}.{overload or 'default'}"
    missing = HIGHER_ORDER - set(_higher_order_ops)
    if missing:
        raise SystemExit(f"torch has no higher-order operator {', '.join(sorted(missing))}")
    yield from (f"higher_order.{name}" for name in HIGHER_ORDER)
    yield from (f"torchvision.{name}.default" for name in TORCHVISION)
    yield from PYTHON


def text() -> str:
    """The list's file as it has to be for the installed toolchain."""
    load_tables()
    lines = sorted({*allowed_aten(), *allowed_elsewhere()})
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "torchao", "executorch"))
    header = (
        "# Operators that an uploaded .pt2 may use, one a line; every other is refused by name.",
        "# Generated by server/generate_operators.py, which says how they are chosen; do not edit.",
        f"# From {versions}: {len(lines)} entries.",
    )
    return "\n".join([*header, *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed list is another")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    fresh = text()
    if not arguments.check:
        LIST.write_text(fresh)
        return 0
    kept = set(LIST.read_text().splitlines()) if LIST.exists() else set()
    for line in sorted(kept ^ set(fresh.splitlines())):
        print(("- " if line in kept else "+ ") + line, file=sys.stderr)
    return int(LIST.read_text() != fresh) if LIST.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
