"""Step 1, client: inputs as the library takes them, as values of the wire in a method's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etfarm.client.errors import UserError
from etfarm.client.submit import input_names, npz
from etfarm.wire import tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from etfarm.client.submit.prepared import PreparedModel

Arrays: TypeAlias = "Mapping[str, NDArray[np.generic]] | Sequence[NDArray[np.generic]]"
"""Arrays by name (`METHOD/` selects the method), or in flattened order."""

Inputs: TypeAlias = "Path | str | Arrays"
"""What the library takes as inputs: an .npz, or `Arrays`."""


class InputsDiffer(UserError):
    """One inputs file cannot serve models whose inputs have other names or another order."""

    reason = "INPUTS_DIFFER"


def named_arrays(given: Arrays) -> dict[str, input_names.Named]:
    """Arrays by method and name, as `npz.read_named` gives those of a file."""
    pairs = given.items() if isinstance(given, Mapping) else ((str(i), array) for i, array in enumerate(given))
    named: dict[str, input_names.Named] = {}
    for key, array in pairs:
        method, slash, rest = key.partition("/")
        method, name = (method, rest) if slash else (input_names.UNSAID, key)
        named.setdefault(method, {})[name] = value_of(name, array)
    return named or {input_names.UNSAID: {}}


def values_of(inputs: Inputs, model: PreparedModel, methods: Sequence[str]) -> dict[str, list[tensors.Value]]:
    """The values of each method that `inputs` has some for, in flattened order where the names are known.

    Without any value they are for what runs: a method that takes some is not run on others than were given.
    """
    named = npz.read_named(Path(inputs)) if isinstance(inputs, str | Path) else named_arrays(inputs)
    known: Sequence[str] = list(model.methods) or list(methods) or [m for m in named if m] or ["forward"]
    if not any(named.values()):
        named = {method: {} for method in methods or (["forward"] if "forward" in known else known)}
    label = model.program.name if model.program is not None else model.name
    result = {}
    for method, values in input_names.by_method(named, known).items():
        names = model.methods[method].input_names if method in model.methods else ()
        result[method] = in_order(values, names, label, method)
    return result


def in_order(values: Mapping[str, tensors.Value], names: Sequence[str], model: str, method: str) -> list[tensors.Value]:
    """The values in the order of `names`, the method's inputs; by their places where the names are not known.

    Raises:
        UnknownInput: a key is no input; or a name where only places are known: the order of a file's entries says nothing.
        InputMissing, DuplicateInput: an input is left out, or there twice.
    """
    if names:
        return input_names.order(values, names, method)
    for key in values:
        place = key.removeprefix("arr_")
        if not (place.isascii() and place.isdecimal()):
            said = f"{model} has no input names: use 0, 1, ... as keys, not {key!r}."
            raise input_names.UnknownInput(said, method=method, key=key)
    last = max((int(key.removeprefix("arr_")) for key in values), default=-1)
    if last >= len(values):
        taken = {int(key.removeprefix("arr_")) for key in values}
        missing = next(place for place in range(last) if place not in taken)
        raise input_names.InputMissing(
            f"{method}: the input {missing} is missing.", f"There is {last}.", method=method, missing=missing
        )
    return input_names.order(values, [str(place) for place in range(last + 1)], method)


def value_of(name: str, value: Any) -> tensors.Value:
    """An array, a torch tensor or a Python number as a value of the wire; one that is a value already, as it is.

    Raises:
        UserError: it is of a dtype that etfarm does not carry.
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
