"""The line of user code and the module of a node of an exported graph. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:, in .*)?$')
_MARKS = re.compile(r"^[\s~^]+$")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(.+)$")
_STANDARD_LIBRARY = re.compile(r"/lib/python3(?:\.\d+t?)?/(?!(?:site|dist)-packages/)")
_BRACKET = re.compile(r"(?=[()\[\]])")
_ROOT = re.compile(r"^L(?:\['self'\]|__self__)\.?")

_FRAMEWORKS = ("torch/", "torchao/", "executorch/", "torchgen/", "functorch/")
_MODELS = ("executorch/examples/", "executorch/extension/llm/")
"""Parts of frameworks that are models: their lines are what a profile of them is about."""
_OWN = "etfarm/"
_DEMOS = "etfarm/client/export/demo_models/"
"""Path of the demo models, which count as user code; the rest of etfarm only wraps it."""


@dataclass(frozen=True)
class Source:
    """A line of user code from a stack trace."""

    file: str
    line: int
    code: str
    """Text of the line, stripped; empty if the stack trace does not have it."""


def source_of(stack_trace: str | None) -> Source | None:
    """Return the innermost frame outside of torch, torchao, executorch, etfarm and `<...>`; None if there is no such frame.

    Models that ExecuTorch brings along, such as those of `executorch/examples`, are not outside by path, but count as well.

    The client makes paths relative (`models/net.py`, `torch/nn/modules/conv.py`); absolute paths of other exporters are also
    supported. The code is taken from the stack trace, since the server does not have the user's files.
    """
    source = None
    for file, line, code in _frames(stack_trace or ""):
        if is_users(file):
            source = Source(file, line, code)
    return source


def is_users(file: str) -> bool:
    """Return whether a path of a stack trace is user code."""
    if file.startswith("<"):
        return False
    path = file.replace("\\", "/")
    installed = _INSTALLED.search(path)
    if installed is None and _STANDARD_LIBRARY.search(path):
        return False
    tail = installed[1] if installed else path
    if _DEMOS in f"/{path}" or tail.startswith(_MODELS):
        return True
    if tail.startswith((*_FRAMEWORKS, _OWN)):
        return False
    # A checkout installed in editable mode: .../client/etfarm/client/export/eager.py
    return not any(f"/{part}/etfarm/{part}/" in path for part in ("server", "client", "device_agents"))


def module_of(nn_module_stack: str | None) -> str | None:
    """Return the innermost module's path, `layer1.conv`, of a serialized nn_module_stack; None for the model itself.

    The text is `KEY,PATH,TYPE;KEY,PATH,TYPE;...`, outermost first.

    Source: `meta["nn_module_stack"]` as torch._export.serde.serialize writes it.
    """
    if not nn_module_stack:
        return None
    for entry in reversed(_split(nn_module_stack, ";")):
        fields = _split(entry, ",")
        if len(fields) >= 2:
            return path_of(fields[1])
    return None


def path_of(path: str) -> str | None:
    """Return a module's path as torch records it, `L['self'].layer1.conv`, as `layer1.conv`; None for the model itself."""
    return _ROOT.sub("", path).replace("slice(None, None, None)", "").strip(".") or None


def common_module(modules: Iterable[str | None]) -> str | None:
    """Return the deepest module that contains all of `modules`; None if that is the model itself.

    Args:
        modules: paths, empty for the model itself; None, which is ignored, for unknown ones.
    """
    paths = [module.split(".") if module else [] for module in modules if module is not None]
    if not paths:
        return None
    shared = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or None


def _split(text: str, separator: str) -> list[str]:
    """Split at the separators outside of brackets, in linear time: those before an opening bracket, or before none."""
    parts: list[list[str]] = [[]]
    pieces = _BRACKET.split(text)
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        first, *more = [piece] if following.startswith((")", "]")) else piece.split(separator)
        parts[-1].append(first)
        parts.extend([part] for part in more)
    return ["".join(part) for part in parts]


def _frames(text: str) -> Iterator[tuple[str, int, str]]:
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        frame = _FRAME.match(line)
        if frame is not None:
            no_code = _FRAME.match(following) or _MARKS.match(following)
            yield frame[1], int(frame[2]), "" if no_code else following.strip()
