"""A language model's methods: they take tokens and their positions, and return logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, Protocol

from etfarm.device_agents.runners.python_child.passes import UNSET, LoadedMethod, execute
from etfarm.device_agents.runners.python_child.pte import FileValue
from etfarm.device_agents.runners.python_child.refusals import Refusal, called
from etfarm.device_agents.runners.python_child.values import INTEGERS, Mismatch, integer_tensor, last_logits, most_likely


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


class LanguageModel:
    """Both loaded methods of a language model.

    Raises:
        Refusal: a method is not loaded, or does not take tokens and their positions.
    """

    def __init__(self, methods: Methods, names: ModelMethods) -> None:
        self._names = names
        self.prefill = TokenMethod(methods, names.prefill, names)
        self.decode = self.prefill if names.decode == names.prefill else TokenMethod(methods, names.decode, names)
        self.latest = self.prefill
        """The method of the latest execution."""

    def process(self, context: Sequence[int], begin: int, end: int) -> None:
        """Execute the tokens from `begin` to `end` in chunks; where a chunk is too short for prefill, one by one."""
        largest = min(self._names.max_chunk, self.prefill.most)
        while begin < end:
            chunk = min(largest, end - begin)
            together = chunk >= self.prefill.least
            self.latest = self.prefill if together else self.decode
            count = chunk if together else 1
            self.latest.execute(context[begin : begin + count], begin)
            begin += count

    def step(self, token: int, position: int) -> None:
        """Execute one token."""
        self.latest = self.decode
        self.decode.execute((token,), position)


class TokenMethod:
    """A loaded method of a language model, which takes tokens and their position and returns logits."""

    def __init__(self, methods: Methods, name: str, names: ModelMethods) -> None:
        self._loaded = methods.loaded(name)
        self._inputs = list(methods.inputs(name))
        self._token_input, self._position_input = names.token_input, names.position_input
        if self._token_input == self._position_input:
            self._refuse("the tokens and their positions must be different inputs")
        self._tokens = self._integers(self._token_input, "tokens")
        self._positions = self._integers(self._position_input, "positions")
        for index, value in enumerate(self._inputs):
            if value is UNSET and index not in (self._token_input, self._position_input):
                self._refuse(f"input {index} is not set")
        self.most = self._tokens.shape[-1]
        """Maximum number of tokens of one execution."""
        self.least = 1 if self._tokens.dynamic else self.most
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
        count = 1 if self._positions.shape[-1] == 1 else len(tokens)
        self._inputs[self._token_input] = self._tensor(self._token_input, self._tokens, tokens)
        self._inputs[self._position_input] = self._tensor(
            self._position_input, self._positions, range(position, position + count)
        )
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

    def _integers(self, index: int, what: str) -> FileValue:
        inputs = self._loaded.facts.inputs
        if index >= len(inputs):
            self._refuse(f"input {index} ({what}) does not exist: it takes {len(inputs)}")
        value = inputs[index]
        if value.kind != "tensor":
            self._refuse(f"input {index} ({what}) is not a tensor")
        if value.dtype not in INTEGERS:
            self._refuse(f"input {index} ({what}) must be int64 or int32, not {value.dtype}")
        if not value.shape or prod(value.shape) != value.shape[-1] or not value.shape[-1]:
            self._refuse(f"input {index} ({what}) must have the shape [1, tokens] or [tokens], not {list(value.shape)}")
        return value

    def _tensor(self, index: int, expected: FileValue, values: Sequence[int]) -> Any:
        most, count = expected.shape[-1], len(values)
        if count > most or (count < most and not expected.dynamic):
            takes = f"{most} tokens" + (" at most" if expected.dynamic else "")
            self._refuse(f"input {index} takes {takes}, not {count}")
        return integer_tensor(values, expected.dtype, (*expected.shape[:-1], count))

    def _refuse(self, why: str) -> NoReturn:
        raise Refusal("INPUT_MISMATCH", f"method '{self._loaded.facts.name}' cannot generate text: {why}")
