"""A language model's methods: they take tokens, or their embeddings, and positions, and return logits.

Other methods compute the embeddings: of tokens, and of images or sounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NoReturn, Protocol

from etfarm.device_agents.runners.python_child.passes import UNSET, LoadedMethod, execute
from etfarm.device_agents.runners.python_child.pte import FileValue
from etfarm.device_agents.runners.python_child.refusals import Refusal, called
from etfarm.device_agents.runners.python_child.values import (
    INTEGERS,
    Mismatch,
    embedding_rows,
    integer_tensor,
    join_rows,
    last_logits,
    most_likely,
)

FLOATS: Final = ("float32", "float16", "bfloat16")
"""Dtypes of embeddings."""


class Methods(Protocol):
    """The loaded methods, and their inputs."""

    def loaded(self, name: str) -> LoadedMethod:
        """Return a loaded method."""

    def inputs(self, name: str) -> list[Any]:
        """Return the inputs of a loaded method; those that are not set are UNSET."""

    def load_method(self, name: str, trace: bool, debug: bool, keep: bool) -> dict[str, Any]:
        """Load a method; others stay loaded with `keep`."""


@dataclass(frozen=True)
class ModelMethods:
    """Names of a language model's methods, and how they take tokens."""

    prefill: str
    """The method that takes several tokens."""
    decode: str
    """The method that takes one token; may be the same."""
    token_input: int
    position_input: int
    max_chunk: int
    """Maximum number of tokens of one execution."""
    embedding: str = ""
    """The method that computes the embeddings, which the others then take; empty if they take tokens."""
    encoders: tuple[str, ...] = ()
    """The methods whose embeddings begin each prompt."""

    @property
    def names(self) -> tuple[str, ...]:
        """All methods, each once, in the order of execution."""
        return tuple(dict.fromkeys(name for name in (*self.encoders, self.embedding, self.prefill, self.decode) if name))


class LanguageModel:
    """The loaded methods of a language model.

    Raises:
        Refusal: a method is not loaded, or does not take tokens and their positions.
    """

    def __init__(self, methods: Methods, names: ModelMethods) -> None:
        self._names = names
        self._encoders = [Encoder(methods.loaded(name), methods.inputs(name)) for name in names.encoders]
        own = names.embedding
        self._embedding = TokenEmbedding(methods.loaded(own), methods.inputs(own)) if own else None
        self.prefill = TokenMethod(methods, names.prefill, names, self._embedding)
        is_one = names.decode == names.prefill
        self.decode = self.prefill if is_one else TokenMethod(methods, names.decode, names, self._embedding)
        self.latest = self.prefill
        """The method of the latest execution."""

    def process(self, context: Sequence[int], begin: int, end: int, shift: int = 0) -> None:
        """Execute the tokens from `begin` to `end` in chunks; where a chunk is too short for prefill, one by one.

        The position of a token is its place in `context` and `shift`.
        """
        while begin < end:
            count = self._next_chunk(end - begin)
            self.latest.execute(context[begin : begin + count], begin + shift)
            begin += count

    def encode(self, position: int) -> int:
        """Execute the encoders, process their embeddings as `process` does, and return the number of their positions."""
        first = position
        for encoder in self._encoders:
            rows = encoder.encode(self.prefill.row)
            begin = 0
            while begin < rows.shape[1]:
                count = self._next_chunk(rows.shape[1] - begin)
                self.latest.execute_rows(rows[:, begin : begin + count].contiguous(), position)
                begin, position = begin + count, position + count
        return position - first

    def take_parts(self) -> list[tuple[int, int]]:
        """Return executions and nanoseconds of each of `ModelMethods.names` since the last call; nothing without a flow."""
        if self._embedding is None:
            return []
        parts = [encoder.part for encoder in self._encoders] + [self._embedding.part, self.prefill.part]
        if self.decode is not self.prefill:
            parts.append(self.decode.part)
        return [part.take() for part in parts]

    def _next_chunk(self, left: int) -> int:
        """Return how many of `left` tokens or rows the next execution processes, and make its method the latest."""
        chunk = min(self._names.max_chunk, self.prefill.most, left)
        together = chunk >= self.prefill.least
        self.latest = self.prefill if together else self.decode
        return chunk if together else 1

    def step(self, token: int, position: int) -> None:
        """Execute one token."""
        self.latest = self.decode
        self.decode.execute((token,), position)


class TokenMethod:
    """A loaded method of a language model, which takes tokens and their position and returns logits.

    With `embedding` it takes the embeddings that this method computes of the tokens.
    """

    def __init__(self, methods: Methods, name: str, names: ModelMethods, embedding: TokenEmbedding | None = None) -> None:
        self._loaded = loaded = methods.loaded(name)
        self._inputs = list(methods.inputs(name))
        self._embedding = embedding
        self._token_input, self._position_input = names.token_input, names.position_input
        if self._token_input == self._position_input:
            refuse(loaded, "the tokens and their positions must be different inputs")
        is_flow = embedding is not None
        self._tokens = (
            expected_embeddings(loaded, names.token_input) if is_flow else expected_row(loaded, names.token_input, "tokens")
        )
        self._positions = expected_row(loaded, self._position_input, "positions")
        for index, value in enumerate(self._inputs):
            if value is UNSET and index not in (self._token_input, self._position_input):
                refuse(loaded, f"input {index} is not set")
        self.most = self._tokens.shape[1] if is_flow else self._tokens.shape[-1]
        """Maximum number of tokens of one execution."""
        self.least = 1 if self._tokens.dynamic else self.most
        self.row = RowType(self._tokens.dtype, self._tokens.shape[-1], name)
        """The embeddings that the method takes."""
        self.part = Part()
        """The executions of a method that takes embeddings."""
        self.vocabulary = 0
        """Number of logits for each token."""

    @property
    def has_run(self) -> bool:
        """Whether the method was executed since it was loaded."""
        return self._loaded.first_run_ns is not None

    @property
    def first_run_ns(self) -> int | None:
        """Duration of the first execution after loading."""
        return self._loaded.first_run_ns

    def execute(self, tokens: Sequence[int], position: int) -> None:
        """Execute once."""
        if self._embedding is not None:
            require_count(self._loaded, self._token_input, self._tokens, self.most, len(tokens))
            self.execute_rows(self._embedding.embed(tokens, self.row), position)
        else:
            self._inputs[self._token_input] = row_tensor(self._loaded, self._token_input, self._tokens, tokens)
            self._execute_at(position, len(tokens))

    def execute_rows(self, rows: Any, position: int) -> None:
        """Execute embeddings, [1, number of positions, width], once."""
        start_ns = time.monotonic_ns()
        count = rows.shape[1]
        require_count(self._loaded, self._token_input, self._tokens, self.most, count)
        self._inputs[self._token_input] = rows
        self._execute_at(position, count)
        self.part.add(start_ns)

    def _execute_at(self, position: int, count: int) -> None:
        places = range(position, position + (1 if self._positions.shape[-1] == 1 else count))
        self._inputs[self._position_input] = row_tensor(self._loaded, self._position_input, self._positions, places)
        execute(self._loaded, self._inputs)

    def next_token(self) -> int:
        """Return the most likely token after the last one of the latest execution."""
        outputs = called("outputs", lambda: self._loaded.method.get_outputs(clone_outputs=False))
        try:
            best, self.vocabulary = most_likely(outputs)
        except Mismatch as error:
            self._refuse(str(error))
        if best is None:
            name = self._loaded.facts.name
            raise Refusal("RUNTIME", f"method '{name}' returned logits without a largest one: all are NaN or -inf")
        return best

    def last_logits(self) -> Any:
        """Return the logits after the last token of the latest execution: a tensor of one dim, valid until the next execution."""
        outputs = called("outputs", lambda: self._loaded.method.get_outputs(clone_outputs=False))
        try:
            return last_logits(outputs)
        except Mismatch as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> NoReturn:
        refuse(self._loaded, why)


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
