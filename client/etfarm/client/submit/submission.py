"""Conversion of models, recipes and inputs to a JobSpec and the artifacts that it names."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import STAGE, TRANSFORM_STAGE
from etfarm.client.submit.early_checks import check_source, is_program, require_methods
from etfarm.client.submit.input_names import InputMissing, Named
from etfarm.client.submit.input_types import require_fitting
from etfarm.client.submit.inputs import Inputs, files_of, read_samples, values_of
from etfarm.client.submit.preparation import ExampleInputs, Say, prepare
from etfarm.client.submit.prepared import PreparedMethod, PreparedModel, distinct_names
from etfarm.client.submit.recipes import reads_values
from etfarm.client.submit.value_names import ValueNames
from etfarm.client.transport import transfers
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import compile_pb2
from etfarm.wire import chunks, tensors
from etfarm.wire.errors import UserError, error_for
from etfarm.wire.samples import MAX_SAMPLES, MAX_SAMPLES_BYTES, AccuracySamples

if TYPE_CHECKING:
    from etfarm.client.export.source import ModelSource
    from etfarm.client.export.usercode import SourceFile
    from etfarm.client.submit.calibration import Calibration
    from etfarm.client.submit.prepared import PreparedExport
    from etfarm.v1 import common_pb2, job_pb2
    from etfarm.wire.recipes import Recipe


_MAX_NAMED: Final = 64
"""Number of forgotten names, and of differing sizes, that a server accepts; the first ones are sent."""
_NAME_CHARACTERS: Final = 500
"""Length that a server accepts for each."""


@dataclass
class Submission:
    """A job before it is sent.

    `blobs` holds every artifact that `spec` names, by digest.
    """

    spec: job_pb2.JobSpec
    blobs: dict[str, tuple[common_pb2.Artifact, bytes | Path]] = field(default_factory=dict, repr=False)
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    """Id shared by all attempts of this submission, so that a lost answer does not create a second job."""
    names: ValueNames = field(default_factory=ValueNames)
    """Names of the only model's inputs and outputs; none for several models."""

    def add(self, source: bytes | Path) -> common_pb2.Artifact:
        """Add an artifact for `source`, which is uploaded if the store lacks it, and return it."""
        artifact = _artifact_of(source)
        self.blobs[artifact.digest] = (artifact, source)
        return artifact

    def add_candidates(self, models: Sequence[PreparedModel], recipes: Sequence[Recipe]) -> None:
        """Add one candidate for each model and recipe; a ready program is one candidate, whatever the recipes.

        Models with the same name get distinct names, so that reports can distinguish them.

        Raises:
            RECIPE_NEEDS_EAGER_MODULE, NOT_PREPARED_FOR_RECIPE: a model lacks the export that a recipe needs.
        """
        for name, model in zip(distinct_names(models), models, strict=True):
            if model.program is not None:
                self._add_program(name, model, model.program)
                continue
            sent: dict[tuple[int, int, bool], job_pb2.Model] = {}
            for recipe in recipes:
                export, reference, calibrate = model.export_for(recipe), model.reference_for(recipe), reads_values(recipe)
                candidate = self.spec.candidates.add(name=name, recipe=recipe.json, recipe_label=recipe.label)
                key = id(export), id(reference), calibrate
                known = sent[key] = sent.get(key) or self._model(name, export, reference, calibrate, model.sources)
                candidate.model.CopyFrom(known)
                candidate.stages_done.extend(export.stages_done())

    def add_inputs(self, named: Mapping[str, Named], models: Sequence[PreparedModel], methods: Sequence[str]) -> None:
        """Add inputs by method and key as tensor files by method.

        Raises:
            UserError: a key matches no input, or an input's dtype or shape does not fit.
            INPUTS_DIFFER: the models' input names differ.
        """
        for method, data in _input_files(named, models, methods).items():
            self.spec.inputs[method].CopyFrom(self.add(data))

    def add_further_inputs(
        self, samples: Iterator[tuple[str, Mapping[str, Named]]], models: Sequence[PreparedModel], methods: Sequence[str]
    ) -> None:
        """Add more samples, which accuracy is computed on: read one by one, and no more than count.

        Args:
            samples: named for errors; otherwise the arguments and errors are those of `add_inputs`.

        Raises:
            InputMissing: one has inputs of a method for which `add_inputs` added none.
        """
        taken = {method: AccuracySamples() for method in self.spec.inputs}
        for method, timed in self.spec.inputs.items():
            taken[method].take(timed.digest, timed.size_bytes)
        while not all(each.is_full for each in taken.values()) and (sample := next(samples, None)) is not None:
            with _named(sample[0]):
                for method, data in _input_files(sample[1], models, methods).items():
                    if method not in taken:
                        raise InputMissing(
                            f"it has inputs of {method}, and the first file, which is timed, has none.",
                            "Give the first file inputs of each method.", method=method,
                        )  # fmt: skip
                    self.spec.further_inputs[method].samples.extend(self._add_samples([data], taken[method]))

    def _add_samples(self, sources: Iterable[bytes | Path], taken: AccuracySamples) -> Iterator[common_pb2.Artifact]:
        """Add those of several samples that accuracy may be over, and yield them."""
        for source in sources:
            artifact = _artifact_of(source)
            if taken.take(artifact.digest, artifact.size_bytes):
                self.blobs[artifact.digest] = (artifact, source)
                yield artifact
            if taken.is_full:
                return

    def _add_program(self, name: str, model: PreparedModel, path: Path) -> None:
        from etfarm.wire import digest

        candidate = self.spec.candidates.add(name=name)
        pte = self.add(path)
        candidate.program.pte.CopyFrom(pte)
        data = {key: self.add(file) for key, file in model.data.items()}
        for key, artifact in data.items():
            candidate.program.data[key].CopyFrom(artifact)
        candidate.program.digest = digest.of_program(pte.digest, {name: artifact.digest for name, artifact in data.items()})

    def _model(
        self,
        name: str,
        export: PreparedExport,
        reference: PreparedExport | None,
        calibrate: bool,
        sources: Sequence[SourceFile],
    ) -> job_pb2.Model:
        """Return the message for an export.

        Samples are included only if they are used: there may be thousands. Accuracy is computed on the first ones.
        """
        from etfarm.v1 import common_pb2, job_pb2

        files = [common_pb2.SourceFile(path=file.path, sha256=file.sha256) for file in sources]
        model = job_pb2.Model(name=name, sources=files)
        for method, prepared in export.methods.items():
            model.methods[method].exported_program.CopyFrom(self.add(prepared.pt2))
            for named, names in (
                (model.methods[method].forgotten_buffers, prepared.forgotten),
                (model.methods[method].small_sizes, prepared.small_sizes),
            ):
                named.extend(name[:_NAME_CHARACTERS] for name in names[:_MAX_NAMED])
            model.methods[method].differs = prepared.differs[:_NAME_CHARACTERS]
            if reference is not None:
                model.methods[method].reference.CopyFrom(self.add(reference.methods[method].pt2))
            if calibrate:
                model.methods[method].calibration.extend(self.add(sample) for sample in prepared.calibration)
            elif self.spec.HasField("measurement") and method not in self.spec.inputs:
                model.methods[method].samples.extend(self._add_samples(prepared.calibration, AccuracySamples()))
        for method, value in export.constants.items():
            model.constant_methods[method].CopyFrom(self.add(value))
        for method, inputs in export.calls:
            model.calls.add(method=method, inputs=None if inputs is None else self.add(inputs))
        return model


def _artifact_of(source: bytes | Path) -> common_pb2.Artifact:
    from etfarm.v1 import common_pb2
    from etfarm.wire import chunks, digest

    if isinstance(source, bytes):
        return chunks.artifact_of(source)
    return common_pb2.Artifact(digest=digest.of_file(source), size_bytes=source.stat().st_size)


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Begin errors about one of several files of inputs with its name; empty for the only one."""
    try:
        yield
    except UserError as error:
        if file:
            error.prefix(file)
            error.metadata["file"] = file
        raise


def _check_source(
    name: str, source: ModelSource, *, file: str, methods: Sequence[str], inputs: Mapping[str, Named] | None
) -> None:
    """Call `check_source` with the inputs of a file. A function of the module, as a process of its own may call it."""
    with _named(file):
        check_source(name, source, methods, inputs)


def _input_files(named: Mapping[str, Named], models: Sequence[PreparedModel], methods: Sequence[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for model in models:
        for method, values in values_of(named, model, methods).items():
            types, relations = model.names.types.get(method, ()), model.names.relations.get(method, ())
            require_fitting(method, values, types, relations, is_program=model.program is not None)
            data = tensors.encode(values)
            if files.setdefault(method, data) != data:
                raise error_for(
                    "INPUTS_DIFFER",
                    f"The models of one job take {method}'s inputs under different names or in another order.",
                    "Submit them one by one.",
                    method=method,
                )
    return files


@dataclass(frozen=True)
class SubmissionRequest:
    """The models, recipes and inputs of a job as the caller passed them."""

    model: Any
    recipes: str | Recipe | Sequence[str | Recipe]
    example_inputs: ExampleInputs | None = None
    calibration: Calibration | None = None
    batched: bool = False
    data: Sequence[str | Path] = ()
    inputs: Inputs | None = None

    @property
    def listed_recipes(self) -> list[str | Recipe]:
        """The recipes as a list."""
        return several(self.recipes)

    @property
    def models(self) -> list[Any]:
        """The models as a list."""
        return several(self.model)

    def gather(self, spec: job_pb2.JobSpec, recipes: Sequence[Recipe], folder: Path, say: Say | None = None) -> Submission:
        """Create the submission, with its files in `folder`.

        This blocks while models are exported.

        Args:
            say: called with a sentence about slow work.
        """
        methods = list(spec.methods)
        has_program = any(is_program(model) for model in self.models)
        samples = read_samples(self.inputs) if self.inputs is not None else iter(())
        file, inputs = next(samples, ("", None))
        exporting = ""

        def on_export(name: str) -> None:
            nonlocal exporting
            exporting = name

        models = []
        for model in self.models:
            try:
                prepared = prepare(
                    model,
                    recipes=recipes,
                    example_inputs=self.example_inputs,
                    calibration=self.calibration,
                    batched=self.batched,
                    data=self.data if not has_program or is_program(model) else (),
                    folder=folder,
                    say=say,
                    check=partial(_check_source, file=file, methods=methods, inputs=inputs),
                    on_export=on_export,
                )
            except UserError as error:
                # Most errors of an export name only the method, which several models have.
                is_of_export = bool(exporting) and error.stage in (STAGE, TRANSFORM_STAGE)
                if is_of_export and len(self.models) > 1 and "model" not in error.metadata:
                    error.prefix(exporting)
                    error.metadata["model"] = exporting
                raise
            models.append(prepared)
            exporting = ""
        if methods:
            for model in models:
                if known := model.method_names():
                    require_methods(model.name, known, methods)
        submission = Submission(spec, names=models[0].names if len(models) == 1 else ValueNames())
        if inputs is not None:
            with _named(file):
                submission.add_inputs(inputs, models, methods)
            if spec.HasField("measurement") and any(model.program is None for model in models):
                submission.add_further_inputs(samples, models, methods)
            if say is not None:
                self._say_left_out(spec, file, all(model.program is not None for model in models), say)
        submission.add_candidates(models, recipes)
        return submission

    def _say_left_out(self, spec: job_pb2.JobSpec, first: str, has_programs_only: bool, say: Say) -> None:
        """Say how many files of a folder of inputs are not used, and why."""
        assert self.inputs is not None  # their first file was read
        count = files_of(self.inputs)
        used = 1 + max((len(spec.further_inputs[method].samples) for method in spec.further_inputs), default=0)
        if used >= count:
            return
        if not spec.HasField("measurement"):
            why = "accuracy is computed where a program is measured"
        elif has_programs_only:
            why = "a compiled program has no model that accuracy could be relative to"
        else:
            why = f"equal ones count once, up to {MAX_SAMPLES} and {MAX_SAMPLES_BYTES >> 20} MiB"
        say(f"Using {used} of the {count} files in {Path(str(self.inputs))}, from {first} on: {why}.")


def several(one_or_more: Any) -> list[Any]:
    """Return the items of a list or tuple, or a list with the only item."""
    return list(one_or_more) if isinstance(one_or_more, list | tuple) else [one_or_more]


async def inspect_on_farm(stubs: Stubs, path: Path, name: str) -> PreparedModel:
    """Upload a .pt2 or .pte, and return it as the farm describes it; see `AsyncSubmissions.inspect`."""
    artifact = await chunks.artifact_of_file(path)
    await transfers.upload_missing(stubs, {artifact.digest: (artifact, path)})
    is_program = path.suffix.lower() == ".pte"
    wanted = compile_pb2.MODEL_FORMAT_PTE if is_program else compile_pb2.MODEL_FORMAT_PT2
    described = await stubs.compiler.Inspect(compile_pb2.InspectRequest(digest=artifact.digest, format=wanted))
    label = name or path.stem
    if is_program:
        return PreparedModel(label, program=path)
    method = PreparedMethod(
        path, input_names=tuple(described.input_names), output_names=tuple(described.output_names),
        transformed=described.transformed, quantized=described.quantized,
    )  # fmt: skip
    return PreparedModel.of(label, {"forward": method})
