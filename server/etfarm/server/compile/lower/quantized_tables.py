"""Embeddings whose tables torchao has quantized. ExecuTorch has kernels for them, but none for the table alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of
from etfarm.wire.recipes import Recipe

_FUSION: Final = "do_quant_fusion_and_const_prop"
"""The option of ExecutorchBackendConfig with which TO_EXECUTORCH replaces a table and its lookup by one operator."""


def fuse(recipe: Recipe, built: Any, programs: Iterable[Any]) -> None:
    """Switch the fusion on in an ExportRecipe where a program has such an embedding, unless the recipe file sets it.

    Lookups lose their padding index, which only gradients depend on, as the fusion leaves lookups with one alone.
    """
    lookups = [node for program in programs for node in all_nodes(program) if _has_quantized_table(node)]
    for node in lookups:
        node.args, node.kwargs = node.args[:2], {}
    if lookups and _FUSION not in recipe.options.executorch:
        setattr(built.executorch_backend_config, _FUSION, True)


def _has_quantized_table(node: Any) -> bool:
    return name_of(node) == "embedding" and str(node.args[0].target).startswith("torchao.dequantize_affine")
