"""Names of inputs: the keys of a file or mapping, matched to the methods and inputs of a program.

A key is an input's name, or its position `0`, `1`, ... in flattened order (`arr_0`, as np.savez calls them, works too).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etfarm.wire.errors import Kind, UserError
from etfarm.wire.tensors import Scalar, Tensor, Value

UNSAID = ""
"""The method of keys without `METHOD/`."""

_PLACE = re.compile(r"(?:arr_)?(\d+)\Z")


Named = dict[str, Value]
"""Values by their key in the file without `METHOD/`, in the file's order."""


class UnknownInput(UserError):
    """A key of an inputs file matches no input."""

    reason = "UNKNOWN_INPUT"
    kind = Kind.NOT_FOUND


class DuplicateInput(UserError):
    """Two keys of an inputs file match the same input."""

    reason = "DUPLICATE_INPUT"


class InputMissing(UserError):
    """An inputs file lacks an input."""

    reason = "INPUT_MISSING"


def by_method(named: Mapping[str, Named], methods: Sequence[str] | Mapping[str, object]) -> dict[str, Named]:
    """Assign keys without a method to the only method, or to forward if there are several.

    Raises:
        UnknownInput: a key's method is not in `methods`, or the method of a key is ambiguous.
        InputMissing: the method is ambiguous, and there is no key.
        DuplicateInput: a key is present both with and without its method.
    """
    known = list(methods)
    default = known[0] if len(known) == 1 else "forward"
    result: dict[str, Named] = {}
    for prefix, values in named.items():
        method = prefix or default
        if method not in known:
            if not values:
                raise InputMissing("There are no inputs.", f"The methods are {', '.join(known)}.", methods=",".join(known))
            first = next(iter(values))
            key = f"{prefix}/{first}" if prefix else first
            raise UnknownInput(
                f"The input {key!r} does not belong to a method.",
                f"The methods are {', '.join(known)}.",
                key=key,
                methods=",".join(known),
            )
        # Keep a method without values too: an empty set of inputs is not the same as no inputs for a method.
        own = result.setdefault(method, {})
        for name, value in values.items():
            if name in own:
                raise DuplicateInput(
                    f"{method}: the input {name!r} occurs twice, with its method and without.", method=method, key=name
                )
            own[name] = value
    return result


def is_position(key: str) -> bool:
    """Return whether a key can be an input's position."""
    return _PLACE.match(key) is not None


def place_of(key: str, names: Sequence[str]) -> int | None:
    """Return the position of a key's input: by name, or by position if no input has that name; None without a match."""
    if key in names:
        return list(names).index(key)
    digits = _PLACE.match(key)
    return int(digits[1]) if digits and int(digits[1]) < len(names) else None


def order(named: Mapping[str, Value], names: Sequence[str], method: str = "") -> list[Value]:
    """Return the values in the order of `names`, the inputs in flattened order, with these names.

    A key is a name, or a position if no input has that name.

    Raises:
        UnknownInput: a key matches no input.
        DuplicateInput: two keys match the same input.
        InputMissing: an input has no key.
    """
    prefix = f"{method}: " if method else ""
    there = f"The inputs are {', '.join(names)}." if names else "There are no inputs."
    by_place: dict[int, Value] = {}
    keys: dict[int, str] = {}
    for key, value in named.items():
        place = place_of(key, names)
        if place is None:
            raise UnknownInput(f"{prefix}there is no input {key!r}.", there, method=method, key=key, inputs=",".join(names))
        if place in by_place:
            raise DuplicateInput(
                f"{prefix}{keys[place]!r} and {key!r} both name the input {names[place]!r}.",
                "Give it once.",
                method=method,
                key=key,
            )
        by_place[place], keys[place] = _called(names[place], value), key
    missing = [name for place, name in enumerate(names) if place not in by_place]
    if missing:
        raise InputMissing(
            f"{prefix}the input {missing[0]!r} is missing.",
            there,
            method=method,
            missing=",".join(missing),
            inputs=",".join(names),
        )
    return [by_place[place] for place in range(len(names))]


def _called(name: str, value: Value) -> Value:
    if isinstance(value, Scalar):
        return Scalar(name, value.value)
    return Tensor(name, value.dtype, value.shape, value.data, value.dim_order)
