"""The words for the values of enums in JSON documents and in the Python library: one table for both directions."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper as EnumTypeWrapper

Value = TypeVar("Value", bound=int)

_WORDS: Final[dict[str, dict[str, str]]] = {
    "etfarm.v1.GateOutcome": {"PASSED": "passed", "FAILED": "failed", "INCONCLUSIVE": "inconclusive"},
    "etfarm.v1.LatencyOutcome": {
        "FASTER": "faster", "SLOWER": "slower", "NO_DIFFERENCE": "no_difference", "TOO_FEW": "too_few",
        "INCONCLUSIVE": "inconclusive",
    },
    "etfarm.v1.OperatorOutcome": {
        "FASTER": "faster", "SLOWER": "slower", "NO_DIFFERENCE": "no_difference", "TOO_FEW": "too_few",
        "INCONCLUSIVE": "inconclusive",
    },
    "etfarm.v1.Quantization": {
        "NONE": "none", "PT2E_STATIC": "pt2e-static", "PT2E_DYNAMIC": "pt2e-dynamic", "TORCHAO": "torchao",
    },
    "etfarm.v1.RatioMethod": {"PAIRED": "paired", "SEPARATE": "separate"},
    "etfarm.v1.RunnerKind": {"NATIVE": "native", "PYTHON": "python", "OWN": "own"},
    "etfarm.v1.Trait": {
        "MODEL": "model", "RECIPE": "recipe", "METHOD": "method", "THREADS": "threads", "DEVICE": "device",
    },
    "etfarm.v1.ValueKind": {
        "TENSOR": "tensor", "INT": "int", "DOUBLE": "double", "BOOL": "bool", "STRING": "str", "NONE": "none",
        "UNSUPPORTED": "unsupported",
    },
    "etfarm.v1.GenerationReference.reference": {
        "EAGER": "program before quantization", "QUANTIZED": "quantized program", "HOST": "same program on the server",
    },
    "etfarm.v1.OutputAccuracy.reference": {"EAGER": "program before quantization", "QUANTIZED": "quantized program"},
    "etfarm.v1.OperatorGrouping": {
        "OP": "op", "TYPE": "type", "MODULE": "module", "LINE": "line", "BACKEND": "backend",
    },
    "etfarm.v1.OperatorSort": {"OWN": "own", "TOTAL": "total", "NAME": "name", "ORDER": "order"},
}  # fmt: skip
"""Words that differ from the name of the value without the enum's prefix, by the enum or by one field of it."""


def word_of(enum: EnumDescriptor | FieldDescriptor, number: int) -> str | None:
    """Return the word for a value of an enum or of one field; None for UNSPECIFIED and for an unknown number."""
    return _tables(enum)[0].get(number)


def number_of(enum: EnumDescriptor | FieldDescriptor, word: str) -> int | None:
    """Return the number of the value with a word; None for an unknown word."""
    return _tables(enum)[1].get(word)


def value_of(enum: EnumTypeWrapper[Value], word: str | None) -> Value:
    """Return the value of an enum for a word; UNSPECIFIED for none and for an unknown word."""
    return enum.Value(enum.Name((number_of(enum.DESCRIPTOR, word) if word else None) or 0))  # type: ignore[arg-type]


@cache
def _tables(of: EnumDescriptor | FieldDescriptor) -> tuple[dict[int, str], dict[str, int]]:
    enum = of.enum_type if isinstance(of, FieldDescriptor) else of
    assert enum is not None, f"{of.full_name} is no enum"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    own = _WORDS.get(of.full_name) or _WORDS.get(enum.full_name, {})
    names = {value.number: value.name.removeprefix(prefix) for value in enum.values if value.number}
    words = {number: own.get(name, name) for number, name in names.items()}
    return words, {word: number for number, word in words.items()}
