"""Networks through plain ExecuTorch: lowered by its own session and run by its Python binding, without etfarm.

python -m tests.zoo.plain

Reads a JSON object with `network`, `recipe`, `outputs` (a path) and `timeout_s` from each line of stdin. Each network gets a
process of its own, forked from this one, which has loaded torch and ExecuTorch but has run nothing. Prints one line of JSON for
each with the delegation and the seconds that it took, or the error; writes the outputs in flattened order to the path as .npz.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import executorch.kernels.quantized  # noqa: F401 - registers out variants
import numpy as np
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.devtools.backend_debug import get_delegation_info
from executorch.exir import EdgeCompileConfig
from executorch.export import ExportRecipe, LoweringRecipe, StageType, export
from executorch.runtime import Runtime
from torch.utils import _pytree as pytree

from tests.zoo import catalog


def export_recipe(name: str) -> Any:
    """Return ExecuTorch's recipe; `portable` is its default without a partitioner."""
    if name == "portable":
        return ExportRecipe(lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)))
    return ExportRecipe.get_recipe(XNNPackRecipeType(name))


def run(network: catalog.Network, recipe: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Lower and run a network; return what is reported, and its outputs."""
    began = time.monotonic()
    with torch.no_grad():
        session = export(network.module, [network.args], export_recipe(recipe), name="network")
    edge = session.get_edge_program_manager() if recipe != "portable" else None
    pte = session.get_pte_buffer()
    method = Runtime.get().load_program(pte).load_method("forward")
    assert method is not None
    outputs = [_array(leaf) for leaf in method.execute(pytree.tree_leaves(network.args))]
    delegation = get_delegation_info(edge.exported_program().graph_module) if edge is not None else None
    report = {
        "ok": True, "seconds": round(time.monotonic() - began, 1), "pte_bytes": len(pte),
        "delegated": delegation.num_delegated_nodes if delegation else None,
        "left": delegation.num_non_delegated_nodes if delegation else None,
        "stages": [stage.name for stage in session.get_stage_artifacts() if stage in StageType],
    }  # fmt: skip
    return report, outputs


def answer(name: str, recipe: str, path: str) -> dict[str, Any]:
    """Return what is reported of a network, or the error; write its outputs to `path`."""
    torch.set_num_threads(2)
    try:
        network = catalog.create(name)
    except ImportError as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    try:
        report, outputs = run(network, recipe)
        with torch.no_grad():
            reference = [leaf for leaf in pytree.tree_leaves(network.module(*network.args)) if isinstance(leaf, torch.Tensor)]
        np.savez(path, *outputs)
    except Exception as error:  # noqa: BLE001 - what plain ExecuTorch cannot do is a result
        traceback.print_exc()
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        return {"ok": False, "error": f"{type(error).__name__}: {text.strip()[:300]}"}
    pairs = zip(reference, outputs, strict=False)  # outputs may have numbers too, which are left out
    ratios = [sqnr_db(_array(a), b) for a, b in pairs if a.is_floating_point()]
    return report | {"sqnr_db": min((ratio for ratio in ratios if ratio == ratio), default=None)}


def _array(value: Any) -> np.ndarray:
    """Return a tensor or number as an array; bfloat16, which NumPy lacks, as float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    detached = value.detach()
    return (detached.float() if detached.dtype == torch.bfloat16 else detached).numpy()


def sqnr_db(reference: np.ndarray, actual: np.ndarray) -> float:
    """Return 10 log10(sum r^2 / sum (r - a)^2) in dB; 300 where the arrays are equal, and NaN for other shapes."""
    if reference.shape != actual.shape:
        return float("nan")
    wanted, got = reference.astype(np.float64), actual.astype(np.float64)
    noise, signal_power = float(np.square(wanted - got).sum()), float(np.square(wanted).sum())
    return 300.0 if noise == 0 else float(min(300.0, 10 * np.log10(max(signal_power, 1e-300) / noise)))


def _load() -> None:
    """Load what a lowering imports. Nothing may run: a process that is forked from one with threads does not have them."""
    torch.set_num_threads(1)
    inputs = (torch.zeros(1, 2),)
    with torch.no_grad():
        export(torch.nn.Linear(2, 2).eval(), [inputs], export_recipe("xnnpack_fp32"), name="network").get_pte_buffer()


def main() -> int:
    _load()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(int(request["timeout_s"]))  # its default action ends the process
            print(json.dumps(answer(request["network"], request["recipe"], request["outputs"])), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            print(json.dumps({"ok": False, "error": f"took more than {request['timeout_s']} s"}), flush=True)
        elif code != 0:
            print(json.dumps({"ok": False, "error": f"the process ended with {code}"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
