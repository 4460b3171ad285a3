"""Programs that differ from their model: for the example inputs, or at the sizes 1 and 0 of a dynamic dim."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from etfarm.client.export import ModelSource, export_source
from tests.support.exports import read_program
from tests.support.torchvision import torchvision_models


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


class Body(nn.Module):
    """Calls a function with itself, which has a tensor that is no buffer."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.count, self.weight = body, torch.zeros(2), torch.full((2,), 5.0)

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def by_environment(_: Any, x: Tensor) -> Tensor:
    os.environ["ETFARM_TESTED_CALLS"] = str(calls := int(os.environ.get("ETFARM_TESTED_CALLS", "0")) + 1)
    return x * calls


def added(_: Any, x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x + y


def counted(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    module.weight.mul_(2)
    return x + module.count + module.weight


X = torch.rand(2, generator=torch.Generator().manual_seed(2)) + 1
PAIR = torch.rand(3, 2, generator=torch.Generator().manual_seed(3))
DIFFERING: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a random number of Python": (lambda _, x: x * random.random(), (X,)),
    "random numbers of NumPy": (lambda _, x: x + torch.from_numpy(np.random.rand(2).astype(np.float32)), (X,)),
    "a variable of the environment": (by_environment, (X,)),
    "a branch on the export": (lambda _, x: (x, x * 2 if torch.compiler.is_exporting() else x * 3), (X,)),
    "one tensor twice": (added, (PAIR, PAIR)),
    "a view of another input": (added, (PAIR, PAIR[0])),
}
EQUAL: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a tensor that counts": (counted, (X,)),
    "an input that is written": (added, (PAIR, PAIR.clone())),
    "numbers that are not finite": (lambda _, x: (x / 0, (x - x) / 0), (X,)),
    "a cast that rounds": (lambda _, x: (x @ x, x.half().float().exp()), (X,)),
}


def sentences(module: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    texts: list[str] = []
    (method,) = export_source(ModelSource.of(module, inputs), name="m", say=texts.append).methods.values()
    assert [method.differs != ""] == [any("called with the example inputs" in text for text in texts)]
    return [text for text in texts if "called with the example inputs" in text]


@pytest.mark.parametrize("name", DIFFERING)
def test_a_program_that_differs_for_the_example_inputs_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_TESTED_CALLS", "0")
    body, inputs = DIFFERING[name]
    before = [each.clone() for each in inputs]
    (text,) = sentences(Body(body).eval(), inputs)
    which = "output 1" if name == "a branch on the export" else "the output"
    assert f"called with the example inputs: {which} has other values. Accuracy is that of the program." in text
    assert all(map(torch.equal, inputs, before))


def test_all_outputs_that_differ_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_TESTED_CALLS", "0")

    def body(_: Any, x: Tensor) -> dict[str, Tensor]:
        factor = 2 if torch.compiler.is_exporting() else 3
        return {"boxes": x * factor, "same": x + 1, "scores": x * factor + 1}

    (text,) = sentences(Body(body).eval(), (X,))
    assert "with the example inputs: output boxes has other values, output scores has other values." in text


@pytest.mark.parametrize("name", EQUAL)
def test_a_program_that_is_equal_is_not(name: str) -> None:
    body, inputs = EQUAL[name]
    assert sentences(Body(body).eval(), inputs) == []


def test_a_model_that_does_not_run_itself_is_not_compared() -> None:
    def only_exported(_: Any, x: Tensor) -> Tensor:
        assert torch.compiler.is_exporting(), "not supported"
        return x * 2

    assert sentences(Body(only_exported).eval(), (X,)) == []


@pytest.mark.parametrize("strict", [False, True])
def test_tensors_outside_of_buffers_start_with_their_own_values(strict: bool) -> None:
    """An export executes `self.count += 1` without an input, and the program has the tensor itself."""
    model = Body(counted).eval()
    (method,) = export_source(ModelSource.of(model, (X,)), name="m", strict=strict).methods.values()
    assert (model.count.tolist(), model.weight.tolist()) == ([0, 0], [5, 5])
    assert isinstance(method.pt2, bytes)
    program = read_program(method.pt2).module()
    for calls in (1, 2):
        assert torch.equal(program(X), X + calls + 5 * 2**calls)


class Encoder(nn.Module):
    """An encoder of torch with padding, which it computes only if it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y: Tensor = self.layers(x, src_key_padding_mask=padding)
        return y


def test_padding_is_compared_as_it_is_exported() -> None:
    x, padding = torch.randn(2, 6, 16), torch.arange(6)[None] >= torch.tensor([[4], [6]])
    model = Encoder().eval()
    with torch.no_grad():
        assert not torch.allclose(model(x, padding), torch.export.export(model, (x, padding)).module()(x, padding), atol=1e-3)
    assert not sentences(model, (x, padding))
    assert torch.backends.mha.get_fastpath_enabled()


class Window:
    """As a cache of transformers: its states are inputs, and the number of tokens that it has seen is lost."""

    def __init__(self, states: Tensor, seen: int) -> None:
        self.states, self.seen = states, seen
        self.lock: Any = None


pytree.register_pytree_node(
    Window,
    lambda window: ([window.states], None),
    lambda leaves, _: Window(*leaves, seen=0),
    serialized_type_name="users.Window",
    flatten_with_keys_fn=lambda window: ([(pytree.GetAttrKey("states"), window.states)], None),
)


class Reader(nn.Module):
    """Adds the position after the tokens that the cache has seen, which it may be given."""

    def forward(self, x: Tensor, window: Window, position: Tensor | None = None) -> Tensor:
        return x + window.states + (window.seen if position is None else position)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_what_an_object_keeps_besides_its_tensors_is_named_and_an_input_keeps_it(has_gradient: bool) -> None:
    states = X.clone().requires_grad_(has_gradient) * 2
    (text,) = sentences(Reader().eval(), (X, Window(states, seen=9)))
    assert "inputs: Window, rebuilt from its tensors, lacks what else it keeps: the output has other values." in text
    # The remedy.
    assert "or from inputs" in text
    assert not sentences(Reader().eval(), (X, Window(states, seen=9), torch.tensor(9)))
    assert not sentences(Reader().eval(), (X, Window(states, seen=0)))


def test_an_object_is_no_cause_of_what_differs_without_it() -> None:
    (text,) = sentences(Body(lambda _, x, window: x * random.random() + window.states).eval(), (X, Window(X, seen=9)))
    assert "example inputs: the output has other values." in text


@pytest.mark.parametrize("uncopied", [threading.Lock(), torch], ids=["lock", "module"])
def test_an_object_that_cannot_be_copied_whole_is_compared_with_what_else_it_keeps(uncopied: Any) -> None:
    window = Window(X, seen=9)
    window.lock = {"of": [uncopied]}
    (text,) = sentences(Reader().eval(), (X, window))
    assert "Window, rebuilt from its tensors, lacks what else it keeps: the output has other values." in text
    assert not sentences(Reader().eval(), (X, window, torch.tensor(9)))


def test_the_number_of_threads_stays_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert not sentences(Reader().eval(), (X, Window(X, seen=0)))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow(reason="exports models of transformers")
def test_a_cache_that_has_seen_more_than_its_window_needs_positions() -> None:
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(
        vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, sliding_window=4, initializer_range=0.2, **sizes
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(9)[None], past_key_values=cache, use_cache=True)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, past: Any, position_ids: Tensor | None = None) -> Any:
            output = self.model(input_ids=input_ids, past_key_values=past, position_ids=position_ids, use_cache=True)
            return output.logits, output.past_key_values

    token = torch.tensor([[5]])
    (text,) = sentences(Step().eval(), (token, cache))
    assert "DynamicCache, rebuilt from its tensors, lacks what else it keeps" in text and "position_ids" in text
    assert cache.get_seq_length() == 9
    # The remedy.
    assert not sentences(Step().eval(), (token, cache, torch.tensor([[9]])))
