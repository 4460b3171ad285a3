"""Models as bytes and files; processing them further needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.export.errors import recipe_needs_eager_module
from etfarm.client.export.transform import torchao_parts
from etfarm.client.submit.value_names import ValueNames
from etfarm.wire import digest
from etfarm.wire.errors import error_for
from etfarm.wire.program_tables import read_method_names
from etfarm.wire.pt2 import InputType, read_archive

if TYPE_CHECKING:
    from etfarm.client.export.usercode import SourceFile
    from etfarm.v1 import compile_pb2
    from etfarm.wire.recipes import Recipe


@dataclass(frozen=True)
class PreparedMethod:
    """One exported method, ready to be sent."""

    pt2: bytes | Path = field(repr=False)
    calibration: tuple[bytes | Path, ...] = field(default=(), repr=False)
    """Tensor files; the archive's own example inputs when empty."""
    input_names: tuple[str, ...] = ()
    """Input names in flattened order; empty if unknown."""
    export_ms: float | None = None
    """Duration of the export in ms; None if it was exported before."""
    input_types: tuple[InputType | None, ...] = ()
    """Types parallel to `input_names`."""
    transformed: bool = False
    """Whether modules were rewritten before the export."""
    transform_ms: float | None = None
    """Duration of the rewriting in ms; None if it was done before, or not at all."""
    quantized: bool = False
    """Whether it already contained PT2E's operators."""
    output_names: tuple[str, ...] = ()
    """Output names in flattened order, see `ArchiveFacts`; empty if unknown."""
    relations: tuple[str, ...] = ()
    """Relations between the sizes of the inputs, see `ArchiveFacts`."""
    forgotten: tuple[str, ...] = ()
    """See `ExportedMethod.forgotten`."""
    small_sizes: tuple[str, ...] = ()
    """See `ExportedMethod.small_sizes`."""
    differs: str = ""
    """See `ExportedMethod.differs`."""

    @classmethod
    def of_archive(cls, pt2: bytes | Path) -> PreparedMethod:
        """Return a method that was exported before."""
        facts = read_archive(pt2)
        return cls(
            pt2,
            input_names=facts.input_names,
            output_names=facts.output_names,
            input_types=facts.input_types,
            relations=facts.relations,
            transformed=facts.transformed,
            quantized=facts.quantized,
        )


@dataclass(frozen=True)
class PreparedExport:
    """A model's methods from one export."""

    methods: Mapping[str, PreparedMethod]
    constants: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """A tensor file for each method that only returns a constant."""
    calls: Sequence[tuple[str, bytes | Path | None]] = field(default=(), repr=False)
    """See `ExportedModel.calls`."""

    def stages_done(self) -> list[compile_pb2.Stage]:
        """Return the stages that the client ran, in order, with durations by method for those that ran here."""
        methods = self.methods
        stages = []
        if any(method.transformed for method in methods.values()):
            times = {name: method.transform_ms for name, method in methods.items()}
            stages.append(_stage("SOURCE_TRANSFORM", times))
        if any(method.quantized for method in methods.values()):
            stages.append(_stage("QUANTIZE", {}))
        times = {name: method.export_ms for name, method in methods.items()}
        if stages or any(time is not None for time in times.values()):
            stages.append(_stage("TORCH_EXPORT", times))
        return stages


@dataclass(frozen=True)
class PreparedModel:
    """A model, ready to be sent with the recipes that it was prepared for."""

    name: str
    exports: Mapping[str, PreparedExport] = field(default_factory=dict)
    """Exports by `export_key` of their recipes; recipes with equal requirements share an export."""
    program: Path | None = None
    """A ready .pte instead of exports."""
    data: Mapping[str, Path] = field(default_factory=dict)
    """Named data files (.ptd) of the ready program, by the name that the program refers to."""
    eager: bool = False
    """Whether it was exported here from modules, so that other recipes could get other exports."""
    file: Path | None = None
    """The user's file that it came from; None if there is no such file."""
    sources: tuple[SourceFile, ...] = ()
    """The files that its factory imported from below its root; empty for models without a factory."""
    program_names: ValueNames = field(default_factory=ValueNames)
    """Names of the ready program's inputs and outputs, as `etfarm compile` wrote them beside it; none if unknown."""

    @classmethod
    def of(cls, name: str, methods: Mapping[str, PreparedMethod]) -> PreparedModel:
        """Return a model whose methods were exported before."""
        return cls(name, {"": PreparedExport(methods)})

    @property
    def methods(self) -> Mapping[str, PreparedMethod]:
        """Methods of any of its exports, which have the same names and inputs.

        Empty for a ready program.
        """
        return next(iter(self.exports.values())).methods if self.exports else {}

    def method_names(self) -> Sequence[str]:
        """Return the names of its methods, with constant ones; empty if those of a ready program cannot be read."""
        if self.program is not None:
            return read_method_names(self.program)
        return [name for export in self.exports.values() for name in (*export.methods, *export.constants)]

    @property
    def input_names(self) -> Mapping[str, Sequence[str]]:
        """Input names by method, in flattened order; empty if unknown."""
        return self.names.inputs

    @property
    def names(self) -> ValueNames:
        """The names of its inputs and outputs."""
        if not self.methods:
            return self.program_names
        return ValueNames(
            {name: method.input_names for name, method in self.methods.items()},
            {name: method.output_names for name, method in self.methods.items()},
            {name: method.input_types for name, method in self.methods.items()},
            {name: method.relations for name, method in self.methods.items()},
        )

    def export_for(self, recipe: Recipe) -> PreparedExport:
        """Return the export to compile with `recipe`.

        Raises:
            RECIPE_NEEDS_EAGER_MODULE: the recipe rewrites modules, and the model was exported before.
            NOT_PREPARED_FOR_RECIPE: the modules were exported for other recipes.
        """
        if not self.eager:
            (export,) = self.exports.values()
            transformed = any(method.transformed for method in export.methods.values())
            if torchao_parts(recipe) and not transformed:
                raise recipe_needs_eager_module(recipe.text, self.name)
            return export
        match = self.exports.get(export_key(recipe))
        if match is None:
            raise error_for(
                "NOT_PREPARED_FOR_RECIPE",
                f"{self.name} was not prepared for {recipe.text}, which needs its own export.",
                f"Call prepare(model, recipes=[{recipe.text!r}]).",
                model=self.name,
                recipe=recipe.text,
            )
        return match

    def reference_for(self, recipe: Recipe) -> PreparedExport | None:
        """Return the export before weights were quantized; None if none were, or if that export is unknown."""
        if (untransformed := self.exports.get(untransformed_key(strict=recipe.strict))) is not None:
            return untransformed
        return self.exports.get(reference_key(recipe)) if self.eager and torchao_parts(recipe) else None


def distinct_names(models: Sequence[PreparedModel]) -> list[str]:
    """Return a distinct name for each model of a job.

    Models with the same name get the folders that distinguish their files, as in `v1/net` and `v2/net`, else their
    positions among them, as in `net #0` and `net #1`.
    """
    names = [model.name for model in models]
    for name in {name for name in names if names.count(name) > 1}:
        places = [place for place, model in enumerate(models) if model.name == name]
        for place, distinct in zip(places, _distinguish(name, [models[place].file for place in places]), strict=True):
            names[place] = distinct
    return names


def _distinguish(name: str, files: Sequence[Path | None]) -> list[str]:
    folders = [file.resolve().parent.parts[1:] for file in files if file is not None]
    if len(set(folders)) == len(files):
        for depth in range(1, max(map(len, folders)) + 1):
            candidates = ["/".join([*parts[-depth:], name]) for parts in folders]
            if len(set(candidates)) == len(candidates):
                return candidates
    return [f"{name} #{place}" for place in range(len(files))]


def reference_key(recipe: Recipe) -> str:
    """Return the key of the export before a recipe rewrites modules, which its outputs are compared with."""
    return _key([], recipe.strict)


def untransformed_key(*, strict: bool) -> str:
    """Return the key of the export without the source's own transforms, of a model whose weights these quantize."""
    return digest.canonical_json({"source_transforms": False, "strict": strict})


def export_key(recipe: Recipe | None) -> str:
    """Return the requirements of a recipe for an export of eager modules; empty if it has no special ones."""
    if recipe is None:
        return ""
    return _key([part.canonical() for part in torchao_parts(recipe)], recipe.strict)


def _key(parts: list[dict[str, object]], strict: bool) -> str:
    return digest.canonical_json({"source_transform": parts, "strict": strict}) if parts or strict else ""


def _stage(name: str, times: Mapping[str, float | None]) -> compile_pb2.Stage:
    from etfarm.v1 import common_pb2, compile_pb2

    known = {method: time for method, time in times.items() if time is not None}
    # Round: sums of times with 3 digits have more digits, as in 0.1 + 0.2.
    total = round(sum(known.values()), 3) if known else None
    return compile_pb2.Stage(stage=name, where=common_pb2.ACTOR_CLIENT, duration_ms=total, methods=known)
