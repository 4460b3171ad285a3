"""Conversion of any model that a user passes to a PreparedModel, with as many exports as its recipes need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etfarm.client.export import ModelSource, Pt2File, PteFile, resolve
from etfarm.client.export.errors import BadModel, FactoryFailed
from etfarm.client.export.spec import EagerSpec, FileFactory, ModelSpec, ModuleFactory
from etfarm.client.export.transform import torchao_parts
from etfarm.client.submit.calibration import Calibration, calibrated
from etfarm.client.submit.names_file import read_names
from etfarm.client.submit.prepared import (
    PreparedExport,
    PreparedMethod,
    PreparedModel,
    export_key,
    reference_key,
    untransformed_key,
)
from etfarm.client.submit.recipes import read_recipe, reads_values
from etfarm.wire.errors import error_for
from etfarm.wire.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from etfarm.client.export import ExportedModel
    from etfarm.client.export.usercode import ModuleScope

Say: TypeAlias = Callable[[str], None]
"""Callback that takes one sentence about the current work."""

CheckSource: TypeAlias = Callable[[str, ModelSource], None]
"""Callback that takes the name and source of an eager model, and raises to refuse its export. A process of its own may call it,
so that pickle must take it.
"""

_Method: TypeAlias = "nn.Module | ExportedProgram | str | Path"
Model: TypeAlias = "_Method | Mapping[str, _Method] | ModelSource | ModelSpec | PreparedModel"
"""Types that the library takes as a model: a MODEL argument of the command line, a path of a .pt2 or .pte, an eager module
(with `example_inputs`; a GraphModule from convert_pt2e counts as one and is not quantized again), an exported program, a
dict of one of these kinds by method, a ModelSource, or a result of `prepare`.
"""

ExampleInputs: TypeAlias = "tuple[Any, ...] | Mapping[str, tuple[Any, ...]]"
"""Arguments of `forward` for an nn.Module; a dict by method for a dict of them."""


def prepare(
    model: Model,
    *,
    recipes: Sequence[str | Recipe] = (),
    example_inputs: ExampleInputs | None = None,
    calibration: Calibration | None = None,
    batched: bool = False,
    data: Sequence[str | Path] = (),
    name: str = "",
    folder: Path | None = None,
    say: Say | None = None,
    check: CheckSource | None = None,
    on_export: Callable[[str], None] | None = None,
) -> PreparedModel:
    """Prepare `model` for submission.

    Torch is imported for eager models only; their export blocks for seconds.

    Args:
        recipes: recipes to compile with: an eager model is exported once for all recipes that take it unchanged, and
            once more for each that rewrites modules or needs a strict export.
        calibration: samples instead of the model's own; with `batched`, axis 0 of every array indexes the samples.
        data: named data files (.ptd) of a ready program.
        folder: folder for exports and samples as files instead of in memory; the caller removes it after they are
            sent.
        say: called with a sentence about slow work.
        check: called with the name and source of an eager model before it is exported.
        on_export: called with the name of an eager model that is going to be exported.

    Raises:
        UserError: it is not a model, or it cannot be exported; see etfarm.client.export.
        RECIPE_NEEDS_EAGER_MODULE: a recipe rewrites modules, and the model was exported before.
        CALIBRATION_MISMATCH: a sample does not match the example inputs.
    """
    wanted = [read_recipe(recipe) for recipe in recipes]
    if example_inputs is not None and isinstance(model, str | Path | PreparedModel | ModelSource | Pt2File | PteFile | EagerSpec):
        raise _own_inputs(repr(str(model)) if isinstance(model, str | Path) else f"A {type(model).__name__}")
    if isinstance(model, PreparedModel):
        prepared = model
    else:
        if isinstance(model, str | Path):
            model = resolve(str(model))
        steps = ExportSteps(tuple(wanted), folder, check, say, on_export)
        if isinstance(model, EagerSpec):
            prepared = steps.of_spec(model, name or model.label)
        else:
            label, content = _resolve(model, example_inputs, name)
            prepared = steps.of_source(content, label) if isinstance(content, ModelSource) else content
        if isinstance(model, PteFile | Pt2File | FileFactory):
            prepared = replace(prepared, file=model.path)
    if data:
        prepared = replace(prepared, data=_data(prepared, data))
    if prepared.program is None:
        for recipe in wanted:
            prepared.export_for(recipe)
        if calibration is not None:
            prepared = _calibrated(prepared, wanted, calibration, batched, folder, say)
    return prepared


@dataclass(frozen=True)
class ExportSteps:
    """The export of eager models. The arguments are those of `prepare`."""

    recipes: tuple[Recipe, ...]
    folder: Path | None
    check: CheckSource | None = None
    say: Say | None = None
    on_export: Callable[[str], None] | None = None

    def of_spec(self, spec: EagerSpec, name: str) -> PreparedModel:
        """Call a factory and export its model, in a process of its own if its modules cannot be loaded in this one."""
        from etfarm.client.export.factory import scope_of
        from etfarm.client.submit.factory_process import prepare_apart

        if not isinstance(spec, FileFactory | ModuleFactory):
            return self.here(spec, name)
        scope = scope_of(spec)
        if scope.must_be_alone:
            return prepare_apart(self, spec, name)
        try:
            return self.here(spec, name, scope)
        except FactoryFailed as error:
            # What was loaded before may be what it fails on, such as a name that can be registered once.
            if not scope.was_loaded_before:
                raise
            why = f"it fails in this one, which has loaded modules of it before ({error.metadata['exception']})"
        return prepare_apart(self, spec, name, why)

    def here(self, spec: EagerSpec, name: str, scope: ModuleScope | None = None) -> PreparedModel:
        """Call a factory and export its model in this process."""
        from etfarm.client.export.factory import opened

        with opened(spec, scope=scope, say=self.say) as source:
            return self.of_source(source, name)

    def of_source(self, source: ModelSource, name: str) -> PreparedModel:
        """Export a model."""
        if self.check is not None:
            self.check(name, source)
        if self.on_export is not None:
            self.on_export(name)
        return _exports(source, name, self.recipes, self.folder, self.say)


def _resolve(model: Any, example_inputs: ExampleInputs | None, name: str) -> tuple[str, ModelSource | PreparedModel]:
    """Return the name of a model without a factory, with its source if it has to be exported."""
    if isinstance(model, PteFile):
        label = name or model.label
        return label, PreparedModel(label, program=model.path, program_names=read_names(model.path))
    if isinstance(model, Pt2File):
        label = name or model.label
        return label, PreparedModel.of(label, {"forward": PreparedMethod.of_archive(model.path)})
    if isinstance(model, ModelSource):
        return name or type(next(iter(model.methods.values()))).__name__, model
    label, content = _of_methods(model, example_inputs) if isinstance(model, Mapping) else _in_memory(model, example_inputs)
    label = name or label
    return label, content if isinstance(content, ModelSource) else PreparedModel.of(label, content)


def _exports(source: ModelSource, name: str, recipes: Sequence[Recipe], folder: Path | None, say: Say | None) -> PreparedModel:
    """Export the model, once for each distinct requirement of the recipes."""
    from etfarm.client.export import export_source

    wishes: dict[str, list[Recipe | None]] = {}
    for recipe in recipes or (None,):
        wishes.setdefault(export_key(recipe), []).append(recipe)
    # Accuracy is relative to the unmodified modules: 4-bit weights against 4-bit weights would always look accurate.
    references = {reference_key(recipe): recipe for recipe in recipes if torchao_parts(recipe)}
    shares = any(recipe is None or _shares(recipe) for recipe in recipes or (None,))
    exports = {}
    for key in references.keys() - wishes.keys():
        if say is not None:
            say(f"Exporting {name} as it is, to compare with.")
        strict = references[key].strict
        exports[key] = _export(
            export_source(source, name=name, strict=strict, calibrate=False, folder=folder, say=say, shares=shares)
        )
    for key, sharing in wishes.items():
        first = sharing[0]
        if say is not None:
            say(f"Exporting {name}{f' for {first.text}' if key and first is not None else ''}.")
        calibrate = any(recipe is None or reads_values(recipe) for recipe in sharing)
        strict = first.strict if first is not None else False
        exported = export_source(
            source, name=name, strict=strict, recipe=first if key else None, calibrate=calibrate, folder=folder, say=say,
            shares=shares,
        )  # fmt: skip
        exports[key] = _export(exported)
        if exported.is_quantized and (key := untransformed_key(strict=strict)) not in exports:
            # What the source's own transforms do to weights is quantization, too.
            if say is not None:
                say(f"Exporting {name} without its transforms, to compare with.")
            plain = replace(source, source_transforms=())
            exports[key] = _export(
                export_source(plain, name=name, strict=strict, calibrate=False, folder=folder, say=say, shares=shares)
            )
    return PreparedModel(name, exports, eager=True, sources=source.scope.sources if source.scope is not None else ())


def _shares(recipe: Recipe) -> bool:
    """Return whether methods share the buffers that they have in common."""
    return recipe.options.executorch.get("share_mutable_buffers") is not False


def _export(model: ExportedModel) -> PreparedExport:
    methods = {
        name: PreparedMethod(
            method.pt2,
            method.calibration,
            method.input_names,
            method.duration_ms,
            method.input_types,
            transformed=method.transform_ms is not None,
            transform_ms=method.transform_ms,
            quantized=method.quantized,
            output_names=method.output_names,
            relations=method.relations,
            forgotten=method.forgotten,
            small_sizes=method.small_sizes,
            differs=method.differs,
        )
        for name, method in model.methods.items()
    }
    return PreparedExport(methods, model.constant_methods, model.calls)


def _calibrated(
    model: PreparedModel,
    recipes: Sequence[Recipe],
    calibration: Calibration,
    batched: bool,
    folder: Path | None,
    say: Say | None,
) -> PreparedModel:
    """Replace the samples of each export that a recipe calibrates."""
    if say is not None:
        say(f"Reading calibration samples for {model.name}.")
    exports = dict(model.exports)
    for key, export in model.exports.items():
        if not recipes or any(reads_values(recipe) for recipe in recipes if model.export_for(recipe) is export):
            exports[key] = calibrated(export, calibration, model.name, batched=batched, folder=folder)
    return replace(model, exports=exports)


def _in_memory(model: Any, example_inputs: Any) -> tuple[str, ModelSource | dict[str, PreparedMethod]]:
    """Return a label, and the source or methods of a module or exported program of this process."""
    label = type(model).__name__
    if "torch" not in sys.modules:  # without torch it is neither a module nor an exported program
        raise _no_model(model)
    import torch

    if isinstance(model, torch.nn.Module):
        if example_inputs is None:
            raise BadModel(f"The module {label} has no example inputs.", "Give example_inputs=(x, ...).", model=label)
        return label, ModelSource.of(model, example_inputs)
    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is not None:
            raise _own_inputs("An ExportedProgram")
        return "program", _of_programs({"forward": model})
    raise _no_model(model)


def _of_methods(methods: Mapping[Any, Any], example_inputs: Any) -> tuple[str, ModelSource | dict[str, PreparedMethod]]:
    """Return a label, and the source or methods of a dict of models by method."""
    if not methods or not all(isinstance(name, str) and name.isidentifier() for name in methods):
        raise BadModel("A dict of models needs method names as keys.", 'Write {"encode": encoder, "decode": decoder}.')
    kinds = {_kind(model) for model in methods.values()}
    if len(kinds) > 1:
        listing = ", ".join(f"{name!r} is {_kind(model)}" for name, model in methods.items())
        raise BadModel(
            f"The methods of a model are of one kind, and {listing}.",
            "Give only modules, only exported programs, or only paths of .pt2 files.",
        )
    (kind,) = kinds
    if kind == _MODULE:
        if not isinstance(example_inputs, Mapping):
            raise BadModel(
                "A dict of modules has no example inputs by method.",
                f'Give example_inputs={{"{next(iter(methods))}": (x, ...), ...}}.',
            )
        return "model", ModelSource(methods, example_inputs)
    if example_inputs is not None:
        raise _own_inputs("A dict of exported programs")
    if kind == _PROGRAM:
        return "program", _of_programs(methods)
    if kind == _PATH:
        files = {name: resolve(str(path)) for name, path in methods.items()}
        for name, file in files.items():
            if not isinstance(file, Pt2File):
                raise BadModel(
                    f"The method {name!r} is {methods[name]}, but a dict takes paths of .pt2 files only.",
                    "Export it to a .pt2, or use a ModelSource for modules.",
                )
        archives = {name: PreparedMethod.of_archive(file.path) for name, file in files.items() if isinstance(file, Pt2File)}
        return "+".join(dict.fromkeys(file.label for file in files.values())), archives
    raise _no_model(next(iter(methods.values())))


_MODULE, _PROGRAM, _PATH = "a module", "an exported program", "a path"


def _kind(model: object) -> str:
    if isinstance(model, str | Path):
        return _PATH
    if "torch" in sys.modules:
        import torch

        if isinstance(model, torch.nn.Module):
            return _MODULE
        if isinstance(model, torch.export.ExportedProgram):
            return _PROGRAM
    return f"a {type(model).__name__}"


def _of_programs(programs: Mapping[str, Any]) -> dict[str, PreparedMethod]:
    from etfarm.client.export.eager import archive_of
    from etfarm.client.export.shared_state import marked

    with marked(programs):
        return {method: PreparedMethod.of_archive(archive_of(program)) for method, program in programs.items()}


def _data(model: PreparedModel, files: Sequence[str | Path]) -> dict[str, Path]:
    """Return named data files by the name that the program refers to: the file name without .ptd.

    Source: the header of executorch/extension/flat_tensor: at byte 8, "FH01".
    """
    if model.program is None:
        raise error_for(
            "BAD_DATA_FILE",
            f"Data files belong to a compiled program, but {model.name} is a model.",
            "Leave --data out.",
            model=model.name,
        )
    named: dict[str, Path] = {}
    for file in map(Path, files):
        try:
            with file.open("rb") as opened:
                head = opened.read(12)
        except OSError as error:
            raise error_for(
                "BAD_DATA_FILE", f"The data file {file} cannot be read: {error.strerror}.", "Check the path.", path=file
            ) from None
        if head[8:12] != b"FH01":
            raise error_for(
                "BAD_DATA_FILE",
                f"{file} is not a .ptd file of ExecuTorch.",
                "Give the file that `etfarm compile -o` wrote beside the .pte.",
                path=file,
            )
        name = file.name.removesuffix(".ptd")
        if name in named:
            raise error_for(
                "BAD_DATA_FILE", f"Two data files are called {name}: {named[name]} and {file}.", "Give one of them.", path=file
            )
        named[name] = file
    return named


def _own_inputs(what: str) -> BadModel:
    return BadModel(f"{what} brings its own example inputs.", "Leave example_inputs out: they are for an nn.Module.", model=what)


def _no_model(value: object) -> BadModel:
    shown = repr(value)
    saved = "Save its program with save_program(PATH), and give that path. " if hasattr(value, "save_program") else ""
    return BadModel(
        f"{shown if len(shown) <= 40 else f'{shown[:39]}…'} is not a model: its type is {type(value).__name__}.",
        f"{saved}Give the path of a .pt2 or .pte, a text such as file.py:factory or demo:NAME, an nn.Module with example_inputs, "
        "an ExportedProgram, a dict of these by method, or a ModelSource.",
        model=type(value).__name__,
    )
