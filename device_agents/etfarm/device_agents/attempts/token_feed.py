"""Executions of a language model's methods by single commands, for passes that need the state after some of a text."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from etfarm.device_agents.runners.errors import InputMismatch
from etfarm.device_agents.runners.protocol import MethodInfo, Runner, TensorInfo
from etfarm.v1 import generation_pb2
from etfarm.wire.tensors import ITEM_BYTES, Tensor, Value

_INTEGERS: Final = {"int64": "q", "int32": "i"}
"""Type codes of the dtypes of tokens and positions."""


class TokenFeed:
    """Executions of tokens, in the chunks of the runner's `generate` command.

    Args:
        runner: has all methods of the model loaded.
        model: the model.
        methods: its methods, by name.
    """

    def __init__(self, runner: Runner, model: generation_pb2.LanguageModel, methods: Mapping[str, MethodInfo]) -> None:
        self._runner = runner
        self._model = model
        self._methods = methods

    async def process(self, context: array[int], begin: int, end: int, shift: int = 0) -> None:
        """Execute the tokens from `begin` to `end` in chunks, as the runner does, at their places in `context` and `shift`."""
        while begin < end:
            method, count = self._next_chunk(end - begin)
            await self.set(method, context[begin : begin + count], begin + shift)
            await self._runner.run()
            begin += count

    async def encode(self, position: int) -> None:
        """Execute the encoders of a flow, and process their embeddings in chunks, as the runner does."""
        for encoder in self._model.flow.encoders:
            await self._runner.select(encoder.method)
            await self._runner.run()
            rows = await self._rows(encoder.method)
            begin = 0
            while begin < rows.shape[1]:
                method, count = self._next_chunk(rows.shape[1] - begin)
                await self._set_values(method, _part_of(rows, begin, count), position, count)
                await self._runner.run()
                begin, position = begin + count, position + count

    def _next_chunk(self, left: int) -> tuple[str, int]:
        """Return the method of the next execution and how many of `left` tokens it processes."""
        model = self._model
        chunk = min(left, model.max_prompt_tokens)
        together = chunk == model.max_prompt_tokens or model.dynamic_prompt
        return (model.prefill_method, chunk) if together else (model.decode_method, 1)

    async def set(self, method: str, tokens: array[int], position: int) -> None:
        """Make a method the current one, and set its inputs: tokens, or with a flow their embeddings, and positions."""
        model = self._model
        if model.HasField("flow"):
            value = await self._embed(tokens)
        else:
            value = _integers(self._methods[method].inputs[model.token_input], tokens)
        await self._set_values(method, value, position, len(tokens))

    async def _set_values(self, method: str, value: Tensor, position: int, count: int) -> None:
        inputs, model = self._methods[method].inputs, self._model
        expected = inputs[model.position_input]
        places = range(position, position + (1 if expected.shape[-1] == 1 else count))
        values = {model.token_input: value, model.position_input: _integers(expected, places)}
        await self._runner.select(method)
        await self._runner.set_inputs([values[index] for index in sorted(values)])

    async def _embed(self, tokens: Sequence[int]) -> Tensor:
        """Return the embeddings of tokens, computed in several executions where one does not take all of them."""
        name = self._model.flow.embedding_method
        expected = self._methods[name].inputs[0]
        await self._runner.select(name)
        parts = []
        for begin in range(0, len(tokens), expected.shape[-1]):
            await self._runner.set_inputs([_integers(expected, tokens[begin : begin + expected.shape[-1]])])
            await self._runner.run()
            parts.append(await self._rows(name))
        return _joined(parts)

    async def _rows(self, method: str) -> Tensor:
        """Return the embeddings of the current method's latest execution, [1, number of positions, width]."""
        outputs = await self._runner.outputs()
        return _as_rows(method, outputs[0] if outputs else None)


def _integers(expected: TensorInfo, values: Sequence[int]) -> Tensor:
    """Return a tensor of one row for an input.

    Raises:
        InputMismatch: the dtype is not an integer's.
    """
    dtype, shape = expected.dtype, expected.shape
    if dtype not in _INTEGERS:
        raise InputMismatch("TRACED", f"tokens and positions must be int64 or int32, not {dtype}")
    data = array(_INTEGERS[dtype], values)
    assert data.itemsize == ITEM_BYTES[dtype]
    return Tensor(expected.name, dtype, (*shape[:-1], len(values)), data.tobytes(), tuple(range(len(shape))))


def _as_rows(method: str, output: Value | None) -> Tensor:
    """Return embeddings as a tensor [1, number of positions, width].

    Raises:
        InputMismatch: the output is not a contiguous tensor of embeddings.
    """
    if not isinstance(output, Tensor) or len(output.shape) < 2 or output.dim_order != tuple(range(len(output.shape))):
        raise InputMismatch("TRACED", f"the first output of {method!r} is not a tensor of embeddings")
    width = output.shape[-1]
    rows = len(output.data) // (width * ITEM_BYTES[output.dtype]) if width else 0
    return Tensor(output.name, output.dtype, (1, rows, width), output.data, (0, 1, 2))


def _part_of(rows: Tensor, begin: int, count: int) -> Tensor:
    """Return `count` rows from `begin` on."""
    size = rows.shape[-1] * ITEM_BYTES[rows.dtype]
    data = rows.data[begin * size : (begin + count) * size]
    return Tensor(rows.name, rows.dtype, (1, count, rows.shape[-1]), data, (0, 1, 2))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts."""
    first = parts[0]
    count = sum(part.shape[1] for part in parts)
    return Tensor(first.name, first.dtype, (1, count, first.shape[2]), b"".join(part.data for part in parts), (0, 1, 2))
