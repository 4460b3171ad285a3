"""Step 1, client: an eager model becomes .pt2 archives and calibration samples that any server can lower.

The bytes are the cache's key, so equal models must give equal bytes in every process: one archive name, paths of source
files relative to the working folder, nothing of the client's disk.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.client.export.archive import InputType, read_archive
from etfarm.client.export.errors import (
    STAGE,
    BadModelSource,
    DataDependentBranch,
    ExportFailed,
    ModelInTrainMode,
    ModelNotOnCpu,
    UnsupportedInput,
)
from etfarm.client.export.noise import quiet
from etfarm.client.export.samples import flat_values, input_leaves, leaf_names, must_match, unshared, wire_value
from etfarm.client.export.shapes import must_be_bounded, normal_shapes, specialized
from etfarm.client.export.source import ModelSource, must_be_tuple
from etfarm.client.export.traces import make_relative, place_in, place_of
from etfarm.client.export.transform import Transform
from etfarm.wire import digest
from etfarm.wire.errors import EtfarmError
from etfarm.wire.tensors import encode

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from etfarm.wire.recipes import Recipe

_LINE_LIMIT = 400
_INTS = 1 << 63
"""ExecuTorch's ints have 64 bits."""


@dataclass(frozen=True)
class ExportedMethod:
    """One method of an exported model."""

    pt2: bytes | Path = field(repr=False)
    """The archive of torch.export.save, ATen dialect. It carries the example inputs."""
    calibration: tuple[bytes | Path, ...] = field(repr=False)
    """Tensor files (etfarm.wire.tensors), one per sample, values in flattened order; those of the source beside its
    example inputs, which the archive has."""
    input_names: tuple[str, ...]
    """The inputs' names in flattened order: `x`, `state_0`, `options_mask`."""
    output_names: tuple[str, ...]
    """The names of the nodes that make the outputs, in flattened order. Two outputs may have one name."""
    duration_ms: int
    """What exporting and saving took, on the monotonic clock."""
    input_types: tuple[InputType | None, ...] = ()
    """Beside `input_names`."""
    transform_ms: float | None = None
    """What SOURCE_TRANSFORM took; None where there was none."""
    quantized: bool = False
    """The module came quantized, as a GraphModule of convert_pt2e is."""


@dataclass(frozen=True)
class ExportedModel:
    """An eager model, exported: what travels to the server."""

    name: str
    methods: Mapping[str, ExportedMethod]
    constant_methods: Mapping[str, bytes] = field(default_factory=dict)
    """A tensor file per constant method, its leaves in flattened order."""


def export_source(
    source: ModelSource,
    *,
    name: str,
    folder_base: Path | None = None,
    strict: bool = False,
    recipe: Recipe | None = None,
    calibrate: bool = True,
    folder: Path | None = None,
) -> ExportedModel:
    """`source` exported, every method by itself.

    Args:
        source: its modules are not changed.
        name: the model's name in reports.
        folder_base: source files under it are named relative to it; the working folder when None.
        strict: torch.export's own switch. Without it the module is run as plain Python, which takes more models.
        recipe: whose source transform is applied first, if it has one.
        calibrate: whether to take the calibration samples along.
        folder: where archives and samples are kept as files instead of in memory; the caller's, who removes it.

    Raises:
        ModelInTrainMode: `.eval()` was not called.
        ModelNotOnCpu: a weight or input is elsewhere.
        UnsupportedInput: an input's dtype or type cannot be sent.
        CalibrationMismatch: a calibration sample is not like the example inputs.
        DynamicShapesForm, DimWithoutMaximum: dynamic shapes that would fail on the device only.
        NothingToTransform, SourceTransformFailed, ToolsMissing: see etfarm.client.export.transform.
        DataDependentBranch: forward branches on a tensor's value.
        DimSpecialized: a dynamic dim can only have one size, or other sizes.
        ExportFailed: any other refusal of torch.export.
    """
    base = folder_base if folder_base is not None else Path.cwd()
    export = _Export(source, base, strict, Transform(source, recipe, base), calibrate, folder)
    export.transform.must_find_something(name)
    return ExportedModel(name, {method: export.method(method) for method in source.methods}, _constants(source))


@dataclass(frozen=True)
class _Export:
    """One export of a source, method by method; the arguments are those of `export_source`."""

    source: ModelSource
    base: Path
    strict: bool
    transform: Transform
    calibrate: bool
    folder: Path | None

    def method(self, method: str) -> ExportedMethod:
        """One method, exported. Copies of modules that were transformed are gone before the next one's turn."""
        import torch

        module = self.source.methods[method]
        args, kwargs = self.source.example_inputs[method], dict(self.source.example_kwargs.get(method, {}))
        _must_be_eval(method, module)
        _must_be_on_cpu(method, module, args, kwargs)
        early_names = leaf_names(args, kwargs)
        flat_values(method, early_names, args, kwargs)
        given = self.source.calibration_inputs.get(method, ())
        for index, sample in enumerate(() if callable(given) else given):
            must_match(method, index, args, sample, early_names)
        shapes = normal_shapes(method, module, args, kwargs, self.source.dynamic_shapes.get(method))
        args, kwargs = unshared(args, kwargs)

        module, transform_ms = self.transform.apply(method)
        _must_be_eval(method, module)
        started = time.monotonic()
        with _refusals(method, self.base), quiet():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=self.strict)
        must_be_bounded(method, program)
        make_relative(program, self.base)
        with _refusals(method, self.base), quiet():
            archive = archive_of(program)
        duration_ms = round((time.monotonic() - started) * 1000)

        signature = program.graph_signature
        names = tuple(spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT")
        facts = read_archive(archive)
        return ExportedMethod(
            pt2=self._kept(archive),
            calibration=tuple(self._samples(method, names, args, kwargs, early_names)),
            input_names=names,
            output_names=tuple(spec.arg.name for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"),
            duration_ms=duration_ms,
            input_types=facts.input_types,
            transform_ms=transform_ms,
            quantized=facts.quantized,
        )

    def _samples(
        self, method: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], early_names: list[str]
    ) -> Iterator[bytes | Path]:
        """The calibration samples as tensor files, one after the other, without those that are the example inputs."""
        given = self.source.calibration_inputs.get(method, ())
        if not self.calibrate or not given:
            return
        # The archive carries the example inputs, which the server calibrates with too.
        example = encode(flat_values(method, names, args, kwargs))
        for index, sample in enumerate(_called(method, given, self.base)):
            must_be_tuple(method, sample)
            must_match(method, index, args, sample, early_names)
            file = encode(flat_values(method, names, sample, kwargs))
            if file != example:
                yield self._kept(file)

    def _kept(self, data: bytes) -> bytes | Path:
        """The bytes, or the file in the folder that they are in."""
        if self.folder is None:
            return data
        path = self.folder / digest.of_bytes(data)
        path.write_bytes(data)
        return path


def _called(method: str, given: Any, base: Path) -> Iterator[tuple[Any, ...]]:
    """The samples one by one; what the user's own generator raises is told with its line."""
    with _users_samples(method, base):
        samples = iter(given() if callable(given) else given)
    while True:
        with _users_samples(method, base):
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


@contextmanager
def _users_samples(method: str, base: Path) -> Iterator[None]:
    try:
        yield
    except EtfarmError:
        raise
    except Exception as error:
        place = place_of(error, base)
        raise BadModelSource(
            f"{method}: the calibration inputs raised {type(error).__name__}: {error}{f', at {place}' if place else ''}.",
            "Give tuples, or a function that gives an iterator of them.",
            part="calibration_inputs",
            method=method,
        ) from error


def archive_of(program: ExportedProgram) -> bytes:
    """The bytes of torch.export.save; the program is as before afterwards.

    Example inputs go without attributes of their own: torch.export leaves one on a tensor with a Dim.DYNAMIC, mark_dynamic
    too, and an archive of such tensors is a pickle of objects that no server loads.
    """
    import torch
    from torch.utils import _pytree as pytree

    def bare(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) and vars(leaf) else leaf

    # A buffer has no file stem, so every archive has the same prefix; a path's stem would be part of the bytes.
    buffer = io.BytesIO()
    given = program.example_inputs
    program.example_inputs = pytree.tree_map(bare, given)
    try:
        torch.export.save(program, buffer)
    finally:
        program.example_inputs = given
    return buffer.getvalue()


def _must_be_eval(method: str, module: nn.Module) -> None:
    import torch

    for name, part in module.named_modules():
        # A captured graph has its mode baked in, and its own flag says True whatever that is.
        captured = isinstance(part, torch.fx.GraphModule) or type(part).__module__.startswith("torch.export")
        if part.training and not captured and type(part) is not torch.nn.Module:
            raise ModelInTrainMode(method, name)


def _must_be_on_cpu(method: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    weights = [*module.named_parameters(), *module.named_buffers()]
    inputs = [(f"input {name}", leaf) for name, leaf in zip(leaf_names(args, kwargs), input_leaves(args, kwargs))]  # noqa: B905
    for name, tensor in [*weights, *inputs]:
        device = getattr(tensor, "device", None)
        if device is not None and device.type != "cpu":
            raise ModelNotOnCpu(method, name, str(device))


def _constants(source: ModelSource) -> dict[str, bytes]:
    from torch.utils import _pytree as pytree

    files = {}
    for method, value in source.constant_methods.items():
        leaves = pytree.tree_leaves(value, is_leaf=lambda part: not isinstance(part, list | tuple))
        try:
            for leaf in leaves:
                _must_be_constant(method, leaf)
            files[method] = encode(wire_value(method, str(i), leaf) for i, leaf in enumerate(leaves))
        except UnsupportedInput as error:
            raise BadModelSource(
                f"The constant method {method!r} holds a value that is {error.metadata['got']}.",
                "Constants are bools, ints of 64 bits, floats, tensors, and lists and tuples of these.",
                stage=STAGE,
                method=method,
            ) from None
    return files


def _must_be_constant(method: str, leaf: Any) -> None:
    if leaf is None:
        raise UnsupportedInput(method, "", "None", "")
    if isinstance(leaf, int) and not -_INTS <= leaf < _INTS:
        raise UnsupportedInput(method, "", f"{leaf}", "")


@contextmanager
def _refusals(method: str, base: Path) -> Iterator[None]:
    """Turns what torch.export raises into our errors, with the user's own line."""
    try:
        yield
    except EtfarmError:
        raise
    except Exception as error:
        text = str(error)
        place = place_in(text, base) or place_of(error, base)
        branch = "Could not guard on data-dependent expression" in text or text.startswith("Data-dependent branching")
        if branch:
            raise DataDependentBranch(method, str(place or ""), place.code if place else "") from error
        dim = specialized(method, text, str(place or ""))
        if dim is not None:
            raise dim from error
        raise ExportFailed(method, type(error).__name__, _first_line(text), str(place or "")) from error


def _first_line(text: str) -> str:
    """The first line of torch's message that is not empty."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message.")
    line = re.sub(r" For more information.*", "", line)
    return line if len(line) <= _LINE_LIMIT else line[:_LINE_LIMIT] + "..."
