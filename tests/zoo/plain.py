"""One network through plain ExecuTorch: lowered by its own session and run by its Python binding, without etfarm.

python -m tests.zoo.plain NETWORK RECIPE OUTPUTS.npz

Prints one line of JSON with the delegation and the seconds that it took, or the error; writes the outputs in flattened order.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tests.zoo import catalog


def export_recipe(name: str) -> Any:
    """Return ExecuTorch's recipe; `portable` is its default without a partitioner."""
    from executorch.backends.xnnpack.recipes import XNNPackRecipeType
    from executorch.exir import EdgeCompileConfig
    from executorch.export import ExportRecipe, LoweringRecipe

    if name == "portable":
        return ExportRecipe(lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)))
    return ExportRecipe.get_recipe(XNNPackRecipeType(name))


def run(network: catalog.Network, recipe: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Lower and run a network; return what is reported, and its outputs."""
    import executorch.kernels.quantized  # noqa: F401 - registers out variants
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.export import StageType, export
    from executorch.runtime import Runtime

    began = time.monotonic()
    with torch.no_grad():
        session = export(network.module, [network.args], export_recipe(recipe), name="network")
    edge = session.get_edge_program_manager() if recipe != "portable" else None
    pte = session.get_pte_buffer()
    method = Runtime.get().load_program(pte).load_method("forward")
    assert method is not None
    outputs = [np.asarray(leaf) for leaf in method.execute(pytree.tree_leaves(network.args))]
    delegation = get_delegation_info(edge.exported_program().graph_module) if edge is not None else None
    report = {
        "ok": True, "seconds": round(time.monotonic() - began, 1), "pte_bytes": len(pte),
        "delegated": delegation.num_delegated_nodes if delegation else None,
        "left": delegation.num_non_delegated_nodes if delegation else None,
        "stages": [stage.name for stage in session.get_stage_artifacts() if stage in StageType],
    }  # fmt: skip
    return report, outputs


def main() -> int:
    name, recipe, path = sys.argv[1:]
    torch.set_num_threads(2)
    try:
        report, outputs = run(catalog.create(name), recipe)
        np.savez(path, *outputs)
    except Exception as error:  # noqa: BLE001 - what plain ExecuTorch cannot do is a result
        traceback.print_exc()
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        report = {"ok": False, "error": f"{type(error).__name__}: {text.strip()[:300]}"}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
