"""Inputs that are Python numbers: constants of the exported program."""

from __future__ import annotations

from typing import Any, Final

from etfarm.wire.fixed_numbers import how_to_vary

_NAMED: Final = 8
"""Maximum number of inputs that a warning names."""


def describe_fixed(program: Any, method: str) -> str:
    """Return the warning about ints and floats that the program has as constants; empty if there are none.

    Bools, None and text are left out: such flags are meant to be constants.
    """
    arguments = [spec.arg for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    fixed = {each.name: each.value for each in arguments if type(getattr(each, "value", None)) in (int, float)}
    if not fixed:
        return ""
    kind = "int" if any(type(value) is int for value in fixed.values()) else "double"
    if len(fixed) == 1:
        ((name, value),) = fixed.items()
        what = f"{name} is a Python {type(value).__name__}: the program of {method} has it fixed at {value!r}."
        return f"{what} {how_to_vary(kind)}"
    listed = ", ".join(f"{name} ({value!r})" for name, value in list(fixed.items())[:_NAMED])
    more = f" and {len(fixed) - _NAMED} more" if len(fixed) > _NAMED else ""
    return f"{listed}{more} are Python numbers: the program of {method} has them fixed. {how_to_vary(kind, 'one')}"
