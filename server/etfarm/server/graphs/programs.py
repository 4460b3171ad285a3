"""Exported programs, read from screened archives in a fraction of the time that torch takes; for children only."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO

from torch._export.serde import schema, serialize
from torch.export.pt2_archive._package import load_pt2

from etfarm.wire.regions import inline_regions


def read_program(source: str | BinaryIO) -> Any:
    """Return the exported program of a .pt2, without the regions of torch.no_grad and torch.autocast that change no operator.

    Not torch.export.load, which falls back to the older, unscreened layout on failure.

    Args:
        source: a path that ends in .pt2, or an open file.

    Raises:
        ValueError: a region does not fit its graph; or torch's own exceptions.
    """
    with _cache_type_hints(), _cache_expressions():
        program = load_pt2(source).exported_programs["model"]
    try:
        inline_regions(program)
    except (IndexError, KeyError, StopIteration, ValueError) as error:
        why = "a region of torch.no_grad or torch.autocast does not fit the graph that it calls"
        raise ValueError(why) from error
    return program


@contextmanager
def _cache_type_hints() -> Iterator[None]:
    """Cache the type hints of the schema's classes while torch reads a program.

    torch resolves them anew for each object, which takes half of its time. Source:
    torch._export.serde.serialize._dict_to_dataclass, which looks `typing` up in its module.
    """
    original = serialize.typing
    serialize.typing = _TypingOfSchema()
    try:
        yield
    finally:
        serialize.typing = original


class _TypingOfSchema:
    """The module `typing` with cached type hints."""

    def __getattr__(self, name: str) -> Any:
        return getattr(typing, name)

    def get_type_hints(self, cls: type, globalns: dict[str, Any]) -> dict[str, Any]:
        return _hints(cls)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema))


@contextmanager
def _cache_expressions() -> Iterator[None]:
    """Cache the expressions of sizes while torch reads a program, which repeats them in the sizes and strides of each tensor.

    sympy takes milliseconds for each, three quarters of the time of a program with dynamic dimensions. Source:
    torch._export.serde.serialize.GraphModuleDeserializer._parse_sym_expr, which also calls itself with sympy's expressions.
    """
    original = serialize.GraphModuleDeserializer._parse_sym_expr

    def parse(deserializer: Any, expression: Any, hint: Any = None) -> Any:
        if not isinstance(expression, str):
            return original(deserializer, expression, hint)
        known = vars(deserializer).setdefault("_known_expressions", {})
        if (expression, hint) not in known:
            known[expression, hint] = original(deserializer, expression, hint)
        return known[expression, hint]

    serialize.GraphModuleDeserializer._parse_sym_expr = parse
    try:
        yield
    finally:
        serialize.GraphModuleDeserializer._parse_sym_expr = original
