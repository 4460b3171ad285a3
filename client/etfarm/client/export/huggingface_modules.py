"""Models of transformers as modules that ExecuTorch can lower; the cache of a decoder is in its buffers.

transformers' own modules for this (`transformers.integrations.executorch`) need a strict export: in any other, their caches
become constants, and the program forgets what it wrote. The modules here take the same inputs and can be exported in both modes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, Cache, StaticCache
from transformers.cache_utils import StaticLayer

_CUSTOM_ATTENTION: Final = "executorch_custom_sdpa"
_CHECKED_TOKENS: Final = 5
"""Number of tokens on which a decoder is compared with its model: a prompt of all but the last, and the last."""
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Maximum difference of logits by dtype, relative to the largest."""


class UnsupportedCache(Exception):
    """A model's cache cannot be kept in buffers, or not with the same result; the message completes "The model ..."."""


class Decoder(nn.Module):  # type: ignore[misc]
    """A causal language model of transformers with a static cache.

    Args:
        model: the model, in eval mode.
        max_context_tokens: number of tokens that the cache has room for.
        all_logits: whether to return the logits of each token instead of those of the last one.
        custom_operators: whether to use ExecuTorch's `llama::custom_sdpa` and `llama::update_cache`, whose work grows with the
            number of tokens in the cache, instead of PyTorch's attention over the whole cache. This changes `model`.

    Raises:
        UnsupportedCache: layers have another kind of cache, or the logits differ from the model's without a cache.
    """

    def __init__(self, model: Any, *, max_context_tokens: int, all_logits: bool = False, custom_operators: bool = False) -> None:
        super().__init__()
        self.model = model
        self._options: dict[str, Any] = {} if all_logits else {"logits_to_keep": 1}
        tokens = (torch.arange(_CHECKED_TOKENS) % model.config.get_text_config().vocab_size)[None]
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False).logits[:, -1]
        if custom_operators:
            _register_custom_attention()
            model.set_attn_implementation(_CUSTOM_ATTENTION)
        self._cache = _make_cache(model.config, max_context_tokens, _CustomLayer if custom_operators else _Layer)
        self._layers = [layer for layer in self._cache.layers if isinstance(layer, _Layer)]
        # Layers take the number and width of their heads from the first tokens, which differ between layers in some models.
        with torch.no_grad():
            self._call(tokens[:, :2], torch.arange(2))
        for index, layer in enumerate(self._layers):
            if not layer.is_initialized:
                raise UnsupportedCache(f"does not use the cache of layer {index}")
            self.register_buffer(f"keys_{index}", torch.zeros_like(layer.keys), persistent=False)
            self.register_buffer(f"values_{index}", torch.zeros_like(layer.values), persistent=False)
        self._require_equal(tokens, expected)
        for index in range(len(self._layers)):
            getattr(self, f"keys_{index}").zero_()
            getattr(self, f"values_{index}").zero_()

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> Any:
        """Return logits, float[1, 1, vocabulary] of the last token or float[1, n, vocabulary] of each.

        Args:
            input_ids: token ids, int64[1, n].
            cache_position: position of each token in the cache, int64[n], where its key and value are written.
        """
        with self._own_buffers():
            return self._call(input_ids, cache_position)

    def _call(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        for layer in self._layers:
            layer.positions = positions
        if self._layers and isinstance(self._layers[0], _CustomLayer):
            start = positions[0].item()
            torch._check(start >= 0)
            torch._check(start + input_ids.shape[1] <= self._layers[0].max_cache_len)
            for layer in self._layers:
                layer.start = start
        return self.model(
            input_ids=input_ids,
            position_ids=positions.unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            **self._options,
        ).logits

    @contextmanager
    def _own_buffers(self) -> Iterator[None]:
        """Give the cache's layers the buffers of this module, which torch.export replaces while it traces."""
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
        try:
            yield
        finally:
            for layer in self._layers:  # a copy of this module must not take along what a trace left
                layer.keys = layer.values = layer.positions = layer.start = None

    def _require_equal(self, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        """Check that a prompt and a single token after it give the logits of the model without a cache."""
        last = tokens.shape[1] - 1
        with torch.no_grad():
            self(tokens[:, :last], torch.arange(last))
            actual = self(tokens[:, last:], torch.arange(last, last + 1))[:, -1]
        difference = float((actual - expected).abs().max())
        allowed = _TOLERANCE.get(expected.dtype, 1e-1) * max(float(expected.abs().max()), 1.0)
        if not difference <= allowed:
            raise UnsupportedCache(f"gives other logits with a static cache (they differ by {difference:.3g})")


class OneInput(nn.Module):  # type: ignore[misc]
    """A model of transformers without a cache, called with one input by its name."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, input: torch.Tensor) -> Any:
        """Return the outputs of the model, with their names."""
        return self.model(**{self.name: input})


class _Layer(StaticLayer):  # type: ignore[misc]  # mypy does not read transformers
    """Keys and values of one layer, float[1, heads, context, width], written at given positions."""

    positions: Any = None
    start: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> Any:
        return self.positions[0]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.max_cache_len, 0


class _CustomLayer(_Layer):
    """The same in the layout of ExecuTorch's operators, float[1, context, heads, width]."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = key_states.transpose(1, 2).contiguous(), value_states.transpose(1, 2).contiguous()
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            (_, _, heads, width), (_, _, value_heads, value_width) = keys.shape, values.shape
            self.keys = torch.zeros(1, self.max_cache_len, heads, width, dtype=keys.dtype)
            self.values = torch.zeros(1, self.max_cache_len, value_heads, value_width, dtype=values.dtype)
        torch.ops.llama.update_cache(keys, self.keys, self.start)
        torch.ops.llama.update_cache(values, self.values, self.start)
        return self.keys, _Started(self.values, self.start)


class _Started:
    """The cached values of a layer with the position of the first new token, on their way to the attention."""

    def __init__(self, values: torch.Tensor, start: Any) -> None:
        self.values, self.start = values, start


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Return the attention of queries, float[1, heads, n, width], over the cache up to each of them."""
    if not isinstance(value, _Started) or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise UnsupportedCache("has an attention that llama::custom_sdpa does not compute")
    attended = torch.ops.llama.custom_sdpa(
        query.transpose(1, 2).contiguous(), key, value.values, value.start, None, 0.0, True, scaling
    )
    return attended, None


def _register_custom_attention() -> None:
    importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")  # registers the operators
    # Without a mask function of the same name, transformers creates no mask: the operator's own is causal.
    AttentionInterface.register(_CUSTOM_ATTENTION, _attend)


def _make_cache(config: Any, max_context_tokens: int, kind: type[_Layer]) -> Any:
    """Return a static cache whose layers are of `kind`, those with a sliding window too: their mask has the window."""
    cache = StaticCache(config=config, max_cache_len=max_context_tokens)
    layers = []
    for layer in cache.layers:
        if not isinstance(layer, StaticLayer):
            raise UnsupportedCache(f"has layers with a {type(layer).__name__}, which is not a cache of keys and values")
        if kind is _CustomLayer and layer.max_cache_len < max_context_tokens:
            raise UnsupportedCache(
                f"has attention over {layer.max_cache_len:,} tokens only, which llama::custom_sdpa does not compute for a longer "
                "context"
            )
        layers.append(kind(max_context_tokens))
    return Cache(layers=layers)
