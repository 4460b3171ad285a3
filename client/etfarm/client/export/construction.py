"""The lines that construct modules, for operators whose stack trace has no line of the user.

In `nn.Sequential(nn.Linear(8, 8), nn.ReLU())` or an `nn.LSTM` that is the whole model, every frame of every operator is torch's:
the only line that the user wrote for them is the one that constructs the module. A factory is called with the recording on. The
line stays with the module, and also with the copies that `nn.TransformerEncoder` makes of a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from etfarm.client.export.traces import has_users_line, is_users

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

_ATTRIBUTE = "_etfarm_constructed_at"
"""Attribute of a module: the frame that constructed it, in the form of a stack trace."""


@contextmanager
def recorded(base: Path) -> Iterator[None]:
    """Record the innermost line of the user's code that constructs each module in this context.

    `base` is the working folder.
    """
    from torch import nn

    original, is_recording = nn.Module.__init__, True

    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        frame = _user_frame(base) if is_recording else None
        if frame is not None:
            object.__setattr__(self, _ATTRIBUTE, frame)  # nn.Module's own __setattr__ needs its __init__
        original(self, *args, **kwargs)

    nn.Module.__init__ = construct
    try:
        yield
    finally:
        is_recording = False
        if nn.Module.__init__ is construct:  # else the factory, or one of another thread, has replaced it meanwhile
            nn.Module.__init__ = original


def add_lines(program: ExportedProgram, module: nn.Module, base: Path) -> None:
    """Put the line that constructed an operator's module in front of each stack trace without a line of the user's code.

    The module is the innermost one with a recorded line. Paths stay absolute, so that this must come before
    `traces.make_relative`.
    """
    import torch

    for graph_module in program.graph_module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            trace = node.meta.get("stack_trace") or ""
            if node.op != "call_function" or has_users_line(trace, base):
                continue
            frame = _constructed(module, _module_path(node))
            if frame is not None:
                node.meta["stack_trace"] = frame + trace


def _module_path(node: Any) -> str:
    """Return the path of the innermost module of a node in the exported module."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        return str(path).removeprefix("L['self']").removeprefix("L__self__").strip(".")
    return ""


def _constructed(module: nn.Module, path: str) -> str | None:
    """Return the recorded frame of a submodule, or of the nearest module around it."""
    frame: str | None = vars(module).get(_ATTRIBUTE)
    current = module
    for name in path.split(".") if path else ():
        below = current._modules.get(name.partition("@")[0])  # a second call of a module is NAME@1
        if below is None:
            break
        current = below
        frame = vars(current).get(_ATTRIBUTE, frame)
    return frame


def _user_frame(base: Path) -> str | None:
    """Return the innermost frame of the user's code on the stack, in the form of a stack trace."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename, base):
            line = getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
            return f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {line}\n'
        frame = frame.f_back
    return None
