"""Partitioners and quantizers that a recipe file names, as new ExecuTorch objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from etfarm.server.compile.errors import recipe_unavailable
from etfarm.server.compile.lower.selection import Selection
from etfarm.server.compile.program import resizes
from etfarm.server.compile.program.descriptions import first_line
from etfarm.wire.recipes import Component, Plain

Arguments = Mapping[str, Plain]

_IMAGE_DIMS: Final = 4
_PER_TENSOR: Final = ("quantized_decomposed.quantize_per_tensor.", "quantized_decomposed.dequantize_per_tensor.")


def partitioners(components: Sequence[Component]) -> list[Any]:
    """Return ExecuTorch's Partitioners in the order of `components`.

    Raises:
        RECIPE_UNAVAILABLE: a package that a partitioner needs is not installed here.
    """
    return [_build(_PARTITIONERS, component) for component in components]


def configure_xnnpack(partitioners: Sequence[Any] | Mapping[str, Sequence[Any]], *, per_op: bool) -> None:
    """Configure XNNPACK's partitioners, and leave others unchanged.

    XNNPACK delegates nothing within branches and loop bodies, but would keep ATen's operators there, such as `linear`, which
    ExecuTorch then refuses as neither decomposed nor delegated. It would compute some bilinear resizes with another scale; see
    `program.resizes`. Its PReLU takes images only, and its reshapes take one dynamic dim; lowering fails with any other.

    Args:
        partitioners: a list, or lists by method.
        per_op: whether to create a separate delegate for each operator.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from etfarm.server.compile.lower.partitions import generate_without_cycles

    lists = partitioners.values() if isinstance(partitioners, Mapping) else [partitioners]
    for partitioner in (partitioner for partitioners_ in lists for partitioner in partitioners_):
        if isinstance(partitioner, XnnpackPartitioner):
            partitioner.per_op_mode |= per_op
            partitioner.ops_to_not_decompose = partial(_outside_of_branches, partitioner.ops_to_not_decompose)
            partitioner.generate_partitions = partial(generate_without_cycles, partitioner.generate_partitions)
            for target, check in _CHECKS.items():
                if config := partitioner.target_partitioner_configs.get(target):
                    config.check_constraints = partial(check, config.check_constraints)
            if config := partitioner.target_partitioner_configs.get("cat.default"):
                config.get_node_and_deps = partial(_take_without_scales, config.get_node_and_deps)
            for config in partitioner.target_partitioner_configs.values():
                config.check_constraints = partial(_check_without_marks, config.check_constraints)


def _check_without_marks(check_constraints: Callable[[Any, Any], bool], node: Any, program: Any) -> bool:
    """Return whether XNNPACK computes an operator; if not, leave no marks on the quantization around it.

    The check of a layer marks the operators that quantize or dequantize around it as parts of it. ExecuTorch 1.5 keeps the marks
    if the check fails, as where the size of the layer's output is read as well, and delegates the operators before it alone: a
    delegate that skips them never writes its output.

    Source: `GEMMConfig.get_deps` of executorch/backends/xnnpack/partition/config/gemm_configs.py 1.5.1.
    """
    from executorch.backends.xnnpack.utils.quant_utils import IS_IMPLICIT_Q_DQ_TAG

    near = [each for first in (*node.all_input_nodes, *node.users) for each in (first, *first.all_input_nodes, *first.users)]
    unmarked = [each for each in near if IS_IMPLICIT_Q_DQ_TAG not in each.meta]
    if check_constraints(node, program):
        return True
    for each in unmarked:
        each.meta.pop(IS_IMPLICIT_Q_DQ_TAG, None)
    return False


def _take_without_scales(get_node_and_deps: Callable[[Any, Any], list[Any]], node: Any, program: Any) -> list[Any]:
    """Return what a delegate takes with a `cat`: the quantization around it, or nothing where that has several scales.

    XNNPACK joins integers of one scale only, and refuses others when a device loads the program. Alone, `cat` joins floats.
    """
    around = [*node.all_input_nodes, *node.users]
    scales = {each.args[1:] for each in around if str(getattr(each.target, "_op", "")).startswith(_PER_TENSOR)}
    return [node] if len(scales) > 1 else get_node_and_deps(node, program)


def _outside_of_branches(ops_to_not_decompose: Callable[[Any], tuple[Any, Any]], program: Any) -> tuple[Any, Any]:
    """Return a partitioner's operators that are not decomposed, and a condition that is false within branches and loop bodies."""
    operators, condition = ops_to_not_decompose(program)
    return operators, lambda node: node.graph is program.graph and condition(node)


def _has_scale_of_sizes(check_constraints: Callable[[Any, Any], bool], node: Any, program: Any) -> bool:
    """Return whether XNNPACK computes a bilinear resize with the model's scale, and log the reason if not."""
    from executorch.backends.xnnpack.partition.config.xnnpack_config import why

    if resizes.has_own_scale(node):
        why(node, reason=resizes.REASON)
        return False
    return check_constraints(node, program)


def _is_of_images(check_constraints: Callable[[Any, Any], bool], node: Any, program: Any) -> bool:
    """Return whether XNNPACK computes a PReLU, and log the reason if not: its weight is one of channels, which are dim 1 of 4."""
    from executorch.backends.xnnpack.partition.config.xnnpack_config import why

    if len(node.args[0].meta["val"].shape) != _IMAGE_DIMS:
        why(node, reason="XNNPACK's PReLU takes tensors with four dims only")
        return False
    return check_constraints(node, program)


def _is_reshaped_by_one_dim(check_constraints: Callable[[Any, Any], bool], node: Any, program: Any) -> bool:
    """Return whether XNNPACK computes an operator, and log the reason if not.

    It computes those of series as ones of images, and reshapes their tensors for that.
    """
    from executorch.backends.xnnpack.partition.config.xnnpack_config import why

    value = node.meta["val"]
    shape = (value[0] if isinstance(value, tuple) else value).shape
    is_of_images = len(shape) == _IMAGE_DIMS and "unsqueeze" not in str(node.target)
    if not is_of_images and sum(not isinstance(size, int) for size in shape) > 1:
        why(node, reason="XNNPACK reshapes tensors with one dynamic dim at most")
        return False
    return check_constraints(node, program)


_CHECKS: Final = {
    "upsample_bilinear2d.vec": _has_scale_of_sizes,
    "prelu.default": _is_of_images,
    "unsqueeze_copy.default": _is_reshaped_by_one_dim,
    "convolution.default": _is_reshaped_by_one_dim,
    "_native_batch_norm_legit_no_training.default": _is_reshaped_by_one_dim,
}
"""What is checked of operators before XNNPACK's partitioner checks them."""


def quantizers(components: Sequence[Component]) -> list[Any]:
    """Return PT2E Quantizers of torchao in the order of `components`.

    Raises:
        RECIPE_UNAVAILABLE: as `partitioners`.
    """
    return [_build(_QUANTIZERS, component) for component in components]


def coreml_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return Core ML's arguments with coremltools' enum values for the names of systems and compute units."""
    ct = importlib.import_module("coremltools")
    enums = {"minimum_deployment_target": ct.target, "compute_unit": ct.ComputeUnit}
    return {
        key: getattr(enums[key], value) if key in enums else list(value) if isinstance(value, tuple) else value
        for key, value in arguments.items()
    }


def _build(table: Mapping[str, Callable[[Arguments], Any]], component: Component) -> Any:
    try:
        return table[component.name](component.arguments)
    except (ImportError, OSError) as error:
        raise recipe_unavailable(component.name, first_line(error)) from error


def _xnnpack_partitioner(arguments: Arguments) -> Any:
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    precisions = [ConfigPrecisionType[precision.upper()] for precision in _string_list(arguments, "precision")]
    return XnnpackPartitioner(config_precisions=precisions or None, per_op_mode=bool(arguments.get("per_op")))


def _coreml_partitioner(arguments: Arguments) -> Any:
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    options = coreml_arguments(arguments)
    lower_full_graph = options.pop("lower_full_graph", False)
    target = options.get("minimum_deployment_target")
    ios18 = importlib.import_module("coremltools").target.iOS18
    return CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(**options),
        lower_full_graph=bool(lower_full_graph),
        # Core ML supports state since iOS 18; the provider of Core ML's recipes decides likewise.
        take_over_mutable_buffer=target is None or target >= ios18,
    )


def _vulkan_partitioner(arguments: Arguments) -> Any:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return VulkanPartitioner()


def _xnnpack_quantizer(arguments: Arguments) -> Any:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    quantizer = XNNPACKQuantizer()
    per_channel, dynamic = bool(arguments.get("per_channel")), bool(arguments.get("dynamic"))
    quantizer.set_global(get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic))
    selection = Selection.of(arguments)
    if selection is not None:
        selection.restrict(quantizer)
    return quantizer


def _coreml_quantizer(arguments: Arguments) -> Any:
    import torch
    from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer

    options = importlib.import_module("coremltools").optimize.torch.quantization
    config = options.LinearQuantizerConfig(
        global_config=options.ModuleLinearQuantizerConfig(
            quantization_scheme="symmetric",
            activation_dtype=torch.float32 if arguments.get("weight_only") else torch.quint8,
            weight_dtype=torch.qint8,
            weight_per_channel=bool(arguments.get("per_channel", True)),
        )
    )
    for module in _string_list(arguments, "skip_modules"):
        config = config.set_module_name(module, None)
    quantizer = CoreMLQuantizer(config)
    quantizer.selection = Selection.of(arguments)
    return quantizer


def _string_list(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name, ())
    return [value] if isinstance(value, str) else [str(text) for text in value] if isinstance(value, tuple) else []


_PARTITIONERS: Final[Mapping[str, Callable[[Arguments], Any]]] = {
    "xnnpack": _xnnpack_partitioner,
    "coreml": _coreml_partitioner,
    "vulkan": _vulkan_partitioner,
}

_QUANTIZERS: Final[Mapping[str, Callable[[Arguments], Any]]] = {"xnnpack": _xnnpack_quantizer, "coreml": _coreml_quantizer}
