"""Programs that differ from their model at the sizes 1 and 0 of a dynamic dim, which torch.export does not ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source


class Model(nn.Module):
    """Adds what it computes to a buffer and to an attribute."""

    n: Tensor

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("n", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        self.calls += 1
        return self.body(x) + self.n


def branch(x: Tensor) -> Tensor:
    return x * 10 if x.shape[0] == 1 else x * 2


def shape(x: Tensor) -> Tensor:
    return x if x.shape[0] == 1 else x.sum(1)


def empty(x: Tensor) -> Tensor:
    return x.sum(0) + 5 if x.shape[0] == 0 else x.sum(0)


def refuse(x: Tensor) -> Tensor:
    if x.shape[0] < 2:
        raise ValueError("too short")
    return x * 2


def choose(x: Tensor) -> Tensor:
    return torch.where(torch.ones(x.shape[:1]).sum() == 1, x * 10, x * 2)


def warnings(module: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> list[str]:
    texts: list[str] = []
    export_source(ModelSource.of(module, inputs, dynamic_shapes=shapes), name="m", say=texts.append)
    return [text for text in texts if "differs from the model where" in text]


@pytest.mark.parametrize(
    ("body", "minimum", "words"),
    [
        (branch, 1, "differs from the model where dim 0 of 'x' has the size 1 (the output has other values)."),
        (shape, 1, "(the output is torch.float32 [1] in place of torch.float32 [1, 3])."),
        (empty, 0, "differs from the model where dim 0 of 'x' has the size 0 (the output has other values)."),
        (refuse, 1, ""),
        (branch, 2, ""),
        (empty, 1, ""),
        (choose, 0, ""),
        (lambda x: x.mean(0), 0, ""),
    ],
)
def test_a_branch_on_a_small_size_is_named(body: Callable[[Tensor], Tensor], minimum: int, words: str) -> None:
    module = Model(body).eval()
    named = warnings(module, (torch.rand(4, 3),), {"x": {0: Dim("n", min=minimum, max=8)}})
    assert len(named) == bool(words) and all(words in text for text in named)
    assert module.n.item() == 0 and module.calls == 0


def test_sizes_of_several_inputs_change_together() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, pair: dict[str, Tensor]) -> Tensor:
            y = x + pair["a"] + pair["b"].reshape(2, -1).sum(0)
            return y * 10 if x.shape[0] == 1 else y

    n = Dim("n", min=1, max=8)
    inputs = torch.rand(4), {"a": torch.rand(4), "b": torch.rand(8)}
    (text,) = warnings(Sum().eval(), inputs, {"x": {0: n}, "pair": {"a": {0: n}, "b": {0: 2 * n}}})
    assert "dim 0 of 'x' has the size 1" in text


def test_a_decoder_that_differs_for_one_token_is_named() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 10)
            self.register_buffer("cache", torch.zeros(1, 16))

        def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
            self.cache.index_copy_(1, position + torch.arange(tokens.shape[1]), tokens.float())
            logits = self.table(tokens)
            return logits if tokens.shape[1] == 1 else logits + self.cache.sum()

    decoder = Decoder().eval()
    texts: list[str] = []
    source = ModelSource.causal_lm(decoder, max_context_tokens=16, vocab_size=10)
    export_source(source, name="m", say=texts.append)
    assert len(texts) == 1 and "dim 1 of 'tokens' has the size 1" in texts[0]
    assert not decoder.cache.any()
