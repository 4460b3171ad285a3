"""The components of recipe files: partitioners, quantizers, and the fields of [edge] and [executorch].

Source: XnnpackPartitioner, CoreMLPartitioner, VulkanPartitioner, XNNPACKQuantizer with get_symmetric_quantization_config,
CoreMLQuantizer with LinearQuantizerConfig, EdgeCompileConfig and ExecutorchBackendConfig of executorch 1.5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.wire.recipes.table import Quantization
from etfarm.wire.recipes.values import Argument


@dataclass(frozen=True)
class ComponentSpecification:
    """A partitioner or quantizer, before its arguments have values."""

    name: str
    summary: str
    arguments: tuple[Argument, ...] = ()
    needs: str = ""
    """Requirements of the compile host besides the server's own packages; empty if there are none."""
    runs_on: str = ""
    """Requirements of the device; empty if every runner meets them."""
    quantization: Quantization = Quantization.NONE
    """The quantization of a quantizer without arguments."""


_MODULE: Final = r"[^.:\x00-\x1f]+(\.[^.:\x00-\x1f]+)*"
"""A module's name as `named_modules` has it: children of an nn.Sequential are numbers, and keys of an nn.ModuleDict any text.

A colon ends the module in an operator's name, so modules with one cannot be named.
"""


def _modules(name: str, summary: str) -> Argument:
    return Argument(name, summary, list, pattern=_MODULE, like="a list of modules' names like layer1.conv or 0")


def _operators_of_modules(name: str, summary: str) -> Argument:
    pattern = rf"({_MODULE})?:[A-Za-z_][A-Za-z0-9_.]*(#[0-9]{{1,6}})?|[^:\x00-\x1f]+\.py:[0-9]{{1,9}}"
    like = "a list like layer1:relu, layer1:relu#0 (the first one), :add (of the model itself) or net.py:31 (a source line)"
    return Argument(name, summary, list, pattern=pattern, like=like)


def _operators(name: str, summary: str) -> Argument:
    pattern = r"[a-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?"
    return Argument(name, summary, list, pattern=pattern, like="a list of operators like aten.linear.default")


_ALIGNMENT: Final = tuple(1 << power for power in range(4, 17))

_COREML: Final = (
    Argument("minimum_deployment_target", "oldest system that must run it", str, ("iOS15", "iOS16", "iOS17", "iOS18")),
    Argument("compute_unit", "where Core ML may run it", str, ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")),
    Argument("lower_full_graph", "fail rather than leave operators outside of Core ML", bool, default=False),
)

PARTITIONERS: Final[Mapping[str, ComponentSpecification]] = {
    component.name: component
    for component in (
        ComponentSpecification(
            "xnnpack", "XNNPACK: the CPUs' fast path",
            (
                Argument("precision", "precisions that it accepts; default: all", list,
                         ("fp32", "static_quant", "dynamic_quant")),
                Argument("per_op", "a delegate for each operator rather than for each stretch of them", bool, default=False),
            ),
        ),
        ComponentSpecification("coreml", "Core ML", _COREML, "coremltools", "an Apple device"),
        ComponentSpecification("vulkan", "Vulkan: GPUs", runs_on="a GPU with Vulkan"),
    )
}  # fmt: skip
"""Every partitioner that a recipe file can name."""

QUANTIZERS: Final[Mapping[str, ComponentSpecification]] = {
    component.name: component
    for component in (
        ComponentSpecification(
            "xnnpack", "int8, symmetric weights",
            (
                Argument("per_channel", "a scale for each output channel of a weight", bool, default=False),
                Argument("dynamic", "activation scales are computed at run time, without calibration", bool, default=False),
                _modules("skip_modules", "modules that stay in fp32"),
                _modules("only_modules", "the only modules that are quantized"),
                _operators_of_modules("skip_operators", "operators that stay in fp32"),
                _operators_of_modules("only_operators", "the only operators that are quantized, with those of only_modules"),
            ),
            quantization=Quantization.PT2E_STATIC,
        ),
        ComponentSpecification(
            "coreml", "int8 for Core ML",
            (
                Argument("weight_only", "activations stay in floating point", bool, default=False),
                Argument("per_channel", "a scale for each output channel of a weight", bool, default=True),
                _modules("skip_modules", "modules that stay in fp32"),
            ),
            "coremltools", "an Apple device", Quantization.PT2E_STATIC,
        ),
    )
}  # fmt: skip
"""Every quantizer that a recipe file can name."""

EDGE: Final = {
    argument.name: argument
    for argument in (
        Argument("check_ir_validity", "refuse operators that are not in Core ATen", bool),
        Argument("skip_dim_order", "leave dim order operators out", bool),
        _operators("preserve_ops", "operators that are not decomposed"),
        _operators("core_aten_exceptions", "operators that need not be in Core ATen"),
    )
}
"""The fields of [edge], ExecuTorch's EdgeCompileConfig."""

EXECUTORCH: Final = {
    argument.name: argument
    for argument in (
        Argument("external_constants", "constants go to a .ptd beside the .pte", str, pattern=r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}",
                 like="a .ptd file's name without .ptd, of letters, digits, _ and -", or_bool=True),
        Argument("memory_planning", "how buffers share memory", str, ("greedy", "naive")),
        Argument("alloc_graph_input", "plan memory for inputs", bool),
        Argument("alloc_graph_output", "plan memory for outputs", bool),
        Argument("alloc_mutable_buffers", "plan memory for buffers that the program changes", bool),
        Argument("share_mutable_buffers", "one memory for a buffer of several methods", bool),
        Argument("emit_stacktrace", "keep source lines in the program", bool),
        Argument("extract_delegate_segments", "delegates' data in segments that can be freed", bool),
        Argument("segment_alignment", "bytes", int, _ALIGNMENT),
        Argument("constant_tensor_alignment", "bytes", int, _ALIGNMENT),
        Argument("delegate_alignment", "bytes", int, _ALIGNMENT),
        Argument("remove_view_copy", "views instead of copies where memory allows it", bool),
        Argument("emit_mutable_buffer_names", "keep the names of buffers that the program changes", bool),
        Argument("do_quant_fusion_and_const_prop", "fuse quantized operators and fold constants", bool),
        Argument("run_reinplace_pass", "operators in place where that is safe", bool),
    )
}  # fmt: skip
"""The fields of [executorch], ExecuTorch's ExecutorchBackendConfig."""
