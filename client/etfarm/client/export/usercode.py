"""Loading of a user's own Python files, which contain factories and metrics.

A factory imports from its root: the folder that has its file, or its top package. Modules whose file lies below the root are
loaded from disk for each factory, so that no factory gets the helper of another one, or an earlier version. Everything else is
shared, and so is whatever is installed, also where that lies below a root.
"""
# Paths of modules are texts, and some links must be kept, which Path.resolve() does not.
# ruff: noqa: PTH100, PTH117, PTH119, PTH120, PTH206

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader, FrozenImporter, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

from etfarm.wire.model_limits import MAX_SOURCE_PATH, MAX_SOURCES

_SHARED: Final = frozenset(
    {"etfarm", "torch", "torchao", "torchgen", "functorch", "executorch", "numpy", "google", "grpc", "__main__", "__mp_main__"}
)
"""Top packages that are never loaded again, wherever they are: etfarm runs on them, and most cannot be loaded twice."""

_STDLIB: Final = tuple(
    dict.fromkeys(
        path + os.sep
        for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__))
        for path in (folder, os.path.realpath(folder))
    )
)
_INSTALLED: Final = ("site-packages", "dist-packages")

_lock: Final = threading.RLock()
"""Held while a factory is loaded and exported: sys.modules and sys.path are the process's."""
_executed: Final[set[str]] = set()
"""Files below a root that were executed in this process."""
registrations: Final[set[str]] = set()
"""Files of factories that registered operators, or libraries that they loaded; these stay in this process. Tests replace it."""
_active: Final[ContextVar[bool]] = ContextVar("_active", default=False)


class SourceFile(NamedTuple):
    """A file that a factory imported from below its root."""

    path: str
    """Relative to the root, with POSIX separators."""
    sha256: str
    """Of the bytes that were executed."""


class ModuleScope:
    """The modules of one factory: a context in which files below its root are loaded from disk.

    Afterwards sys.path and the modules of others are as before. Entered again, it has the modules that it loaded before, since
    functions also import while they run. It may be entered within itself.

    Args:
        search: folders that go in front of sys.path.
        roots: the folders of the root; several for a namespace package.
    """

    def __init__(self, search: Sequence[Path], roots: Iterable[Path]) -> None:
        self._search = [str(folder) for folder in search]
        self._roots = tuple(dict.fromkeys(path(root) for root in roots for path in (os.path.abspath, os.path.realpath)))
        self._files: set[SourceFile] = set()
        self._aside: dict[str, ModuleType] = {}
        self._hidden: set[str] = set()
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []
        self._lines: dict[str, Any] = {}
        self._depth = 0
        self._loaded: dict[str, ModuleType] = {}
        self._added: list[str] = []
        self._checked: dict[str, ModuleType] = {}
        """Modules of others, found before: a metric enters its scope for each sample, and a process has thousands."""
        self.was_loaded_before = False
        """Whether this process had modules of this or another factory before, which may have registered the same names."""

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that were executed so far, by path; of more than MAX_SOURCES, the last entry stands for all further ones."""
        files = sorted(self._files)
        if len(files) > MAX_SOURCES:
            rest = files[MAX_SOURCES - 1 :]
            content = "".join(f"{file.path}\0{file.sha256}\n" for file in rest)
            files[MAX_SOURCES - 1 :] = [SourceFile(f"and {len(rest)} more files", _sha256(content.encode()))]
        return tuple(files)

    @property
    def must_be_alone(self) -> bool:
        """Whether its modules need a process of their own: what registers operators cannot be loaded twice.

        That is so if a factory has registered operators in this process, or a module that would be loaded again did.
        """
        return bool(registrations) or any(_has_registered(module) for module in self._find_own().values())

    def __enter__(self) -> ModuleScope:
        _lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self._close()
        finally:
            self._depth -= 1
            _lock.release()

    def _open(self) -> None:
        self.was_loaded_before |= bool(_executed)
        self._token: Token[bool] = _active.set(True)
        self._before = dict(sys.modules)
        self._path_list, self._path = sys.path, list(sys.path)
        sys.path[:0] = [*self._search, *self._added]
        importlib.invalidate_caches()
        for name in self._find_own():
            self._set_aside(name)
        for name, module in list(sys.modules.items()):  # a copy, since other threads may import meanwhile
            if "." in name or self._checked.get(name) is module:
                continue
            file = _file_of(module)
            if not is_installed(file) if file else _folders_of(module):
                self._hide(name)
        self._checked = dict(sys.modules)
        for name in self._loaded.keys() & sys.modules.keys():
            self._set_aside(name)
        sys.modules.update(self._loaded)
        linecache.cache.update(self._lines)
        sys.meta_path.insert(0, self)
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            self._libraries = set(self._torch.ops.loaded_libraries)
            self._dispatch_library = self._torch._C._dispatch_library
            self._torch._C._dispatch_library = self._register

    def _close(self) -> None:
        try:
            if self._torch is not None:
                self._torch._C._dispatch_library = self._dispatch_library
                registrations.update(
                    file for file in set(self._torch.ops.loaded_libraries) - self._libraries if not is_installed(str(file))
                )
            sys.meta_path.remove(self)
            self._remove_loaded()
            former = {*self._path, *self._search}
            self._added = [entry for entry in sys.path if entry not in former]
            sys.path = self._path_list
            sys.path[:] = self._path
            sys.modules.update(self._aside)
            self._aside.clear()
            for holder, name, value in self._attributes:
                holder[name] = value
            self._attributes.clear()
            for file in self._lines:
                linecache.cache.pop(file, None)  # the file may be edited now
            importlib.invalidate_caches()
        finally:
            _active.reset(self._token)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module as the other finders do; the source of one below the root is read from disk, not from __pycache__."""
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is None:
                continue
            if type(spec.loader) is SourceFileLoader and spec.origin and self._owns(name, spec.origin):
                spec.loader = _Loader(self, name, spec.origin)
            return spec
        return None

    def import_file(self, path: Path, prefix: str) -> ModuleType:
        """Run a .py file and return its module.

        Its name depends on the file's stem and not on its folder, since it is part of the export: `PREFIX_STEM`. An installed
        file stays in the process, with a number in its name if another one has that name, and runs once.

        Raises:
            ImportError: the file cannot be imported as Python.
            OSError: the file cannot be read.
            Any exception of the file.
        """
        absolute = str(_absolute(path))
        name, copies = f"{prefix}_{path.stem}", 1
        if is_installed(absolute):
            while name in sys.modules and _file_of(sys.modules[name]) != absolute:
                copies += 1
                name = f"{prefix}_{path.stem}_{copies}"
            if name in sys.modules:
                return sys.modules[name]
            loader: SourceFileLoader = SourceFileLoader(name, absolute)
        else:
            if name in sys.modules:
                self._set_aside(name)
            loader = _Loader(self, name, absolute)
        spec = importlib.util.spec_from_file_location(name, absolute, loader=loader)
        if spec is None:
            raise ImportError(f"{path} cannot be imported as Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and typing look their module up there while it runs
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def execute(self, file: str, data: bytes) -> CodeType:
        """Compile the bytes of a file that is about to be executed, and record them."""
        _executed.add(os.path.realpath(file))
        self._files.add(SourceFile(_shown(self._relative(file)), _sha256(data)))
        tree = ast.parse(data, file)
        # Stack traces show the lines that were executed, also if the file is edited meanwhile: linecache keeps what has no time.
        lines = importlib.util.decode_source(data).splitlines(keepends=True)
        self._lines[file] = linecache.cache[file] = (len(data), None, lines, file)
        for name in _absolute_imports(tree):
            self._hide(name)
        return compile(tree, file, "exec", dont_inherit=True)

    def _relative(self, file: str) -> str:
        """Return the path of a file relative to the root; empty if it is not below it."""
        for path in (os.path.abspath(file), os.path.realpath(file)):
            for root in self._roots:
                prefix = root.rstrip(os.sep) + os.sep
                if path.startswith(prefix):
                    return path[len(prefix) :]
        return ""

    def _owns(self, name: str, file: str) -> bool:
        """Return whether a module is loaded for this factory only."""
        return name.partition(".")[0] not in _SHARED and not is_installed(file) and bool(self._relative(file))

    def _find_own(self) -> dict[str, ModuleType]:
        """Return the present modules below the root. A namespace package is, if all its folders are."""
        own = {}
        for name, module in list(sys.modules.items()):
            if self._checked.get(name) is module:
                continue
            file = _file_of(module)
            folders = [] if file else _folders_of(module)
            if (file and self._owns(name, file)) or (folders and all(self._owns(name, folder + os.sep) for folder in folders)):
                own[name] = module
        return own

    def _hide(self, name: str) -> None:
        """Set a present module of another place aside, with its submodules, if the factory's folder has a module of that name."""
        module = sys.modules.get(name)
        if module is None or name in _SHARED or name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None:
            return
        spec = PathFinder.find_spec(name, self._search)
        if spec is None:
            return
        if not spec.origin:  # a namespace package, which one with a file precedes
            folders = _folders_of(module)
            is_other = not _file_of(module) and folders != list(spec.submodule_search_locations or ())
            is_other = is_other and not any(map(is_installed, folders))
        else:
            is_other = not is_installed(spec.origin) and _file_of(module) != spec.origin
        if is_other and self._before.get(name) is module:
            self._hidden.add(name)
            for below in [each for each in list(sys.modules) if each == name or each.startswith(f"{name}.")]:
                self._set_aside(below)

    def _set_aside(self, name: str) -> None:
        """Take a module out of sys.modules and out of its package until the end of the context."""
        module = self._aside[name] = sys.modules.pop(name)
        self.was_loaded_before |= bool(self._relative(_file_of(module)))
        package, _, own = name.rpartition(".")
        holder = getattr(sys.modules.get(package), "__dict__", {})
        if package and holder.get(own) is module:
            self._attributes.append((holder, own, holder.pop(own)))

    def _remove_loaded(self) -> None:
        """Remove the factory's modules, and those that were only found through its own changes of sys.path."""
        present, former = (
            {os.path.abspath(entry) for entry in entries if isinstance(entry, str)}
            for entries in (sys.path, [*self._path, *self._search])
        )
        added = present - former
        loaded = []
        for name, module in list(sys.modules.items()):
            if self._before.get(name) is module:
                continue
            file, top = _file_of(module), name.partition(".")[0]
            if isinstance(getattr(module, "__loader__", None), ExtensionFileLoader) and not is_installed(file):
                registrations.add(file)
            origin = _file_of(sys.modules.get(top)) or file
            holder = os.path.dirname(origin)
            entry = os.path.dirname(holder) if os.path.basename(origin) == "__init__.py" else holder
            files = [file] if file else [folder + os.sep for folder in _folders_of(module)]
            is_own = bool(files) and all(self._owns(name, each) for each in files)
            if top not in _SHARED and (is_own or top in self._hidden or (entry in added and not is_installed(file))):
                loaded.append((name, module))
        self._loaded = dict(loaded)
        # Afterwards: the folders of a namespace package depend on the package around it.
        for name, module in loaded:
            sys.modules.pop(name, None)
            package, _, own = name.rpartition(".")
            attributes = getattr(sys.modules.get(package), "__dict__", {})
            if package and attributes.get(own) is module:
                del attributes[own]

    def _register(self, *args: Any) -> Any:
        """Create a library of operators, and record it if code below the root does; an installed module may register its own."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
            if os.path.isabs(frame.f_code.co_filename) and self._owns("", frame.f_code.co_filename):
                registrations.add(frame.f_code.co_filename)
                break
            frame = frame.f_back
        return self._dispatch_library(*args)


class _Loader(SourceFileLoader):
    """A loader of source files that ignores compiled ones, which may belong to another version of equal size and time."""

    def __init__(self, scope: ModuleScope, name: str, path: str) -> None:
        super().__init__(name, path)
        self._scope = scope

    def get_code(self, fullname: str) -> CodeType:
        """Read and compile the file."""
        return self._scope.execute(self.path, self.get_data(self.path))


def is_loading() -> bool:
    """Return whether the caller is the code of a factory that is being loaded or exported."""
    return _active.get()


def scope_of_file(path: Path) -> ModuleScope:
    """Return the scope of a file's own imports: its folder, and the one that a link leads to."""
    folders = list(dict.fromkeys((_absolute(path).parent, path.resolve().parent)))
    return ModuleScope(folders, folders)


def scope_of_module(name: str) -> ModuleScope:
    """Return the scope of a module that is found from the working folder: the folder that has its top package or file.

    A link of the package's folder adds the folder that has the link's target.
    """
    top = name.partition(".")[0]
    with _on_path(Path.cwd()):
        specs: Iterator[ModuleSpec | None] = (
            find(top, None, None) for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)) is not None
        )
        spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return ModuleScope([Path.cwd()], ())
    if spec.submodule_search_locations is not None:
        folders = [Path(folder) for folder in spec.submodule_search_locations]
        return ModuleScope([Path.cwd()], [each.parent for folder in folders for each in (folder, folder.resolve())])
    has_file = spec.origin is not None and os.path.isabs(spec.origin)
    return ModuleScope([Path.cwd()], [Path(str(spec.origin)).parent] if has_file else ())


@lru_cache(maxsize=10_000)
def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or an installed distribution; also for a module without a file."""
    if not file or file.startswith(_STDLIB):
        return True
    if any(name in file.split(os.sep) for name in _INSTALLED):
        return True
    real = os.path.realpath(file)
    return real.startswith(_STDLIB) or any(name in real.split(os.sep) for name in _INSTALLED)


def _absolute(path: Path) -> Path:
    """Return an absolute path whose links are kept, unless it has a `..`, which may lead out of a link's target."""
    return path.resolve() if ".." in path.parts else path.absolute()


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _file_of(module: ModuleType | None) -> str:
    """Return the absolute path of a module's file; empty if it has none. Lazy modules stay unloaded."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) and os.path.isabs(file) else ""


def _folders_of(module: ModuleType) -> list[str]:
    """Return the folders of a namespace package."""
    folders = getattr(module, "__dict__", {}).get("__path__") or ()
    return [folder for folder in folders if isinstance(folder, str)]


def _absolute_imports(tree: ast.AST) -> set[str]:
    """Return the top packages that a file imports by absolute names, also in its functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _has_registered(module: ModuleType) -> bool:
    """Return whether a module holds operators of its own, or is compiled."""
    if isinstance(getattr(module, "__loader__", None), ExtensionFileLoader):
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from torch._library.custom_ops import CustomOpDef

    return any(isinstance(value, torch.library.Library | CustomOpDef) for value in list(vars(module).values()))


def _shown(path: str) -> str:
    """Return a path as text without control characters that UTF-8 can hold, of at most `MAX_SOURCE_PATH` characters."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace").replace(os.sep, "/")
    text = "".join(each if ord(each) >= 0x20 else f"\\x{ord(each):02x}" for each in text)
    return text if len(text) <= MAX_SOURCE_PATH else f"…{text[1 - MAX_SOURCE_PATH :]}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
