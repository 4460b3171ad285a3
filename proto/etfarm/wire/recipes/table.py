"""The specifications of recipes by name: effect, arguments and requirements.

Each server reports whether a recipe's tools are installed (`etfarm recipes list`).
Source: the RecipeType enums and `_validate_recipe_kwargs` of executorch.backends.*.recipes 1.5.1, which only log unknown
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from etfarm.wire.recipes.values import Argument

DEFAULT: Final = "xnnpack_fp32"
"""The default recipe."""


class Quantization(StrEnum):
    """The kind of quantization of a recipe, which determines the form in which it needs a model."""

    NONE = "NONE"
    PT2E_STATIC = "PT2E_STATIC"
    """int8 weights and activations from calibration; works on modules and on exported programs."""
    PT2E_DYNAMIC = "PT2E_DYNAMIC"
    """int8 weights, activation scales computed at run time."""
    TORCHAO_SOURCE = "TORCHAO_SOURCE"
    """Modules are replaced before the export, which requires the eager module and so runs on the client."""


@dataclass(frozen=True)
class Specification:
    """The description of a recipe, before its arguments have values."""

    name: str
    backend: str
    """The recipe provider's name: portable, xnnpack, coreml, coreai, arm, qnn, or a plug-in's own."""
    quantization: Quantization
    summary: str
    needs: str = ""
    """Requirements of the compile host besides the server's own packages; empty if there are none."""
    runs_on: str = ""
    """Requirements of the device; empty if every runner meets them."""
    arguments: tuple[Argument, ...] = ()
    keeps_fp32: str = ""
    """The part of a model that stays unquantized by design; empty if unknown."""
    resolved: bool = True
    """Whether more than the name is known; False for a plug-in's recipe, which only the server with the plug-in knows."""


_NAME: Final = "a name of letters, digits and _"

_RUNTIME_BACKENDS: Final = {
    "portable": "", "xnnpack": "XnnpackBackend", "coreml": "CoreMLBackend", "coreai": "CoreAIBackend", "qnn": "QnnBackend",
    "arm_ethos": "EthosUBackend", "arm_vgf": "VgfBackend", "arm_tosa": "TOSABackend",
}  # fmt: skip
"""Ids of the backends that runners register, by the beginning of a recipe's name."""


def runtime_backend(name: str) -> str | None:
    """Return the id of the backend that a runner needs for programs of a recipe.

    It is empty for the portable kernels, and None for a plug-in's recipe, of which only its programs tell.
    """
    if "." in name:
        return None
    return next((backend for prefix, backend in _RUNTIME_BACKENDS.items() if name.startswith(prefix)), None)


def _coreml(name: str, quantization: Quantization, summary: str, *more: Argument, target: str = "") -> Specification:
    return Specification(
        name, "coreml", quantization, summary, needs="coremltools", runs_on="an Apple device",
        arguments=(
            Argument("minimum_deployment_target", "oldest system that must run it", str,
                     ("iOS15", "iOS16", "iOS17", "iOS18"), default=target or None),
            Argument("compute_unit", "where Core ML may run it", str, ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")),
            Argument("lower_full_graph", "fail rather than leave operators outside of Core ML", bool),
            *more,
        ),
    )  # fmt: skip


def _ethos_u(version: int, macs: tuple[int, ...], default: int) -> Specification:
    return Specification(
        f"arm_ethos_u{version}_int8", "arm", Quantization.PT2E_STATIC,
        f"int8 for the Ethos-U{version} NPU, compiled by Vela", needs="executorch[ethos-u]",
        runs_on=f"a Cortex-M with an Ethos-U{version}, or Corstone's simulator",
        arguments=(
            Argument("macs", "multiply-accumulates a cycle of the NPU", int, macs, default=default),
            Argument("system_config", "Vela's system configuration", str, pattern=r"[A-Za-z0-9_]{1,64}", like=_NAME),
            Argument("memory_mode", "Vela's memory mode", str, pattern=r"[A-Za-z0-9_]{1,64}", like=_NAME),
        ),
    )  # fmt: skip


def _vgf(name: str, quantization: Quantization, summary: str) -> Specification:
    return Specification(name, "arm", quantization, summary, needs="Arm's ML SDK for Vulkan", runs_on="a GPU with VGF")


_Q = Quantization
_GROUP = Argument("group_size", "weights that share one scale", int, (16, 32, 64, 128, 256), default=32)
_XNNPACK_GROUP = replace(_GROUP, choices=(32, 64, 128, 256))
"""Group sizes of XNNPACK, which rejects 4-bit groups that are not a multiple of 32, but only while lowering the model."""
_LINEAR = "Linear layers only; convolutions stay fp32"

RECIPES: Final[Mapping[str, Specification]] = {
    specification.name: specification
    for specification in (
        Specification("portable", "portable", _Q.NONE, "fp32 on ExecuTorch's portable kernels, no delegate"),
        Specification("xnnpack_fp32", "xnnpack", _Q.NONE, "fp32 on XNNPACK: the CPUs' fast path"),
        Specification(
            "xnnpack_pt2e_int8_dynamic_per_channel", "xnnpack", _Q.PT2E_DYNAMIC,
            "int8 weights by channel, activations quantized at run time", keeps_fp32=_LINEAR,
        ),
        Specification(
            "xnnpack_pt2e_int8_static_per_channel", "xnnpack", _Q.PT2E_STATIC,
            "int8 weights by channel and activations, calibrated",
        ),
        Specification(
            "xnnpack_pt2e_int8_static_per_tensor", "xnnpack", _Q.PT2E_STATIC,
            "int8 with one scale a tensor, calibrated",
        ),
        Specification(
            "xnnpack_torchao_int8da_int4w_per_channel", "xnnpack", _Q.TORCHAO_SOURCE,
            "4-bit weights by channel in Linear, int8 activations at run time", keeps_fp32=_LINEAR,
        ),
        Specification(
            "xnnpack_torchao_int8da_int4w_per_tensor", "xnnpack", _Q.TORCHAO_SOURCE,
            "4-bit weights by group in Linear, int8 activations at run time", arguments=(_XNNPACK_GROUP,),
            keeps_fp32=_LINEAR,
        ),
        _coreml("coreml_fp32", _Q.NONE, "fp32 on Core ML"),
        _coreml("coreml_fp16", _Q.NONE, "fp16 on Core ML"),
        _coreml("coreml_pt2e_int8_static", _Q.PT2E_STATIC, "int8 on Core ML, calibrated; compiles for a minute or more",
                target="iOS17"),
        _coreml("coreml_pt2e_int8_weight_only", _Q.PT2E_STATIC, "int8 weights on Core ML", target="iOS17"),
        _coreml("coreml_torchao_int4_weight_only_per_channel", _Q.TORCHAO_SOURCE,
                "4-bit weights by channel on Core ML", target="iOS18"),
        _coreml("coreml_torchao_int4_weight_only_per_group", _Q.TORCHAO_SOURCE,
                "4-bit weights by group on Core ML", _GROUP, target="iOS18"),
        _coreml("coreml_torchao_int8_weight_only_per_channel", _Q.TORCHAO_SOURCE,
                "int8 weights by channel on Core ML", target="iOS16"),
        _coreml("coreml_torchao_int8_weight_only_per_group", _Q.TORCHAO_SOURCE,
                "int8 weights by group on Core ML", _GROUP, target="iOS18"),
        _coreml("coreml_codebook_weight_only", _Q.TORCHAO_SOURCE, "weights from a codebook on Core ML",
                Argument("bits", "bits of an index into the codebook", int, bounds=(1, 8), required=True),
                Argument("block_size", "weights that share one codebook, by dim; -1 is the whole dim", tuple,
                         bounds=(-1, 1 << 20), required=True),
                target="iOS18"),
        Specification("coreai_fp32", "coreai", _Q.NONE, "fp32 on Core AI", "Apple's Core AI packages",
                      "an Apple device"),
        Specification("coreai_fp16", "coreai", _Q.NONE, "fp16 on Core AI, inputs and outputs too",
                      "Apple's Core AI packages", "an Apple device"),
        _ethos_u(55, (32, 64, 128, 256), 128),
        _ethos_u(65, (256, 512), 256),
        _ethos_u(85, (128, 256, 512, 1024, 2048), 256),
        Specification("arm_tosa_fp", "arm", _Q.NONE, "floating-point TOSA, for the reference model",
                      "executorch[ethos-u]", "TOSA's reference model"),
        Specification("arm_tosa_int8", "arm", _Q.PT2E_STATIC, "int8 TOSA, for the reference model",
                      "executorch[ethos-u]", "TOSA's reference model"),
        Specification("arm_tosa_a16w8", "arm", _Q.PT2E_STATIC, "TOSA of 16-bit activations and 8-bit weights",
                      "executorch[ethos-u]", "TOSA's reference model"),
        _vgf("arm_vgf_fp", _Q.NONE, "floating point for Arm's neural GPUs"),
        _vgf("arm_vgf_int8", _Q.PT2E_STATIC, "int8 for Arm's neural GPUs"),
        Specification(
            "qnn_fp16", "qnn", _Q.NONE, "fp16 on Qualcomm's Hexagon NPU", needs="Qualcomm's AI Engine Direct SDK",
            runs_on="a Snapdragon with a Hexagon NPU",
            arguments=(
                Argument("soc_model", "the chip, as Qualcomm names it, like SM8650", str,
                         pattern=r"[A-Za-z0-9_]{1,32}", like=_NAME, required=True),
                Argument("skip_mutable_buffer", "leave mutable buffers outside of the delegate", bool),
            ),
        ),
    )
}  # fmt: skip
"""Every known recipe by name, in the order of `etfarm recipes list`."""
