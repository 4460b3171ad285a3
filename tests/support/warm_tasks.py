"""What a child of the warm forkserver finds done already."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path


def look(request: object, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Return the threads that torch has here, the modules that XNNPACK's passes have their patterns from, and whether copies of
    what torch records of a node's origins share it."""
    import torch
    from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa
    from torch.fx.traceback import NodeSource

    functions = (bilinear_2d.get_graphs_dict, sdpa.get_graphs)
    origins = [NodeSource(None)]
    return json.dumps(
        {
            "torch_threads": torch.get_num_threads(),
            "patterns": [function.__module__ for function in functions],
            "shares_origins": copy.deepcopy(origins)[0] is origins[0],
        }
    ).encode()


def use_a_graph(request: object, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Return what a module of a graph does before and after its graph is changed, in each way in which its code is needed."""
    import torch

    def traced() -> torch.fx.GraphModule:
        outer = torch.fx.symbolic_trace(torch.nn.Sequential(torch.fx.symbolic_trace(torch.nn.ReLU())))
        assert isinstance(outer, torch.fx.GraphModule)
        return outer

    def returns_its_input(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        *_, output = module.graph.nodes
        output.args = (next(iter(module.graph.nodes)),)
        module.recompile()
        return module

    negative = torch.tensor([-1.0])
    seen: dict[str, object] = {"compiled_at_first": "_code" in vars(traced())}
    called, changed = traced(), returns_its_input(traced())
    seen["called"] = [called(negative).item(), changed(negative).item(), returns_its_input(called)(negative).item()]
    seen["kept"] = type(called).forward is type(called).forward
    seen["parameters"] = [*inspect.signature(traced().forward).parameters]
    seen["of_class"] = [*inspect.signature(type(traced()).forward).parameters]
    seen["code"] = [module.code.strip().splitlines()[-1].strip() for module in (traced(), returns_its_input(traced()))]
    seen["text"] = "return input_1" in str(returns_its_input(traced()))
    seen["pickled"] = pickle.loads(pickle.dumps(returns_its_input(traced())))(negative).item()
    seen["copied"] = copy.deepcopy(returns_its_input(traced()))(negative).item()
    return json.dumps(seen).encode()
