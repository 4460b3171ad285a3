"""How operators, their places in a user's source, and errors are written in messages. Stdlib only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from etfarm.server.compile.program.places import all_nodes, places
from etfarm.server.graphs.sources import source_of
from etfarm.v1.compile_pb2 import Place

MAX_CHARACTERS: Final = 400
NAMED: Final = 3
"""Maximum number of operators in a message; the error's metadata has all of them."""
_NOISE = re.compile(
    r"^(\s*|An error occurred when running .*|Exception:?|Traceback .*|={3,}.*|-{3,}.*|The following .*:|.*Original exception.*"
    r"|While executing .*|GraphModule: .*|Original traceback:|Use tlparse .*|For more information .*|\s*File \".*)$"
)
_PATH = re.compile(r"(/[\w.\-+@]+){2,}/?")
CONTROL_FLOW: Final = {
    "cond": "torch.cond", "map": "map", "map_impl": "map", "scan": "scan", "while_loop": "torch.while_loop",
}  # fmt: skip
"""Operators of control flow as users call them: torch 2.13 has `map` and `scan` in other modules only."""
Programs = Mapping[str, Any]
"""Exported or edge programs by method."""


def first_line(error: BaseException) -> str:
    """Return the line of an exception's message that states the problem: at most 400 characters, without the server's paths.

    For a wrapper ("An error occurred when running pass ..."), the line is from the wrapped cause.
    """
    error = find_cause(error)
    for line in str(error).splitlines():
        if not _NOISE.match(line):
            return _PATH.sub(lambda m: m[0].rstrip("/").rpartition("/")[2], line.strip())[:MAX_CHARACTERS]
    return type(error).__name__


def describe_node(node: Any) -> str:
    """Return a node's operator with its source line, like `aten::bmm at models/net.py:31 (x @ y), in module head`."""
    return describe(schema_name(node) or node.name, places([node]))


def name_as_called(node: Any) -> str:
    """Return the name of a node's operator as users know it: `aten::bmm`, `torch.cond`."""
    name = str(getattr(node.target, "__name__", node.target))
    return schema_name(node) or CONTROL_FLOW.get(name, name)


def find_cause(error: BaseException) -> BaseException:
    """Return the cause that a pass of ExecuTorch has wrapped, or else the error itself."""
    for _ in range(8):
        if error.__cause__ is None or not str(error).lstrip().startswith("An error occurred when running"):
            break
        error = error.__cause__
    return error


def describe_operators(names: Sequence[str], programs: Programs) -> str:
    """Return operators of programs with their lines, by the names in their schemas; at most three of them."""
    nodes: dict[str, list[Any]] = defaultdict(list)
    for program in programs.values():
        for node in all_nodes(program):
            name = schema_name(node)
            if name in names:
                nodes[name or ""].append(node)
    return list_first(describe(name, places(nodes[name])) for name in names)


def list_first(words: Iterable[str]) -> str:
    """Return the first three different words of several, like `a; b; c and 2 more`; empty if there are none."""
    shown = list(dict.fromkeys(words))
    return "; ".join(shown[:NAMED]) + (f" and {len(shown) - NAMED} more" if len(shown) > NAMED else "")


def describe_place(where: Iterable[Place]) -> str:
    """Return the first place that has a source line, like `models/net.py:31 (y = x + 1), in module head`; else empty."""
    for place in where:
        if place.HasField("source"):
            source = place.source
            module = f", in module {place.module}" if place.module else ""
            return f"{source.file}:{source.line} ({source.code[:80]}){module}"
    return ""


def describe_places(where: Iterable[Place]) -> str:
    """Return the first three source lines, like ` at models/net.py:31, models/net.py:35 and more`; empty if there are none."""
    lines = list(dict.fromkeys(f"{place.source.file}:{place.source.line}" for place in where if place.HasField("source")))
    more = " and more" if len(lines) > NAMED else ""
    return f" at {', '.join(lines[:NAMED])}{more}" if lines else ""


def describe(name: str, where: Iterable[Place]) -> str:
    """Return an operator's name with its most frequent place that has a source line.

    For example `aten::bincount at models/net.py:31 (torch.bincount(x)), in module head`.
    """
    place = describe_place(where)
    return f"{name} at {place}" if place else name


def describe_control_flow(nodes: Sequence[Any]) -> str:
    """Return branches and loops with their lines, such as `torch.cond at models/net.py:31 (torch.cond(c, f, g, [x]))`.

    At most three of them.
    """
    return list_first(describe(name_as_called(node), places([node])) for node in nodes)


def schema_name(node: Any) -> str | None:
    """Return the name in the schema of a node's operator, like `aten::bmm`; None if it has none."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return None if schema is None else str(schema.name)


def find_line(text: str) -> str:
    """Return the source line that a message of torch ends in, like `models/net.py:31 (y = x + 1)`; empty if it has none."""
    source = source_of(text)
    if source is not None:
        return f"{source.file}:{source.line} ({source.code[:80]})"
    # torch truncates the beginning of this path.
    caused = re.search(r"Caused by: \((?:[^()]*/)?([^/()]+\.py:\d+) in \w+\)", text)
    return caused[1] if caused and not caused[1].startswith("non_strict_utils") else ""
