"""What models hold besides parameters, buffers and submodules: which of it a call changes, and how it is put back.

That is in attributes of modules, in containers and objects among these, and in the variables of the user's functions.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.functions import (
    FreeVariables,
    Variables,
    cells_of,
    defaults_of,
    function_of,
    globals_in,
    is_foreign,
    is_foreign_class,
    methods_of,
    names_in,
)
from etfarm.client.export.iterators import Position, frozen, thawed

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

_log = logging.getLogger(__name__)

_MAX_DEPTH: Final = 8
_MAX_ELEMENTS: Final = 10_000
"""Length of a container that is looked at, so that a large table in a module costs nothing."""
_MAX_SLOTS: Final = 1_000_000
"""Number of attributes and elements that are looked at."""
_MAX_ARRAYS: Final = 1 << 24
"""Size in bytes of the NumPy arrays that are looked at, together."""
_MAX_FUNCTIONS: Final = 500
_ABSENT: Final = object()
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_FOREIGN: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
"""Packages whose objects hold no state of a model, such as loggers, locks and graphs."""


def is_same(old: Any, new: Any) -> bool:
    """Return whether a value is unchanged: numbers and strings by value, tuples by their elements, others by identity.

    A size of an export, which may only be compared with a guard, differs from each number.
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(is_same, old, new))
    return type(old) in _PLAIN and bool(old == new or (old != old and new != new))


def _is_as_before(old: Any, new: Any) -> bool:
    if isinstance(old, Position):
        now = frozen(new)
        return isinstance(now, Position) and is_same(old.state, now.state)
    return is_same(old, new)


@dataclass(frozen=True)
class Change:
    """One attribute, variable or element that differs from a snapshot."""

    path: str
    """Its name as code of the user has it: `self.cell.h`, `self.cache["k"]`, `NUM`, `helper.n`."""
    _holder: _Holder = field(repr=False)
    _key: Any = field(repr=False)
    _new: Any = field(repr=False)

    def apply(self) -> None:
        """Make this change again, to what was put back."""
        self._holder.put(self._key, self._new)


@dataclass(frozen=True)
class _ClassAttributes(MutableMapping[str, Any]):
    """The data among the attributes of a class, by name."""

    owner: type

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in [*vars(self.owner).items()] if not (name.startswith("__") or _is_code(value)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)


@dataclass(frozen=True)
class _Slots(MutableMapping[str, Any]):
    """What is set of the `__slots__` of an object, by name."""

    owner: Any

    def __iter__(self) -> Iterator[str]:
        return (name for name in _slots_of(type(self.owner)) if hasattr(self.owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)


@dataclass(frozen=True)
class _Holder:
    """A container, or the attributes of an object, with its elements at the time of a snapshot."""

    path: str
    container: Any
    contents: Any
    is_object: bool
    fixed: frozenset[str]
    """Keys that do not count, such as those of each nn.Module."""

    def changes(self) -> Iterator[Change]:
        if isinstance(self.container, MutableMapping):
            for key in dict.fromkeys([*self.contents, *self.container]):
                new = self.container.get(key, _ABSENT)
                if key not in self.fixed and not _is_as_before(self.contents.get(key, _ABSENT), new):
                    yield Change(self._path_of(key), self, key, frozen(new))
        elif len(self.container) != len(self.contents) or isinstance(self.container, deque | set):
            is_equal = (
                self.container == self.contents
                if isinstance(self.container, set)
                else len(self.container) == len(self.contents) and all(map(_is_as_before, self.contents, self.container))
            )
            if not is_equal:
                yield Change(self.path, self, _ABSENT, [*map(frozen, self.container)])
        else:
            for index, (old, new) in enumerate(zip(self.contents, self.container, strict=True)):
                if not _is_as_before(old, new):
                    yield Change(self._path_of(index), self, index, frozen(new))

    def put(self, key: Any, value: Any) -> None:
        """Set one element, or all if the key is absent."""
        if key is not _ABSENT and value is not _ABSENT:
            self.container[key] = thawed(value)
        elif key is not _ABSENT:
            self.container.pop(key, None)
        elif isinstance(self.container, list):
            self.container[:] = map(thawed, value)
        elif isinstance(self.container, set):
            self.container.clear()
            self.container.update(value)
        else:
            self.container.clear()
            self.container.extend(map(thawed, value))

    def restore(self) -> None:
        if isinstance(self.container, MutableMapping):
            for change in list(self.changes()):
                self.put(change._key, self.contents.get(change._key, _ABSENT))
        elif any(True for _ in self.changes()):
            self.put(_ABSENT, self.contents)

    def _path_of(self, key: Any) -> str:
        if self.is_object:
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{json.dumps(key) if isinstance(key, str) else repr(key)}]"


@dataclass(frozen=True)
class _Array(_Holder):
    """A NumPy array. Its values are put back in place, since constants of an exported program may share its memory."""

    def changes(self) -> Iterator[Change]:
        new, old = self.container, self.contents
        if new.shape == old.shape and new.tobytes() != old.tobytes():  # by bytes: NaN equals itself
            yield Change(self.path, self, _ABSENT, new.copy())

    def put(self, key: Any, value: Any) -> None:
        self.container[...] = value


class Snapshot:
    """The attributes of a module and its submodules, with the elements of containers and objects among them.

    Variables of the user's functions that calls reach count as well: globals, free variables, default values, and attributes of
    functions. A function is reached by its name in the code of another, or as a value of an attribute or a variable.

    Buffers that are None count, as does the absence of a buffer: torch.export does not keep what a call makes of these.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch import nn

        self._standard = frozenset({*vars(nn.Module()), "_is_full_backward_hook", "_initialize_hook", "_load_hook"})
        self._holders: dict[int, _Holder] = {}
        self._slots = 0
        self.tensors: list[Tensor] = []
        """The tensors among them."""
        self._modules = {id(part) for part in module.modules()}
        self._classes = set[type]()
        self._slotted = set[int]()
        self._arrays_size = 0
        self._reached = set[FunctionType]()
        self._queue = deque[FunctionType]()
        self._waiting: dict[str, list[FunctionType]] = {}
        """Methods whose name no function uses yet."""
        self._used = set[str]()
        self._cells = set[int]()
        self._is_in_variables = False
        """Whether variables are visited: objects of installed packages among them, such as loggers, are left alone."""
        self._names: dict[int, set[str]] = {}
        """Variables that are held already, by the id of their Python module's dict."""
        for name, part in module.named_modules():
            self._visit_module(f"self.{name}" if name else "self", part, 0)
        self._follow_functions()

    def changes(self) -> list[Change]:
        """Return what differs from the snapshot now."""
        return [change for holder in self._holders.values() for change in holder.changes()]

    def restore(self) -> None:
        """Put back what differs from the snapshot. Values that were written into a tensor stay."""
        for holder in self._holders.values():
            try:
                holder.restore()
            except Exception:  # noqa: BLE001 - such as an attribute that cannot be set; the export's own error counts
                _log.debug("%s cannot be put back", holder.path, exc_info=True)

    def _visit(self, path: str, value: Any, depth: int) -> None:
        try:
            self._look(path, value, depth)
        except Exception:  # noqa: BLE001 - attribute access runs code of the user, which may refuse it; the export goes on
            _log.debug("%s cannot be looked at", path, exc_info=True)

    def _look(self, path: str, value: Any, depth: int) -> None:
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            # Modules in plain attributes, such as a parent, may be submodules as well.
            for name, part in value.named_modules():
                if id(part) not in self._modules:
                    self._modules.add(id(part))
                    self._visit_module(f"{path}.{name}" if name else path, part, depth)
        elif isinstance(value, (*_PLAIN, ModuleType)) or depth > _MAX_DEPTH or self._slots > _MAX_SLOTS:
            return
        elif isinstance(value, tuple):
            for index, element in enumerate(value):
                self._visit(f"{path}[{index}]", element, depth + 1)
        elif isinstance(value, dict | list | deque | set):
            self._hold(path, value, depth)
        elif isinstance(value, np.ndarray):
            self._hold_array(path, value)
        elif isinstance(value, type):
            if not is_foreign_class(value):
                self._visit_class(value, depth)
        elif isinstance(value, FunctionType | MethodType | partial):
            self._visit_callable(path, value, depth)
        elif _is_of_user(value):
            if (
                self._is_in_variables
                and is_foreign_class(type(value))
                and not isinstance(value, SimpleNamespace | argparse.Namespace)
            ):
                return
            if isinstance(getattr(value, "__dict__", None), dict):
                self._hold(path, vars(value), depth, is_object=True)
            if id(value) not in self._slotted and (slots := _Slots(value)):
                self._slotted.add(id(value))
                self._hold(path, slots, depth, is_object=True)
            self._visit_class(type(value), depth)
        elif (function := function_of(value)) is not None:
            self._reach(function)

    def _visit_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if base in self._classes or _is_foreign(base):
                continue
            self._classes.add(base)
            self._hold(_short_name(base), _ClassAttributes(base), depth, is_object=True)
            for name, function, is_implicit in methods_of(base):
                if is_implicit or name in self._used:
                    self._reach(function)
                else:
                    self._waiting.setdefault(name, []).append(function)

    def _visit_callable(self, path: str, value: FunctionType | MethodType | partial[Any], depth: int) -> None:
        if isinstance(value, MethodType):
            self._visit(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, partial):
            self._visit(f"{path}.func", value.func, depth + 1)
            self._visit(f"{path}.args", value.args, depth + 1)
            self._visit(f"{path}.keywords", value.keywords, depth + 1)
        if (function := function_of(value)) is not None:
            self._reach(function)

    def _reach(self, function: FunctionType) -> None:
        if function not in self._reached and len(self._reached) < _MAX_FUNCTIONS:
            self._reached.add(function)
            self._queue.append(function)

    def _follow_functions(self) -> None:
        """Visit the variables of each function that was reached, which reaches others."""
        self._is_in_variables = True
        while self._queue:
            function = self._queue.popleft()
            names = names_in(function.__code__)
            cells = {name: cell for name, cell in cells_of(function).items() if id(cell) not in self._cells}
            self._cells.update(map(id, cells.values()))
            self._hold(_short_name(function), vars(function), 0, is_object=True)
            if cells:
                self._hold("", FreeVariables(cells), 0, is_object=True)
            for name, value in defaults_of(function).items():
                self._visit(name, value, 1)
            self._visit_variables("", function.__globals__, globals_in(function.__code__), names, set())
            for name in names:
                if name not in self._used:
                    self._used.add(name)
                    for method in self._waiting.pop(name, ()):
                        self._reach(method)

    def _visit_variables(
        self, path: str, namespace: dict[str, Any], names: tuple[str, ...], attributes: tuple[str, ...], visited: set[int]
    ) -> None:
        visited.add(id(namespace))
        known = self._names.setdefault(id(namespace), set())
        if new := tuple(name for name in names if name not in known and not name.startswith("__")):
            known.update(new)
            self._hold(path, Variables(namespace, new), 0, is_object=True)
        for name in names:  # variables of other Python modules, as in `config.count`
            value = namespace.get(name)
            if isinstance(value, ModuleType) and id(vars(value)) not in visited and not is_foreign(value):
                self._visit_variables(f"{path}.{name}" if path else name, vars(value), attributes, attributes, visited)

    def _visit_module(self, path: str, module: nn.Module, depth: int) -> None:
        if type(module._buffers) is not dict:  # a ScriptModule, whose attributes are not Python's
            return
        self._hold(path, vars(module), depth, is_object=True, fixed=self._standard)
        self._visit_class(type(module), depth)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._visit(f"{path}._forward_hooks", hook, depth + 1)
        buffers = module._buffers
        self._hold(path, buffers, depth, is_object=True, fixed=frozenset(key for key in buffers if buffers[key] is not None))

    def _hold_array(self, path: str, array: np.ndarray) -> None:
        if id(array) not in self._holders and array.flags.writeable and self._arrays_size + array.nbytes <= _MAX_ARRAYS:
            self._arrays_size += array.nbytes
            self._holders[id(array)] = _Array(path, array, array.copy(), False, frozenset())

    def _hold(
        self, path: str, container: Any, depth: int, *, is_object: bool = False, fixed: frozenset[str] = frozenset()
    ) -> None:
        if id(container) in self._holders or len(container) > _MAX_ELEMENTS:
            return
        contents: Any
        if isinstance(container, MutableMapping):
            contents = {key: frozen(value) for key, value in [*container.items()]}
        else:
            contents = [*map(frozen, container)] if isinstance(container, list | deque) else container.copy()
        holder = _Holder(path, container, contents, is_object, fixed)
        self._holders[id(container)] = holder
        self._slots += sum(key not in fixed for key in contents) if fixed else len(contents)
        if isinstance(contents, set):
            return
        pairs = list(contents.items() if isinstance(contents, dict) else enumerate(contents))
        for key, value in pairs:
            if key not in fixed and not isinstance(value, Position):
                self._visit(holder._path_of(key), value, depth + 1)


def _is_of_user(value: Any) -> bool:
    """Return whether an object is of a class that may be of the model, with attributes of its own."""
    if isinstance(value, Enum):
        return False
    if not isinstance(getattr(value, "__dict__", None), dict) and not any(True for _ in _slots_of(type(value))):
        return False
    return isinstance(value, SimpleNamespace | argparse.Namespace) or not _is_foreign(type(value))


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _slots_of(kind: type) -> Iterator[str]:
    """Return the names of a class's slots, those of its bases too."""
    for base in kind.__mro__:
        yield from (name for name, value in vars(base).items() if isinstance(value, MemberDescriptorType))


def _short_name(value: type | FunctionType) -> str:
    """Return the name of a class or a function without the function that it is defined in."""
    return value.__qualname__.rpartition("<locals>.")[2]


def _is_code(value: Any) -> bool:
    """Return whether an attribute of a class is a method, a class or a descriptor."""
    return callable(value) or hasattr(type(value), "__get__")
