"""Source paths in stack traces: equal for all users, and without the client's folders.

torch.export stores `File "/home/ada/nets/models/net.py", line 31, in forward` with every node, and the report
names the user's lines from that. A path becomes, by the first rule that fits:

1. `<...>`, such as `<string>`: as it is, without the number that torch counts its generated code with.
2. under site-packages or dist-packages: what follows, `torch/nn/modules/conv.py`.
3. a module of this package, wherever it is installed: from `etfarm/` on.
4. under the working folder: relative to it, `models/net.py`.
5. under a folder of sys.path, the longest: relative to that, `net.py`.
6. anything else: the file's name alone.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

_FRAME = re.compile(r'^(\s*File ")([^"\n]+)(", line \d+)', re.MULTILINE)
_INSTALLED = re.compile(r"(?:.*/)?(?:site|dist)-packages/(.+)\Z")
_GENERATED = re.compile(r"(<[^>]*>)\.\d+\Z")
_OWN_FOLDER = Path(__file__).parent.as_posix()
_OWN_ROOT = Path(__file__).parents[3].as_posix()
_STDLIB = Path(os.__file__).parent.as_posix()
_TORCH = ("torch/", "torchao/", "executorch/", "torchgen/", "functorch/")
_MODELS = ("executorch/examples/", "executorch/extension/llm/")
"""Models that ExecuTorch brings along, which count as the user's code."""


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def relative(path: str, base: Path) -> str:
    """Return `path` of a source file in the form that may leave the client, with POSIX separators.

    `base` is the working folder.
    """
    if path.startswith("<"):
        # <eval_with_key>.7 is the seventh of this process: the next export of the same model would have other bytes.
        return _GENERATED.sub(r"\1", path)
    path = path.replace("\\", "/")
    installed = _INSTALLED.match(path)
    if installed:
        return installed[1]
    if path.startswith(f"{_OWN_ROOT}/etfarm/"):
        return path[len(_OWN_ROOT) + 1 :]
    if not path.startswith("/") and ":" not in path:
        return path.rsplit("/", 1)[-1] if path.startswith("../") else path.removeprefix("./")
    roots = [base.as_posix(), base.resolve().as_posix()]
    on_path = (Path(entry).as_posix() for entry in sys.path if entry and Path(entry).is_absolute())
    for root in [*roots, *sorted(on_path, key=len, reverse=True)]:
        prefix = root.rstrip("/") + "/"
        if prefix != "/" and path.startswith(prefix):
            return path[len(prefix) :]
    return path.rsplit("/", 1)[-1]


def relative_trace(trace: str, base: Path) -> str:
    """Return a stack trace's text with the path of every frame made `relative`; lines of code stay."""
    return _FRAME.sub(lambda frame: f"{frame[1]}{relative(frame[2], base)}{frame[3]}", trace)


def make_relative(program: ExportedProgram, base: Path) -> None:
    """Rewrite `stack_trace` of every node in place, including those of submodules (torch.cond's branches)."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                trace = node.meta.get("stack_trace")
                if isinstance(trace, str):
                    node.meta["stack_trace"] = relative_trace(trace, base)


def has_users_line(trace: str, base: Path) -> bool:
    """Return whether a frame of a stack trace's text is the user's code."""
    return any(is_users(frame[1], base) for frame in _FRAME.findall(trace))


def place_of(error: BaseException, base: Path) -> Place | None:
    """Return the innermost line of the user's own code in the traceback of `error`, else in those of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, SyntaxError) and current.filename:
            return Place(relative(current.filename, base), current.lineno or 0, (current.text or "").strip())
        place = _innermost(traceback.extract_tb(current.__traceback__), base)
        if place:
            return place
        current = current.__cause__ or current.__context__
    return None


def library_place_of(error: BaseException, base: Path) -> Place | None:
    """Return the innermost line of an installed library that the user's innermost line calls; None if it calls none.

    The layers of torch.nn count as a library.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at, frame in enumerate(frames) if is_users(frame.filename, base) and not _is_installed(frame)]
    if not own:
        return None
    called = [
        frame
        for frame in frames[own[-1] + 1 :]
        if _is_installed(frame) and (is_users(frame.filename, base) or relative(frame.filename, base).startswith("torch/nn/"))
    ]
    return Place(relative(called[-1].filename, base), called[-1].lineno or 0, called[-1].line or "") if called else None


def place_in(text: str, base: Path) -> Place | None:
    """Return the innermost line of the user's own code in a stack trace that is part of a message."""
    matches = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in [^\n]*\n(?:\s+(?!File ")([^\n]*))?', text, re.MULTILINE)
    frames = [traceback.FrameSummary(file, int(line), "", line=code.strip()) for file, line, code in matches]
    return _innermost(frames, base)


def place_of_frame(frame: traceback.FrameSummary, base: Path) -> Place | None:
    """Return the line of a frame if it is the user's own code."""
    return _innermost([frame], base)


def traced_graph(error: BaseException) -> Graph | None:
    """Return the graph that torch.export had traced when it failed after that; None without one.

    Its messages about sizes name neither an operator nor a line. Source: `_export_to_aten_ir_make_fx` of torch 2.13.
    """
    import torch

    graphs = (frame.f_locals.get("gm") for frame in _frames(error))
    return next((traced.graph for traced in graphs if isinstance(traced, torch.fx.GraphModule)), None)


def environment_of(error: BaseException) -> Any:
    """Return the ShapeEnv whose conditions torch.export found violated; None without one."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    owners = (frame.f_locals.get("self") for frame in _frames(error))
    return next((owner for owner in owners if isinstance(owner, ShapeEnv)), None)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an exception and of those that it came from."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield from (frame for frame, _ in traceback.walk_tb(current.__traceback__))
        current = current.__cause__ or current.__context__


def _innermost(frames: Iterable[traceback.FrameSummary], base: Path) -> Place | None:
    """Return the innermost line outside of torch: the user's own rather than that of an installed library it calls."""
    users = [frame for frame in frames if is_users(frame.filename, base)]
    if not users:
        return None
    own = [frame for frame in users if not _is_installed(frame)]
    last = (own or users)[-1]
    return Place(relative(last.filename, base), last.lineno or 0, last.line or "")


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return _INSTALLED.match(frame.filename.replace("\\", "/")) is not None


def is_users(path: str, base: Path) -> bool:
    """Return whether a source file is the user's, by its path on this machine."""
    if path.startswith("<"):
        return False
    posix = path.replace("\\", "/")
    if posix.startswith(f"{_OWN_FOLDER}/"):
        return posix.startswith(f"{_OWN_FOLDER}/demo_models/")
    if _INSTALLED.match(posix):
        path = relative(posix, base)
        return path.startswith(_MODELS) or not path.startswith(_TORCH)
    return not posix.startswith(f"{_STDLIB}/")
