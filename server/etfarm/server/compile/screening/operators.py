"""The operators that an uploaded .pt2 may use: the committed list, and those of plug-ins and of the server's owner. Stdlib only.

Operators are named as in `torch.ops`: `aten.add.Tensor`, `higher_order.cond`. Unlisted operators are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from etfarm.wire import digest as digests
from etfarm.wire.errors import UserError

LIST: Final = Path(__file__).with_name("operators.txt")
"""Made by server/generate_operators.py; a test compares it with the installed toolchain."""
PLUGINS: Final = "etfarm.operators"
"""Entry points of this group allow operators: the name is the operator, the value the module that registers it."""
MAX_LIST_BYTES: Final = 1 << 20

_NAME: Final = re.compile(r"(?!(_operator|math|torch)\.)[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z][A-Za-z0-9_]*")
_HIGHER_ORDER: Final = re.compile(r"higher_order\.[a-z][a-z0-9_]*")


class BadOperators(UserError):
    """A list of operators, given to the server or by a plug-in, cannot be used."""

    reason = "BAD_OPERATORS"


@dataclass(frozen=True)
class Added:
    """An operator that is allowed beside the committed list."""

    name: str
    """`NAMESPACE.NAME.OVERLOAD`."""
    module: str = ""
    """Module that a child imports before it loads a program that uses the operator; empty if torch has the operator anyway."""
    origin: str = ""
    """The plug-in's distribution and version that allows it; empty for the server's owner."""


@dataclass(frozen=True)
class Operators:
    """The operators that uploaded programs may use. Sent to the children with each request."""

    added: tuple[Added, ...] = ()

    @cached_property
    def targets(self) -> frozenset[str]:
        """All operators in the form of the `target` of a .pt2's nodes: `torch.ops.aten.add.Tensor`, `_operator.add`."""
        return builtin() | {f"torch.ops.{operator.name}" for operator in self.added}

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides whether a program is refused, and of what computes the operators."""
        added = [[operator.name, operator.module, operator.origin] for operator in self.added]
        return digests.of_value([digests.of_file(LIST), added])

    def modules(self, graph: bytes) -> list[str]:
        """Return the modules to import before a program is loaded.

        Args:
            graph: the program's screened JSON.
        """
        used = (operator for operator in self.added if f'"torch.ops.{operator.name}"'.encode() in graph)
        return sorted({operator.module for operator in used if operator.module})


@cache
def builtin() -> frozenset[str]:
    """Return the committed list's operators as targets."""
    lines = LIST.read_text(encoding="ascii").splitlines()
    names = (line for line in lines if line and not line.startswith("#"))
    return frozenset(name if name.startswith(("_operator.", "math.", "torch.")) else f"torch.ops.{name}" for name in names)


def read(files: Iterable[Path] = ()) -> Operators:
    """Return the operators that this server allows: the committed list, those of installed plug-ins, and those in `files`.

    Raises:
        BadOperators: a file cannot be read, or a file or plug-in has a malformed name of an operator.
    """
    added = [operator for file in files for operator in _of_file(file)]
    for point in entry_points(group=PLUGINS):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed distribution"
        _require_operator(point.name, f"the plug-in {origin}")
        added.append(Added(point.name, point.module, origin))
    return Operators(tuple(sorted(set(added), key=lambda operator: (operator.name, operator.module, operator.origin))))


def _of_file(file: Path) -> list[Added]:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise BadOperators(f"{file} must be at most {MAX_LIST_BYTES} bytes.", "Name one operator a line.")
        lines = data.decode().splitlines()
    except OSError as error:
        raise BadOperators(f"The list of operators {file} cannot be read: {error.strerror}.", "Check its path.") from None
    except UnicodeDecodeError:
        raise BadOperators(f"The list of operators {file} is not text.", "Name one operator a line.") from None
    names = [line.partition("#")[0].strip() for line in lines]
    for name in filter(None, names):
        _require_operator(name, str(file))
    return [Added(name) for name in names if name]


def _require_operator(name: str, where: str) -> None:
    if not _NAME.fullmatch(name) and not _HIGHER_ORDER.fullmatch(name):
        raise BadOperators(
            f"{where} allows {name[:100]!r}, which is no operator's name.",
            "Name it like aten.add.Tensor: the namespace, the name, and the overload or `default`.", operator=name[:100],
        )  # fmt: skip
