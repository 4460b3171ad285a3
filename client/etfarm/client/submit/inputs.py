"""Conversion of the library's input types to wire values in a method's own order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etfarm.client.submit import input_names, npz
from etfarm.wire import tensors
from etfarm.wire.samples import MAX_SAMPLES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from etfarm.client.submit.prepared import PreparedModel

Arrays: TypeAlias = "Mapping[str, NDArray[np.generic]] | Sequence[NDArray[np.generic]]"
"""Arrays by name (`METHOD/` selects the method), or in flattened order."""

Inputs: TypeAlias = "Path | str | Arrays"
"""Types that the library takes as inputs: an .npz, a folder of .npz files with one sample each, or `Arrays`."""


def named_arrays(arrays: Arrays) -> dict[str, input_names.Named]:
    """Return arrays by method and name, as `npz.read_named` returns those of a file."""
    pairs = arrays.items() if isinstance(arrays, Mapping) else ((str(i), array) for i, array in enumerate(arrays))
    named: dict[str, input_names.Named] = {}
    for key, array in pairs:
        method, slash, rest = key.partition("/")
        method, name = (method, rest) if slash else (input_names.UNSAID, key)
        named.setdefault(method, {})[name] = value_of(name, array)
    return named or {input_names.UNSAID: {}}


def read_named(inputs: Inputs) -> dict[str, input_names.Named]:
    """Return inputs by method and key, as `npz.read_named` returns those of a file.

    Raises:
        UserError: the file cannot be read, or a value has an unsupported type.
    """
    return npz.read_named(Path(inputs)) if isinstance(inputs, str | Path) else named_arrays(inputs)


def read_samples(inputs: Inputs) -> Iterator[tuple[str, dict[str, input_names.Named]]]:
    """Yield each sample of inputs as `read_named` returns it: each .npz of a folder by name, at most MAX_SAMPLES, else just one.

    Each has the name of its file for errors, which is empty for inputs that are one sample.

    Raises:
        UserError: as `read_named`.
    """
    if isinstance(inputs, str | Path) and Path(inputs).is_dir():
        yield from islice(npz.labelled_samples(Path(inputs)), MAX_SAMPLES)
    else:
        yield "", read_named(inputs)


def files_of(inputs: Inputs) -> int:
    """Return the number of files that `read_samples` has a sample of, without a limit; 1 for inputs that are one sample."""
    if isinstance(inputs, str | Path) and Path(inputs).is_dir():
        return len(list(Path(inputs).glob("*.npz")))
    return 1


def values_of(
    named: Mapping[str, input_names.Named], model: PreparedModel, methods: Sequence[str]
) -> dict[str, list[tensors.Value]]:
    """Return the values of each method in `named`, in flattened order if the names are known.

    Empty inputs apply to the methods that run: a method that takes inputs does not fall back to other inputs.
    """
    if len(methods) == 1 and methods[0] not in named:
        # Keys without a method belong to the only one that runs.
        named = {methods[0] if method == input_names.UNSAID else method: values for method, values in named.items()}
    known: Sequence[str] = list(model.input_names) or list(methods) or [m for m in named if m] or ["forward"]
    if not any(named.values()):
        named = {method: {} for method in methods or (["forward"] if "forward" in known else known)}
    label = model.program.name if model.program is not None else model.name
    result = {}
    for method, values in input_names.by_method(named, known).items():
        result[method] = in_order(values, model.input_names.get(method, ()), label, method)
    return result


def in_order(values: Mapping[str, tensors.Value], names: Sequence[str], model: str, method: str) -> list[tensors.Value]:
    """Return the values in the order of `names`, the method's inputs; by position if the names are unknown.

    Raises:
        UnknownInput: a key matches no input, or it is a name although only positions are known; the order of a file's
            entries is not significant.
        InputMissing, DuplicateInput: an input is missing, or present twice.
    """
    if names:
        return input_names.order(values, names, method)
    for key in values:
        place = key.removeprefix("arr_")
        if not (place.isascii() and place.isdecimal()):
            message = f"{model} has no input names: use 0, 1, ... as keys, not {key!r}."
            raise input_names.UnknownInput(message, method=method, key=key)
    last = max((int(key.removeprefix("arr_")) for key in values), default=-1)
    if last >= len(values):
        taken = {int(key.removeprefix("arr_")) for key in values}
        missing = next(place for place in range(last) if place not in taken)
        raise input_names.InputMissing(
            f"{method}: the input {missing} is missing.", f"There is {last}.", method=method, missing=missing
        )
    return input_names.order(values, [str(place) for place in range(last + 1)], method)


def value_of(name: str, value: Any) -> tensors.Value:
    """Convert an array, a torch tensor or a Python number to a wire value; return a wire value unchanged.

    Raises:
        UserError: etfarm does not support its dtype.
    """
    import numpy as np

    if isinstance(value, tensors.Tensor | tensors.Scalar):
        return value
    if value is None or isinstance(value, bool | int | float):
        return tensors.Scalar(name, value)
    if hasattr(value, "detach"):
        from etfarm.client.export.samples import wire_value

        return wire_value("inputs", name, value)
    return tensors.from_array(name, np.asarray(value))
