"""Flows of modules that generate text together: their checks, and the inputs that each is exported with.

This module imports torch only in functions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import with_article
from etfarm.wire.errors import error_for
from etfarm.wire.flows import DECODER, EMBEDDING, ENCODERS

if TYPE_CHECKING:
    from torch import nn

_EXAMPLE_TOKENS: Final = 3
"""Number of tokens in the example inputs: a length of 1 would make the dim static."""


@dataclass(frozen=True)
class FlowParts:
    """The methods of a flow, and what they are exported with."""

    methods: Mapping[str, nn.Module]
    example_inputs: Mapping[str, tuple[Any, ...]]
    dynamic_shapes: Mapping[str, Any]


@dataclass(frozen=True)
class _Shape:
    """A tensor without its values."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return both: `float32[1, 16, 32]`."""
        return f"{self.dtype}{list(self.shape)}"


def flow_parts(
    text_decoder: nn.Module,
    token_embedding: nn.Module,
    encoders: Mapping[str, tuple[nn.Module, tuple[Any, ...]]],
    *,
    max_context_tokens: int,
    vocab_size: int,
    max_prompt_tokens: int,
) -> FlowParts:
    """Return the methods of a flow whose outputs and inputs fit each other.

    The modules run once on tensors without data, so that a misfit is found before anything is exported.

    Args:
        text_decoder, token_embedding, encoders, max_context_tokens, vocab_size: as in `ModelSource.flow`.
        max_prompt_tokens: maximum number of tokens of one execution; with 1, lengths are static.

    Raises:
        BAD_MODEL_SOURCE: a name is unknown, or the output of a module does not fit the input of the next.
    """
    import torch

    for name, encoder in encoders.items():
        _require_encoder(name, encoder)
    count = min(_EXAMPLE_TOKENS, max_prompt_tokens)
    tokens = torch.arange(1, count + 1).remainder(vocab_size).reshape(1, count)
    _require_arguments(EMBEDDING, token_embedding, 1, "tokens")
    _require_arguments(DECODER, text_decoder, 2, "embeddings and positions")

    embedded = _run(EMBEDDING, token_embedding, (tokens,), f"int64[1, {count}]")
    if len(embedded.shape) != 3 or embedded.shape[:2] != (1, count) or "float" not in embedded.dtype:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"{EMBEDDING!r} must return embeddings, float[1, {count}, width], for tokens int64[1, {count}], "
            f"and returns {embedded}.",
            "Return one row of values for each token.", method=EMBEDDING,
        )  # fmt: skip
    positions = 0
    for name, (module, inputs) in encoders.items():
        output = _run(name, module, inputs, "its example inputs")
        if (output.dtype, output.shape[-1:]) != (embedded.dtype, embedded.shape[-1:]):
            raise error_for(
                "BAD_MODEL_SOURCE",
                f"{name!r} returns {output}, but {EMBEDDING!r} returns {embedded}: {DECODER!r} takes both.",
                "Project the encoder's output to the width and dtype of the token embeddings.", method=name,
            )  # fmt: skip
        positions += prod(output.shape[:-1])
    if positions + 3 > max_context_tokens:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"The encoders return {positions:,} embeddings, which leave no room for text in a context of {max_context_tokens:,}.",
            "Give the decoder a larger cache (max_context_tokens=), or return fewer embeddings.", part="max_context_tokens",
        )  # fmt: skip
    with torch.no_grad():
        rows = token_embedding(tokens).detach()
    start = torch.zeros(1, dtype=torch.int64)
    logits = _run(DECODER, text_decoder, (rows, start), f"{embedded}, the output of {EMBEDDING!r}, and int64[1]")
    if not logits.shape or "float" not in logits.dtype or logits.shape[-1] < vocab_size:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"{DECODER!r} must return logits, float[..., {vocab_size}], and returns {logits}.",
            "Return a value for each token of the vocabulary, or give its size with vocab_size=.", method=DECODER,
        )  # fmt: skip
    length = torch.export.Dim("tokens", max=max_prompt_tokens) if max_prompt_tokens > 1 else None
    return FlowParts(
        {**{name: module for name, (module, _) in encoders.items()}, EMBEDDING: token_embedding, DECODER: text_decoder},
        {**{name: inputs for name, (_, inputs) in encoders.items()}, EMBEDDING: (tokens,), DECODER: (rows, start)},
        {EMBEDDING: ({1: length},), DECODER: ({1: length}, None)} if length is not None else {},
    )


def _require_encoder(name: str, encoder: object) -> None:
    if name not in ENCODERS:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"A flow has no encoder {name!r}.",
            f"ExecuTorch's runner knows {' and '.join(ENCODERS)}.",
            method=name,
        )
    if not isinstance(encoder, tuple) or len(encoder) != 2 or not isinstance(encoder[1], tuple):
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"The encoder {name!r} is {with_article(type(encoder).__name__)}, not a module with its example inputs.",
            f'Give encoders={{"{name}": (module, (image,))}}.', method=name,
        )  # fmt: skip


def _require_arguments(name: str, module: nn.Module, count: int, what: str) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    required = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    if len(required) != count:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"The forward of {name!r} must take {what}, and takes {', '.join(required) or 'nothing'}.",
            "Wrap it in a module whose forward takes these.", method=name,
        )  # fmt: skip


def _run(name: str, module: nn.Module, inputs: tuple[Any, ...], takes: str) -> _Shape:
    """Return what the first output of a module is, computed without data where the module allows it, else by a copy of it.

    Raises:
        BAD_MODEL_SOURCE: it does not run on these inputs, or does not return a tensor.
    """
    import torch
    from torch._subclasses import fake_tensor
    from torch.utils import _pytree as pytree

    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    needs_data = (
        fake_tensor.UnsupportedFakeTensorException, fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    )  # fmt: skip
    try:
        with torch.no_grad():
            try:
                own = {key: mode.from_tensor(value) for key, value in (*module.named_parameters(), *module.named_buffers())}
                values = pytree.tree_map_only(torch.Tensor, mode.from_tensor, inputs)
                with mode:
                    output = torch.func.functional_call(module, own, values)
            except needs_data:
                output = copy.deepcopy(module)(*inputs)  # it looks at values; the copy keeps the cache as it is
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"{name!r} does not take {takes}: {reason}.",
            "Make the output of each module fit the input of the next.",
            method=name,
        ) from error
    leaves = pytree.tree_leaves(output)
    if not leaves or not isinstance(leaves[0], torch.Tensor):
        raise error_for(
            "BAD_MODEL_SOURCE", f"{name!r} does not return a tensor.", "Return a tensor as the first output.", method=name
        )
    return _Shape(str(leaves[0].dtype).removeprefix("torch."), tuple(leaves[0].shape))
