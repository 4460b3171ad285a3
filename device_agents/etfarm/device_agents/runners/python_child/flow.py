"""The methods that compute the embeddings of a decoder: of tokens, and of images or sounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NoReturn

from etfarm.device_agents.runners.python_child.passes import UNSET, LoadedMethod, execute
from etfarm.device_agents.runners.python_child.pte import FileValue
from etfarm.device_agents.runners.python_child.refusals import Refusal, called
from etfarm.device_agents.runners.python_child.values import INTEGERS, Mismatch, embedding_rows, integer_tensor, join_rows

FLOATS: Final = ("float32", "float16", "bfloat16")
"""Dtypes of embeddings."""


@dataclass
class Part:
    """A method's executions since the last call of `take`, and their time with setting the inputs."""

    executions: int = 0
    ns: int = 0

    def add(self, start_ns: int) -> None:
        """Add an execution that began at `start_ns`."""
        self.executions += 1
        self.ns += time.monotonic_ns() - start_ns

    def take(self) -> tuple[int, int]:
        """Return the executions and their time, and begin anew."""
        taken = self.executions, self.ns
        self.executions = self.ns = 0
        return taken


@dataclass(frozen=True)
class RowType:
    """What a decoder takes for each position: `width` values of a dtype."""

    dtype: str
    width: int
    decoder: str
    """Its name, for errors."""


class TokenEmbedding:
    """The loaded method that turns tokens into embeddings."""

    def __init__(self, loaded: LoadedMethod, inputs: Sequence[Any]) -> None:
        self._loaded = loaded
        self._inputs = list(inputs)
        self._tokens = expected_row(loaded, 0, "tokens")
        _require_set(loaded, self._inputs[1:], 1)
        self.part = Part()

    def embed(self, tokens: Sequence[int], row: RowType) -> Any:
        """Return the embeddings, [1, number of tokens, width], by several executions where one does not take all tokens."""
        most = self._tokens.shape[-1]
        parts = []
        for begin in range(0, len(tokens), most):
            chunk = tokens[begin : begin + most]
            start_ns = time.monotonic_ns()
            self._inputs[0] = row_tensor(self._loaded, 0, self._tokens, chunk)
            execute(self._loaded, self._inputs)
            output = _rows_of(self._loaded, row)
            if output.shape[1] != len(chunk):
                refuse(self._loaded, f"it returns {output.shape[1]} rows for {len(chunk)} tokens")
            self.part.add(start_ns)
            parts.append(output)
        return join_rows(parts)


class Encoder:
    """A loaded method that turns the inputs that were set for it into embeddings."""

    def __init__(self, loaded: LoadedMethod, inputs: Sequence[Any]) -> None:
        self._loaded = loaded
        self._inputs = list(inputs)
        _require_set(loaded, self._inputs, 0)
        self.part = Part()

    def encode(self, row: RowType) -> Any:
        """Execute once and return the embeddings, [1, number of positions, width]."""
        start_ns = time.monotonic_ns()
        execute(self._loaded, self._inputs)
        rows = _rows_of(self._loaded, row)
        self.part.add(start_ns)
        return rows


def refuse(loaded: LoadedMethod, why: str) -> NoReturn:
    """Refuse to generate text with a method.

    Raises:
        Refusal: always.
    """
    raise Refusal("INPUT_MISMATCH", f"method '{loaded.facts.name}' cannot generate text: {why}")


def expected_row(loaded: LoadedMethod, index: int, what: str) -> FileValue:
    """Return an input that takes a row of tokens or positions, [1, n] or [n]."""
    value = expected_tensor(loaded, index, what)
    if value.dtype not in INTEGERS:
        refuse(loaded, f"input {index} ({what}) must be int64 or int32, not {value.dtype}")
    if not value.shape or prod(value.shape) != value.shape[-1] or not value.shape[-1]:
        refuse(loaded, f"input {index} ({what}) must have the shape [1, tokens] or [tokens], not {list(value.shape)}")
    return value


def expected_embeddings(loaded: LoadedMethod, index: int) -> FileValue:
    """Return an input that takes embeddings, [1, n, width]."""
    value = expected_tensor(loaded, index, "embeddings")
    if value.dtype not in FLOATS:
        refuse(loaded, f"input {index} (embeddings) must be float32, float16 or bfloat16, not {value.dtype}")
    if len(value.shape) != 3 or value.shape[0] != 1 or min(value.shape) < 1:
        refuse(loaded, f"input {index} (embeddings) must have the shape [1, tokens, width], not {list(value.shape)}")
    return value


def expected_tensor(loaded: LoadedMethod, index: int, what: str) -> FileValue:
    """Return an input that takes a tensor."""
    inputs = loaded.facts.inputs
    if index >= len(inputs):
        refuse(loaded, f"input {index} ({what}) does not exist: it takes {len(inputs)}")
    if inputs[index].kind != "tensor":
        refuse(loaded, f"input {index} ({what}) is not a tensor")
    return inputs[index]


def row_tensor(loaded: LoadedMethod, index: int, expected: FileValue, values: Sequence[int]) -> Any:
    """Return an input of tokens or positions."""
    require_count(loaded, index, expected, expected.shape[-1], len(values))
    return integer_tensor(values, expected.dtype, (*expected.shape[:-1], len(values)))


def require_count(loaded: LoadedMethod, index: int, expected: FileValue, most: int, count: int) -> None:
    """Require a number of tokens that an input takes."""
    if count > most or (count < most and not expected.dynamic):
        takes = f"{most} tokens" + (" at most" if expected.dynamic else "")
        refuse(loaded, f"input {index} takes {takes}, not {count}")


def _require_set(loaded: LoadedMethod, inputs: Sequence[Any], first: int) -> None:
    for index, value in enumerate(inputs, first):
        if value is UNSET:
            refuse(loaded, f"input {index} is not set")


def _rows_of(loaded: LoadedMethod, row: RowType) -> Any:
    """Return a copy of the first output of the latest execution, [1, number of rows, width]."""
    outputs = called("outputs", lambda: loaded.method.get_outputs(clone_outputs=False))
    try:
        return embedding_rows(outputs, row.dtype, row.width, row.decoder)
    except Mismatch as error:
        refuse(loaded, str(error))
