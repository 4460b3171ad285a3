"""Step 1, client: an eager model becomes .pt2 archives and calibration samples that any server can lower.

The bytes are the cache's key, so equal models must give equal bytes in every process: one archive name, paths of source
files relative to the working folder, nothing of the client's disk.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.client.export.errors import (
    STAGE,
    BadModelSource,
    DataDependentBranch,
    ExportFailed,
    ModelInTrainMode,
    ModelNotOnCpu,
    UnsupportedInput,
)
from etfarm.client.export.samples import flat_values, input_leaves, leaf_names, must_match, unshared, wire_value
from etfarm.client.export.shapes import must_be_bounded, normal_shapes
from etfarm.client.export.source import ModelSource
from etfarm.client.export.traces import make_relative, place_in, place_of
from etfarm.wire.errors import EtfarmError
from etfarm.wire.tensors import encode

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

_NOISY = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
_LINE_LIMIT = 400


@dataclass(frozen=True)
class ExportedMethod:
    """One method of an exported model."""

    pt2: bytes = field(repr=False)
    """The archive of torch.export.save, ATen dialect. It carries the example inputs."""
    calibration: tuple[bytes, ...] = field(repr=False)
    """Tensor files (etfarm.wire.tensors), one per sample, values in flattened order; those of the source beside its
    example inputs, which the archive has."""
    input_names: tuple[str, ...]
    """The inputs' names in flattened order: `x`, `state_0`, `options_mask`."""
    output_names: tuple[str, ...]
    """The names of the nodes that make the outputs, in flattened order. Two outputs may have one name."""
    duration_ms: int
    """What exporting and saving took, on the monotonic clock."""


@dataclass(frozen=True)
class ExportedModel:
    """An eager model, exported: what travels to the server."""

    name: str
    methods: Mapping[str, ExportedMethod]
    constant_methods: Mapping[str, bytes] = field(default_factory=dict)
    """A tensor file per constant method, its leaves in flattened order."""


def export_source(source: ModelSource, *, name: str, folder_base: Path | None = None, strict: bool = False) -> ExportedModel:
    """`source` exported, every method by itself.

    Args:
        source: its modules are not changed.
        name: the model's name in reports.
        folder_base: source files under it are named relative to it; the working folder when None.
        strict: torch.export's own switch. Without it the module is run as plain Python, which takes more models.

    Raises:
        ModelInTrainMode: `.eval()` was not called.
        ModelNotOnCpu: a weight or input is elsewhere.
        UnsupportedInput: an input's dtype or type cannot be sent.
        CalibrationMismatch: a calibration sample is not like the example inputs.
        DynamicShapesForm, DimWithoutMaximum: dynamic shapes that would fail on the device only.
        DataDependentBranch: forward branches on a tensor's value.
        ExportFailed: any other refusal of torch.export.
    """
    base = folder_base if folder_base is not None else Path.cwd()
    methods = {method: _export_method(source, method, base, strict) for method in source.methods}
    return ExportedModel(name, methods, _constants(source))


def needs_eager(quantization: str) -> bool:
    """Whether a recipe's kind of quantization rewrites eager modules, so that an exported program comes too late.

    torchao's source transforms look for nn.Linear, find none in a .pt2 and would leave it in fp32 without a word.
    """
    return quantization == "torchao"


def _export_method(source: ModelSource, method: str, base: Path, strict: bool) -> ExportedMethod:
    import torch

    module = source.methods[method]
    args, kwargs = source.example_inputs[method], dict(source.example_kwargs.get(method, {}))
    _must_be_eval(method, module)
    _must_be_on_cpu(method, module, args, kwargs)
    early_names = leaf_names(args, kwargs)
    flat_values(method, early_names, args, kwargs)
    samples = source.calibration_inputs.get(method, ())
    for index, sample in enumerate(samples):
        must_match(method, index, args, sample, early_names)
    shapes = normal_shapes(method, module, args, kwargs, source.dynamic_shapes.get(method))
    args, kwargs = unshared(args, kwargs)

    started = time.monotonic()
    with _refusals(method, base), _quiet():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)
    must_be_bounded(method, program)
    make_relative(program, base)
    with _refusals(method, base), _quiet():
        archive = _save(program)
    duration_ms = round((time.monotonic() - started) * 1000)

    signature = program.graph_signature
    names = tuple(spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT")
    # The archive carries the example inputs, which the server calibrates with too.
    example = encode(flat_values(method, names, args, kwargs))
    files = (encode(flat_values(method, names, sample, kwargs)) for sample in samples)
    return ExportedMethod(
        pt2=archive,
        calibration=tuple(file for file in files if file != example),
        input_names=names,
        output_names=tuple(spec.arg.name for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"),
        duration_ms=duration_ms,
    )


def _save(program: ExportedProgram) -> bytes:
    import torch

    # A buffer has no file stem, so every archive has the same prefix; a path's stem would be part of the bytes.
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
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
        try:
            files[method] = encode(wire_value(method, str(i), leaf) for i, leaf in enumerate(pytree.tree_leaves(value)))
        except UnsupportedInput as error:
            raise BadModelSource(
                f"The constant method {method!r} holds what is {error.metadata['got']}.",
                "Constants are bools, ints, floats, tensors, and lists and tuples of these.",
                stage=STAGE,
                method=method,
            ) from None
    return files


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
        raise ExportFailed(method, type(error).__name__, _first_line(text), str(place or "")) from error


def _first_line(text: str) -> str:
    """The line of torch's message that says most: the violated constraint, else the first that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    line = said[0] if said and lines[0].startswith("Constraints violated") else (lines[0] if lines else "no message.")
    line = re.sub(r" For more information.*", "", line)
    return line if len(line) <= _LINE_LIMIT else line[:_LINE_LIMIT] + "..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's graph dumps and warnings off the user's terminal; TORCH_LOGS brings them back."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
