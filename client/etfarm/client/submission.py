"""Step 1, client: from models, recipes and inputs to what Submit takes: a JobSpec and the artifacts that it names."""

from __future__ import annotations

import io
import json
import sys
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etfarm.client import npz
from etfarm.client.errors import NotAvailable, UserError
from etfarm.client.export import ModelSource, Pt2File, PteFile, resolve
from etfarm.client.export.spec import EagerSpec, ModelSpec
from etfarm.wire import recipes as recipe_names
from etfarm.wire import tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.export import ExportedProgram

    from etfarm.client.export import ExportedModel
    from etfarm.v1 import common_pb2, job_pb2

DEFAULT_RECIPE = "xnnpack_fp32"

Say = Callable[[str], None]
"""Told in one sentence what is being done."""


class BadModel(UserError):
    """The library was given something as a model that is none."""

    reason = "BAD_MODEL_ARGUMENT"


class InputsDiffer(UserError):
    """One inputs file cannot serve models whose inputs have other names or another order."""

    reason = "INPUTS_DIFFER"


@dataclass(frozen=True)
class PreparedMethod:
    """One exported method, ready to be sent."""

    pt2: bytes | Path = field(repr=False)
    calibration: tuple[bytes, ...] = field(default=(), repr=False)
    """Tensor files; the archive's own example inputs when empty."""
    input_names: tuple[str, ...] = ()
    """In flattened order."""
    export_ms: float | None = None
    """How long exporting took here; None where it was done before."""


@dataclass(frozen=True)
class PreparedModel:
    """A model as bytes: what is left to do with it needs no torch."""

    name: str
    methods: Mapping[str, PreparedMethod] = field(default_factory=dict)
    program: Path | None = None
    """A ready .pte instead of methods."""


Model: TypeAlias = "str | Path | nn.Module | ExportedProgram | ModelSource | ModelSpec | PreparedModel"
"""What the library takes as a model: a MODEL argument of the command line, a path of a .pt2 or .pte, an eager module (with
`example_inputs`), an exported program, a ModelSource, or one that `prepare` made."""

Inputs: TypeAlias = "Path | str | Mapping[str, NDArray[np.generic]] | Sequence[NDArray[np.generic]]"
"""What the library takes as inputs: an .npz, arrays by name (`METHOD/` selects the method), or arrays in flattened order."""


def prepare(
    model: Model, *, example_inputs: tuple[Any, ...] | None = None, name: str = "", say: Say | None = None
) -> PreparedModel:
    """`model`, a `Model`, ready to be sent. Imports torch for eager models only, and then blocks for seconds.

    Raises:
        UserError: it is no model, or it cannot be exported; as etfarm.client.export says.
    """
    if example_inputs is not None and isinstance(model, str | Path | PreparedModel | ModelSource | Pt2File | PteFile | EagerSpec):
        raise _own_inputs(repr(str(model)) if isinstance(model, str | Path) else f"A {type(model).__name__}")
    if isinstance(model, PreparedModel):
        return model
    if isinstance(model, str | Path):
        model = resolve(str(model))
    if isinstance(model, PteFile):
        return PreparedModel(name or model.label, program=model.path)
    if isinstance(model, Pt2File):
        return PreparedModel(name or model.label, {"forward": PreparedMethod(model.path, input_names=_pt2_inputs(model.path))})
    if isinstance(model, EagerSpec):
        from etfarm.client.export import load_source

        label, model = model.label, load_source(model, say=say)
    elif isinstance(model, ModelSource):
        label = type(next(iter(model.methods.values()))).__name__
    else:
        label, model = _in_memory(model, example_inputs)
        if isinstance(model, PreparedMethod):
            return PreparedModel(name or label, {"forward": model})
    from etfarm.client.export import export_source

    if say is not None:
        say(f"Exporting {label}.")
    return _exported(export_source(model, name=name or label))


def read_recipe(text: str) -> recipe_names.Recipe:
    """The recipe of a name with arguments, or of the TOML file that `text` names.

    Raises:
        UserError: there is none of that name, an argument is wrong, or the file cannot be read.
    """
    if not text.endswith(".toml"):
        return recipe_names.parse(text)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise recipe_names.BadRecipeText(f"The recipe file {text} cannot be read: {why}.", path=text) from None
    return recipe_names.from_toml(content)


@dataclass
class Submission:
    """A job before it is sent. `blobs` holds every artifact that `spec` names, by digest."""

    spec: job_pb2.JobSpec
    blobs: dict[str, tuple[common_pb2.Artifact, bytes | Path]] = field(default_factory=dict, repr=False)
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    """One id for all tries of this submission, so that a lost answer makes no second job."""

    def add(self, source: bytes | Path) -> common_pb2.Artifact:
        """The artifact that `source` is, which will be sent if the store lacks it."""
        from etfarm.v1 import common_pb2
        from etfarm.wire import chunks, digest

        if isinstance(source, bytes):
            artifact = chunks.artifact_of(source)
        else:
            artifact = common_pb2.Artifact(digest=digest.of_file(source), size_bytes=source.stat().st_size)
        self.blobs[artifact.digest] = (artifact, source)
        return artifact

    def add_candidates(self, models: Sequence[PreparedModel], recipes: Sequence[recipe_names.Recipe]) -> None:
        """One candidate for each model and recipe; a ready program is one by itself, whatever the recipes."""
        for model in models:
            if model.program is not None:
                self._add_program(model, model.program)
                continue
            methods = {name: self._method(method) for name, method in model.methods.items()}
            for recipe in recipes:
                candidate = self.spec.candidates.add(name=model.name, recipe=recipe.json)
                candidate.model.name = model.name
                for name, source in methods.items():
                    candidate.model.methods[name].CopyFrom(source)
                times = [method.export_ms for method in model.methods.values() if method.export_ms is not None]
                if times:
                    candidate.stages_done.add(stage="TORCH_EXPORT", duration_ms=sum(times), where="CLIENT")

    def add_inputs(self, inputs: Inputs, models: Sequence[PreparedModel], methods: Sequence[str]) -> None:
        """`inputs`, an `Inputs`, as tensor files by method.

        Raises:
            UserError: the file cannot be read, or its keys fit no input.
            InputsDiffer: the models do not agree on the inputs' names.
        """
        files: dict[str, bytes] = {}
        for model in models:
            for method, values in _values(inputs, model, methods).items():
                data = tensors.encode(values)
                if files.setdefault(method, data) != data:
                    raise InputsDiffer(
                        f"The models of one job take {method}'s inputs under different names or in another order.",
                        "Submit them one by one.",
                        method=method,
                    )
        for method, data in files.items():
            self.spec.inputs[method].CopyFrom(self.add(data))

    def _add_program(self, model: PreparedModel, path: Path) -> None:
        from etfarm.wire import digest

        candidate = self.spec.candidates.add(name=model.name)
        pte = self.add(path)
        candidate.program.pte.CopyFrom(pte)
        candidate.program.digest = digest.of_program(pte.digest, {})

    def _method(self, method: PreparedMethod) -> job_pb2.MethodSource:
        from etfarm.v1 import job_pb2

        return job_pb2.MethodSource(
            exported_program=self.add(method.pt2), calibration=[self.add(sample) for sample in method.calibration]
        )


def _in_memory(model: Any, example_inputs: tuple[Any, ...] | None) -> tuple[str, ModelSource | PreparedMethod]:
    """A label, and what a module or exported program of this process is."""
    label = type(model).__name__
    if "torch" not in sys.modules:  # then it can be neither a module nor an exported program
        raise _no_model(model)
    import torch

    if isinstance(model, torch.nn.Module):
        if example_inputs is None:
            raise BadModel(f"The module {label} came without example inputs.", "Give example_inputs=(x, ...).", model=label)
        return label, ModelSource.of(model, example_inputs)
    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is not None:
            raise _own_inputs("An ExportedProgram")
        buffer = io.BytesIO()
        torch.export.save(model, buffer)
        return "program", PreparedMethod(buffer.getvalue(), input_names=tuple(model.graph_signature.user_inputs))
    raise _no_model(model)


def _own_inputs(what: str) -> BadModel:
    return BadModel(f"{what} brings its own example inputs.", "Leave example_inputs out: they are for an nn.Module.", model=what)


def _no_model(given: object) -> BadModel:
    shown = repr(given)
    return BadModel(
        f"{shown if len(shown) <= 40 else f'{shown[:39]}…'} is no model: it is of the type {type(given).__name__}.",
        "Give the path of a .pt2 or .pte, a text such as file.py:factory or demo:NAME, an nn.Module with example_inputs, "
        "an ExportedProgram or a ModelSource.",
        model=type(given).__name__,
    )


def _exported(model: ExportedModel) -> PreparedModel:
    if model.constant_methods:
        raise NotAvailable("A model with constant methods", "Leave constant_methods out of the ModelSource.")
    methods = {
        name: PreparedMethod(method.pt2, method.calibration, method.input_names, method.duration_ms)
        for name, method in model.methods.items()
    }
    return PreparedModel(model.name, methods)


def _pt2_inputs(path: Path) -> tuple[str, ...]:
    """The names of an archive's inputs in flattened order, read without torch; none where they cannot be told.

    Source: InputSpec of torch/_export/serde/schema.py.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("models/model.json"))
            specs = json.loads(archive.read(entry))["graph_module"]["signature"]["input_specs"]
        names = []
        for spec in specs:
            if "user_input" in spec:
                names.append(next(iter(spec["user_input"]["arg"].values()))["name"])
            elif "constant_input" in spec:
                names.append(spec["constant_input"]["name"])
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()  # the server, which loads it with torch, is the one to refuse it
    return tuple(map(str, names))


def _values(inputs: Inputs, model: PreparedModel, methods: Sequence[str]) -> dict[str, list[tensors.Value]]:
    """The values of each method that `inputs` has some for, in flattened order where the names are known."""
    if isinstance(inputs, str | Path):
        named = npz.read_named(Path(inputs))
    else:
        pairs = inputs.items() if isinstance(inputs, Mapping) else ((str(i), array) for i, array in enumerate(inputs))
        named = {}
        for key, array in pairs:
            method, slash, rest = key.partition("/")
            method, name = (method, rest) if slash else (npz.UNSAID, key)
            named.setdefault(method, {})[name] = _value(name, array)
    known: Sequence[str] = list(model.methods) or list(methods) or [m for m in named if m] or ["forward"]
    result = {}
    for method, values in npz.by_method(named, known).items():
        names = model.methods[method].input_names if method in model.methods else ()
        result[method] = npz.order(values, names, method) if names else _in_places(values, model, method)
    return result


def _value(name: str, value: Any) -> tensors.Value:
    import numpy as np

    if value is None or isinstance(value, bool | int | float):
        return tensors.Scalar(name, value)
    if hasattr(value, "detach"):
        from etfarm.client.export.samples import wire_value

        return wire_value("inputs", name, value)
    return tensors.from_array(name, np.asarray(value))


def _in_places(values: Mapping[str, tensors.Value], model: PreparedModel, method: str) -> list[tensors.Value]:
    """Values of a program whose inputs' names nobody here knows: their keys are all places, and no place is left out.

    Raises:
        UnknownInput: a key is a name; the order of a file's entries says nothing.
        InputMissing, DuplicateInput: a place is left out, or there twice.
    """
    for key in values:
        place = key.removeprefix("arr_")
        if not (place.isascii() and place.isdecimal()):
            name = model.program.name if model.program is not None else model.name
            said = f"{name} has no input names: use 0, 1, ... as keys, not {key!r}."
            raise npz.UnknownInput(said, method=method, key=key)
    last = max((int(key.removeprefix("arr_")) for key in values), default=-1)
    if last >= len(values):
        taken = {int(key.removeprefix("arr_")) for key in values}
        missing = next(place for place in range(last) if place not in taken)
        raise npz.InputMissing(f"{method}: the input {missing} is missing.", f"There is {last}.", method=method, missing=missing)
    return npz.order(values, [str(place) for place in range(last + 1)], method)
