"""Preparation of the forkserver, once for all children. Importing this module imports no torch; `warm` does."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import typing
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

PRELOAD: Final = ("etfarm.server.compile.prewarm:warm",)
"""Value for `Workers(preload=...)`."""


def warm() -> None:
    """Import torch and ExecuTorch, and lower a tiny model, which pays the one-time costs of a process.

    Everything stays on one thread: a child that is forked from a torch with several threads hangs.

    Raises:
        RuntimeError: the process has another thread.
    """
    assert os.environ.get("OMP_NUM_THREADS") == "1"
    import torch

    torch.set_num_threads(1)
    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # its monitor is a thread
    sys.modules.setdefault("pyarrow", cast(ModuleType, None))  # pandas imports it where it is installed: it starts a thread
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        load_toolchain()
    finally:
        logging.disable(logging.NOTSET)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"the forkserver has {threads} threads; its children could hang")


def load_toolchain() -> None:
    """Import the toolchain and the children's tasks, and lower a tiny model."""
    import executorch.kernels.quantized
    import executorch.runtime
    import torch
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401
    from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa
    from executorch.backends.xnnpack.recipes import XNNPackRecipeType
    from executorch.devtools import Inspector  # noqa: F401
    from executorch.export import ExportRecipe, ExportSession

    from etfarm.server.compile.lower import xnnpack_patterns

    importlib.import_module("etfarm.server.compile.lower.tasks")
    executorch.runtime.Runtime.get()
    remember_composite_operators()
    remember_annotations()
    share_origins()
    compile_graphs_when_called()
    xnnpack_patterns.install()
    # With another ExecuTorch than the pinned one, these export the patterns.
    bilinear_2d.get_graphs()
    sdpa.get_graphs()
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU()).eval()
    program = torch.export.export(module, (torch.zeros(1, 1, 2, 2),))
    ExportSession({"forward": program}, export_recipe=ExportRecipe.get_recipe(XNNPackRecipeType.FP32)).export()


def remember_composite_operators() -> None:
    """Let torch load the composite operators of C++ once for all namespaces of operators, and only if there are new ones.

    torch loads all of them for each namespace, hundreds of times in a lowering, of which they take a quarter.
    """
    import torch
    from torch._export import utils
    from torch.export import decomp_utils, exported_program

    load_all, collect_all = utils._materialize_cpp_cia_ops, utils._collect_all_valid_cia_ops
    loaded: list[str] = []

    def load_new() -> None:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if registered != loaded:
            load_all()
            loaded[:] = registered

    def collect() -> Any:
        load_new()
        utils._materialize_cpp_cia_ops = lambda: None
        try:
            return collect_all()
        finally:
            utils._materialize_cpp_cia_ops = load_new

    utils._materialize_cpp_cia_ops = load_new
    for module in (utils, exported_program, decomp_utils):
        module._collect_all_valid_cia_ops = collect


def remember_annotations() -> None:
    """Let torch evaluate the annotations of a kernel's registration once.

    A lowering registers 36,000 kernels, which takes a fifth of a small lowering.
    """
    import torch

    # The alias of typing is the same annotation and keeps what it was subscripted with.
    torch._ops.Callable = typing.Callable


def share_origins() -> None:
    """Let nodes share what torch records of their origins, which never changes.

    torch copies it for each node of each pass, with all that the origins come from themselves: a seventh of a lowering.
    """
    from torch.fx.traceback import NodeSource

    def share(self: NodeSource, memo: dict[int, object]) -> NodeSource:
        return self

    NodeSource.__deepcopy__ = share


def compile_graphs_when_called() -> None:
    """Let a `torch.fx.GraphModule` compile the Python code of its graph when it is called, or when its code is read.

    torch compiles it after each change of a graph, a fifth of a lowering: ExecuTorch's passes interpret graphs and call none.
    """
    from torch.fx import GraphModule
    from torch.fx.graph import _PyTreeCodeGen

    compile_now, describe = GraphModule.recompile, GraphModule.__str__

    class Uncompiled:
        """Stands for `forward` in the class that a module has for itself."""

        def __init__(self, module: GraphModule) -> None:
            self.module = weakref.ref(module)

        def __get__(self, instance: GraphModule | None, owner: type[GraphModule]) -> Any:
            if (module := self.module()) is None:
                raise AttributeError("forward")
            compile_now(module)
            return owner.forward if instance is None else instance.forward

    def recompile(self: GraphModule) -> None:
        self.__dict__.pop("_code", None)
        if isinstance(self._graph._codegen, _PyTreeCodeGen):
            self._in_spec = self._graph._codegen.pytree_info.in_spec
            self._out_spec = self._graph._codegen.pytree_info.out_spec
        type(self).forward = Uncompiled(self)
        self._recompile_submodules()

    def compiled(self: GraphModule) -> GraphModule:
        if "_code" not in self.__dict__:
            compile_now(self)
        return self

    def with_code(pickle: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: GraphModule, *arguments: Any) -> Any:
            GraphModule.recompile = compile_now
            try:
                return pickle(compiled(self), *arguments)
            finally:
                GraphModule.recompile = recompile

        return wrapped

    GraphModule.recompile = recompile
    GraphModule.code = property(lambda self: compiled(self)._code)
    GraphModule.__str__ = lambda self: describe(compiled(self))
    GraphModule.__reduce__ = with_code(GraphModule.__reduce__)
    GraphModule.__reduce_package__ = with_code(GraphModule.__reduce_package__)
