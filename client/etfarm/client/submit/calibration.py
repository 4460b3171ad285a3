"""Calibration sets: samples for each method, each read, checked and stored before the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from etfarm.client.export.errors import calibration_mismatch
from etfarm.client.submit import input_names, npz
from etfarm.client.submit.input_types import find_mismatches
from etfarm.client.submit.inputs import Arrays, in_order, named_arrays
from etfarm.wire import digest, tensors
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.submit.prepared import PreparedExport
    from etfarm.wire.pt2 import InputType

Calibration: TypeAlias = "str | Path | Iterable[Arrays] | Callable[[], Iterable[Arrays]]"
"""Types that the library takes as a calibration set: an .npz (one sample, or with `batched` one for each index of axis 0), a
folder of .npz files, an iterable of samples, or a function that returns one. A sample is arrays by name (`METHOD/` selects
the method), or arrays in flattened order.
"""


def calibrated(
    export: PreparedExport, calibration: Calibration, model: str, *, batched: bool = False, folder: Path | None = None
) -> PreparedExport:
    """Return `export` with the samples of `calibration` instead of its own.

    Args:
        model: the model's name, for errors.
        batched: axis 0 of every array indexes the samples.
        folder: folder for samples as files instead of in memory; the caller removes it.

    Raises:
        NO_CALIBRATION_SAMPLES: the set is empty.
        CALIBRATION_MISMATCH: a sample's dtype or shape does not fit the method.
        UnknownInput, InputMissing, DuplicateInput: a sample's keys do not fit.
        INPUT_FILE_UNREADABLE, UNSUPPORTED_INPUT: see `npz.read_named`.
    """
    samples: dict[str, list[bytes | Path]] = {}
    for label, named in _samples(calibration, batched):
        for method, ordered in _in_order(label, named, export, model):
            prepared = export.methods[method]
            _must_match(method, label, ordered, prepared.input_types)
            samples.setdefault(method, []).append(_kept(tensors.encode(ordered), folder))
    if not samples:
        raise error_for(
            "NO_CALIBRATION_SAMPLES",
            f"The calibration set for {model} has no sample.",
            "Give arrays named like the inputs, with at least one sample on axis 0 if it is batched; or leave it out.",
            model=model,
        )
    methods = {
        name: replace(method, calibration=tuple(samples.get(name, ()))) if name in samples else method
        for name, method in export.methods.items()
    }
    return replace(export, methods=methods)


def _samples(calibration: Calibration, batched: bool) -> Iterator[tuple[str, Mapping[str, input_names.Named]]]:
    """Yield each sample with its name for errors."""
    if isinstance(calibration, str | Path):
        yield from npz.labelled_samples(Path(calibration), batched=batched)
        return
    for index, sample in enumerate(calibration() if callable(calibration) else calibration):
        named = named_arrays(sample)
        if batched:
            yield from ((f"{index}[{place}]", row) for place, row in enumerate(npz.split("the sample", named)))
        else:
            yield str(index), named


def _in_order(
    label: str, named: Mapping[str, input_names.Named], export: PreparedExport, model: str
) -> Iterator[tuple[str, list[tensors.Value]]]:
    """Yield a sample's values by method, in the order of the method's inputs.

    Errors name the sample.
    """
    try:
        for method, values in input_names.by_method(named, list(export.methods)).items():
            yield method, in_order(values, export.methods[method].input_names, model, method)
    except (input_names.UnknownInput, input_names.InputMissing, input_names.DuplicateInput) as error:
        metadata = {**error.metadata, "sample": label}
        raise type(error)(f"Calibration sample {label}: {error.message}", error.remedy, **metadata) from None


def _must_match(method: str, label: str, values: list[tensors.Value], types: tuple[InputType | None, ...]) -> None:
    for value, got, wanted in find_mismatches(values, types):
        raise calibration_mismatch(method, label, f"{value.name!r} is {got}, not {wanted}", stage="")


def _kept(data: bytes, folder: Path | None) -> bytes | Path:
    if folder is None:
        return data
    path = folder / digest.of_bytes(data)
    path.write_bytes(data)
    return path
