"""Loading of a ModelSource from `file.py:factory`, `package.module:factory`, `hf:FOLDER` or `demo:NAME`."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from etfarm.client.errors import extra_missing
from etfarm.client.export import construction, usercode
from etfarm.client.export.errors import (
    FactoryFailed,
    example_inputs_not_a_tuple,
    factory_not_found,
    factory_returned_something_else,
    with_article,
)
from etfarm.client.export.source import ModelSource
from etfarm.client.export.spec import Demo, EagerSpec, FileFactory, HuggingFaceFolder, ModuleFactory
from etfarm.client.export.traces import place_of
from etfarm.wire.errors import EtfarmError, error_for

SEED = 0
"""Seed of the random generators of Python, numpy and torch before a factory runs."""


def load_source(spec: EagerSpec, *, say: Callable[[str], None] | None = None) -> ModelSource:
    """Load the model of `spec` as `opened` does. Its modules can be imported by name only while it is exported."""
    with opened(spec, say=say) as source:
        return source


@contextmanager
def opened(
    spec: EagerSpec, *, scope: usercode.ModuleScope | None = None, say: Callable[[str], None] | None = None
) -> Iterator[ModelSource]:
    """Load the model of `spec` by calling its factory in this process; a context in which it is exported.

    torch, random and numpy are seeded with `SEED` before the file is imported and again before the factory is called,
    so that random weights are equal every time and the server's cache has a hit. In the context sys.path starts with the file's
    folder, or with the working folder for a module, and modules below the factory's root are its own; see `ModuleScope`.

    Args:
        spec: the model.
        scope: the scope of the factory's modules; `scope_of(spec)` when None.
        say: called with a sentence about the seed.

    Raises:
        EXTRA_MISSING: torch is not installed.
        MODEL_NOT_FOUND: the module of a ModuleFactory does not exist.
        FACTORY_NOT_FOUND: the function does not exist.
        FactoryFailed: the user's code raised.
        FACTORY_RETURNED_SOMETHING_ELSE: it did not return a model.
        EXAMPLE_INPUTS_NOT_A_TUPLE: it returned (module, x) with an x that is not a tuple.
        REMOTE_CODE_REFUSED, UnsupportedArchitecture, BadCheckpoint: see `ModelSource.huggingface`.
    """
    if isinstance(spec, Demo):
        _require_torch(f"demo:{spec.name}")
        from etfarm.client.export.demos import make_demo

        yield make_demo(spec.name)
        return
    if isinstance(spec, HuggingFaceFolder):
        _require_torch(f"hf:{spec.path}")
        yield ModelSource.huggingface(spec.path, say=say, **dict(spec.options))  # type: ignore[arg-type]  # checked by resolve
        return
    where = str(spec.path) if isinstance(spec, FileFactory) else spec.module
    _require_torch(f"{where}:{spec.name}")
    with scope or scope_of(spec) as own:
        seed(SEED)
        module = _file_module(spec.path, own) if isinstance(spec, FileFactory) else _named_module(spec.module)
        factory = getattr(module, spec.name, None)
        if not callable(factory):
            raise factory_not_found(where, spec.name, _functions(module))
        _must_take_nothing(factory, f"{where}:{spec.name}")
        seed(SEED)
        if say is not None:
            say(f"Seeded torch, numpy and random with {SEED} before calling {where}:{spec.name}.")
        with _users_code(f"{where}:{spec.name}"), construction.recorded(Path.cwd()):
            returned = factory()
        source = _as_source(f"{where}:{spec.name}", returned)
        yield replace(source, keep_mutations=spec.keep_mutations or source.keep_mutations, scope=own)


def scope_of(spec: FileFactory | ModuleFactory) -> usercode.ModuleScope:
    """Return the scope of a factory's modules.

    Raises:
        FactoryFailed: the code of a factory, which is being loaded, needs another factory.
    """
    if usercode.is_loading():
        text = "it submits a model while its own factory is loaded"
        remedy = 'Put what starts jobs under `if __name__ == "__main__":`.'
        raise FactoryFailed(str(spec.path if isinstance(spec, FileFactory) else spec.module), RuntimeError(text), "", remedy)
    return usercode.scope_of_file(spec.path) if isinstance(spec, FileFactory) else usercode.scope_of_module(spec.module)


def seed(value: int) -> None:
    """Seed the generators of random, numpy and torch."""
    import numpy as np
    import torch

    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _require_torch(model: str) -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise extra_missing(
            f"{model} is an eager model and", "export", "torch", instead=", or give a .pt2 or .pte file", model=model
        ) from None


def _file_module(path: Path, scope: usercode.ModuleScope) -> ModuleType:
    with _users_code(str(path)):
        return scope.import_file(path, "etfarm_model")


def _named_module(name: str) -> ModuleType:
    try:
        with _users_code(name):
            return importlib.import_module(name)
    except FactoryFailed as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise error_for(
                "MODEL_NOT_FOUND",
                f"There is no module {missing!r}.",
                f"Python searches the working folder, {Path.cwd()}, and the installed packages.",
                module=name,
            ) from None
        raise


@contextmanager
def _users_code(where: str) -> Iterator[None]:
    """Convert any exception of the user's code, including SystemExit, to a FactoryFailed; etfarm's own errors pass."""
    try:
        yield
    except EtfarmError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error, Path.cwd())
        remedy = ""
        if isinstance(error, ImportError) and "relative import" in str(error):
            remedy = "The file belongs to a package: name it package.module:factory, from the folder above the package."
        elif isinstance(error, ModuleNotFoundError) and error.name:
            remedy = f"Install {error.name.partition('.')[0]!r} where etfarm runs, or start in the folder that has it."
        elif str(error).startswith("operator torchvision::"):
            remedy = "torchvision was built for another torch, such as one with CUDA: install the one for the torch that is here."
        raise FactoryFailed(where, error, str(place or ""), remedy) from error


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _must_take_nothing(factory: Callable[..., object], where: str) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise FactoryFailed(where, error, "", "A factory is called without arguments: give them defaults.") from error
    except ValueError:  # a builtin without a signature; the call will show
        return


def _as_source(where: str, returned: object) -> ModelSource:
    from torch import nn

    if isinstance(returned, ModelSource):
        for name, module in returned.methods.items():
            if not isinstance(module, nn.Module):
                raise factory_returned_something_else(where, f"a ModelSource whose method {name!r} is {_kind(module)}")
        return returned
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
        if not isinstance(returned[1], tuple):
            raise example_inputs_not_a_tuple("forward", type(returned[1]).__name__)
        return ModelSource.of(returned[0], returned[1])
    if inspect.iscoroutine(returned):
        returned.close()
    raise factory_returned_something_else(where, _kind(returned))


def _kind(value: object) -> str:
    from torch import nn

    if value is None:
        return "None"
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__}) without example inputs"
    if isinstance(value, tuple | list):
        return f"{with_article(type(value).__name__)} of {len(value)}: {', '.join(type(item).__name__ for item in value[:4])}"
    return with_article(type(value).__name__)
