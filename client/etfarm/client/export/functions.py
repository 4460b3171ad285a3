"""Variables of a model's functions that are no attributes of its objects: globals, free variables and default arguments.

Which of them a function uses is read from its code. Functions of installed packages are not looked into: their globals are
caches, registries and loggers, and there are too many of them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, partialmethod
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from etfarm.client.export.usercode import is_installed

_OF_GLOBALS: Final = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"))
_UNCALLED: Final = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__del__", "__repr__", "__getattr__"}
)
"""Special methods that no call of a model uses, or only those of PyTorch."""


@dataclass(frozen=True)
class Variables(MutableMapping[str, Any]):
    """Some of the variables of a Python module, by name."""

    namespace: dict[str, Any]
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self.namespace)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.namespace[name] = value

    def __delitem__(self, name: str) -> None:
        del self.namespace[name]


@dataclass(frozen=True)
class FreeVariables(MutableMapping[str, Any]):
    """What a function uses of the functions around it, by name."""

    cells: dict[str, CellType]

    def __iter__(self) -> Iterator[str]:
        return (name for name, cell in self.cells.items() if _is_set(cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # it has no value yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises
    except ValueError:
        return False
    return True


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Return the cells of a function's free variables by name, without the class that `super()` needs."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name != "__class__"}


def function_of(value: Any) -> FunctionType | None:
    """Return the user's function behind a function, a method, a property or a decorator; None if there is none."""
    for _ in range(10):
        if value is None or (isinstance(value, FunctionType) and not is_foreign(value)):
            return value
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property | partial | partialmethod):
            value = value.func
        else:  # such as torch.no_grad() and functools.cache make of a function
            attributes = getattr(value, "__dict__", None)
            value = attributes.get("__wrapped__") if isinstance(attributes, dict) else None
    return None


def is_foreign(value: FunctionType | ModuleType) -> bool:
    """Return whether a function or a Python module belongs to Python, to an installed package or to etfarm."""
    if isinstance(value, FunctionType):
        file, name = value.__code__.co_filename, str(value.__globals__.get("__name__", ""))
    else:
        # Not with getattr(), for which a lazy module may import what is not installed.
        file, name = str(vars(value).get("__file__") or ""), str(vars(value).get("__name__", ""))
    return name.partition(".")[0] == "etfarm" or is_installed(file)


def is_foreign_class(kind: type) -> bool:
    """Return whether a class belongs to Python, to an installed package or to etfarm."""
    module = sys.modules.get(kind.__module__)
    return module is not None and kind.__module__ != "__main__" and is_foreign(module)


def methods_of(kind: type) -> Iterator[tuple[str, FunctionType, bool]]:
    """Yield the user's functions that a class defines: name, function, and whether it is called without its name."""
    for name, value in [*vars(kind).items()]:
        if name not in _UNCALLED and (function := function_of(value)) is not None:
            yield name, function, name.startswith("__") or name == "forward"


@lru_cache(maxsize=10_000)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that code uses: globals, attributes and methods, those of functions within it, too."""
    return tuple(dict.fromkeys(name for part in _codes(code) for name in part.co_names))


@lru_cache(maxsize=10_000)
def globals_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that code reads or assigns, also of those that do not exist, and of builtins."""
    instructions = (each for part in _codes(code) for each in dis.get_instructions(part) if each.opcode in _OF_GLOBALS)
    return tuple(dict.fromkeys(each.argval for each in instructions))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the default values of a function's parameters, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
