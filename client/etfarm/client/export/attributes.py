"""What modules hold besides parameters, buffers and submodules: which of it a call changes, and how it is put back."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, nn

_MAX_DEPTH: Final = 8
_MAX_ELEMENTS: Final = 10_000
"""Length of a container that is looked at, so that a large table in a module costs nothing."""
_MAX_SLOTS: Final = 1_000_000
"""Number of attributes and elements that are looked at."""
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


@dataclass(frozen=True)
class Change:
    """One attribute or element that differs from a snapshot."""

    path: str
    """Its name from the module on: `self.cell.h`, `self.cache["k"]`."""
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
                if key not in self.fixed and not is_same(self.contents.get(key, _ABSENT), new):
                    yield Change(self._path_of(key), self, key, new)
        elif len(self.container) != len(self.contents) or isinstance(self.container, deque | set):
            is_equal = (
                self.container == self.contents
                if isinstance(self.container, set)
                else len(self.container) == len(self.contents) and all(map(is_same, self.contents, self.container))
            )
            if not is_equal:
                yield Change(self.path, self, _ABSENT, list(self.container))
        else:
            for index, (old, new) in enumerate(zip(self.contents, self.container, strict=True)):
                if not is_same(old, new):
                    yield Change(self._path_of(index), self, index, new)

    def put(self, key: Any, value: Any) -> None:
        """Set one element, or all if the key is absent."""
        if key is not _ABSENT and value is not _ABSENT:
            self.container[key] = value
        elif key is not _ABSENT:
            self.container.pop(key, None)
        elif isinstance(self.container, list):
            self.container[:] = value
        elif isinstance(self.container, set):
            self.container.clear()
            self.container.update(value)
        else:
            self.container.clear()
            self.container.extend(value)

    def restore(self) -> None:
        if isinstance(self.container, MutableMapping):
            for change in list(self.changes()):
                self.put(change._key, self.contents.get(change._key, _ABSENT))
        elif any(True for _ in self.changes()):
            self.put(_ABSENT, self.contents)

    def _path_of(self, key: Any) -> str:
        if self.is_object:
            return f"{self.path}.{key}"
        return f"{self.path}[{json.dumps(key) if isinstance(key, str) else repr(key)}]"


class Snapshot:
    """The attributes of a module and its submodules, with the elements of containers and objects among them.

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
        for name, part in module.named_modules():
            self._visit_module(f"self.{name}" if name else "self", part, 0)

    def changes(self) -> list[Change]:
        """Return what differs from the snapshot now."""
        return [change for holder in self._holders.values() for change in holder.changes()]

    def restore(self) -> None:
        """Put back what differs from the snapshot. Values that were written into a tensor stay."""
        for holder in self._holders.values():
            holder.restore()

    def _visit(self, path: str, value: Any, depth: int) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            # Modules in plain attributes, such as a parent, may be submodules as well.
            for name, part in value.named_modules():
                if id(part) not in self._modules:
                    self._modules.add(id(part))
                    self._visit_module(f"{path}.{name}" if name else path, part, depth)
        elif isinstance(value, _PLAIN) or depth > _MAX_DEPTH or self._slots > _MAX_SLOTS:
            return
        elif isinstance(value, tuple):
            for index, element in enumerate(value):
                self._visit(f"{path}[{index}]", element, depth + 1)
        elif isinstance(value, dict | list | deque | set):
            self._hold(path, value, depth)
        elif _is_of_user(value):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._hold(path, vars(value), depth, is_object=True)
            if slots := _Slots(value):
                self._hold(path, slots, depth, is_object=True)
            self._visit_class(type(value), depth)

    def _visit_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if base not in self._classes and not _is_foreign(base):
                self._classes.add(base)
                self._hold(base.__qualname__, _ClassAttributes(base), depth, is_object=True)

    def _visit_module(self, path: str, module: nn.Module, depth: int) -> None:
        if type(module._buffers) is not dict:  # a ScriptModule, whose attributes are not Python's
            return
        self._hold(path, vars(module), depth, is_object=True, fixed=self._standard)
        self._visit_class(type(module), depth)
        buffers = module._buffers
        self._hold(path, buffers, depth, is_object=True, fixed=frozenset(key for key in buffers if buffers[key] is not None))

    def _hold(
        self, path: str, container: Any, depth: int, *, is_object: bool = False, fixed: frozenset[str] = frozenset()
    ) -> None:
        if id(container) in self._holders or len(container) > _MAX_ELEMENTS:
            return
        contents = dict(container) if isinstance(container, MutableMapping) else container.copy()
        holder = _Holder(path, container, contents, is_object, fixed)
        self._holders[id(container)] = holder
        self._slots += sum(key not in fixed for key in contents) if fixed else len(contents)
        if isinstance(contents, set):
            return
        pairs = contents.items() if isinstance(contents, dict) else enumerate(contents)
        for key, value in pairs:
            if key not in fixed:
                self._visit(holder._path_of(key), value, depth + 1)


def _is_of_user(value: Any) -> bool:
    """Return whether an object is of a class that may be of the model, with attributes of its own."""
    if isinstance(value, type | FunctionType | MethodType | Enum):
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


def _is_code(value: Any) -> bool:
    """Return whether an attribute of a class is a method, a class or a descriptor."""
    return callable(value) or hasattr(type(value), "__get__")
