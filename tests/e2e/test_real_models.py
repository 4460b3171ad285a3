"""Real models of several kinds through a real farm: delegated, as exact as eager on the server, and so in ExecuTorch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from etfarm.client.export import ModelSource
from etfarm.client.export.demos import make_demo
from tests.support.farm import FarmProcess
from tests.zoo.catalog import create

pytestmark = pytest.mark.slow(reason="compiles and measures real models")

EXACT_DB = 60.0
"""What fp32 programs keep of eager's numbers: sums in another order give 90 dB and more."""


def zoo(name: str) -> ModelSource:
    """Return a network of the zoo."""
    network = create(name)
    return ModelSource.of(network.module, network.args)


def recurrent() -> ModelSource:
    """torch.nn.LSTM of two layers, its state in and out."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
            self.tags = nn.Linear(24, 5)

        def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
            y, state = self.lstm(x, state)
            return self.tags(y), state

    torch.manual_seed(0)
    state = (torch.randn(2, 1, 24), torch.randn(2, 1, 24))
    return ModelSource.of(Tagger().eval(), (torch.randn(1, 6, 16), state))


MODELS: dict[str, Callable[[], ModelSource]] = {
    "resnet18": lambda: zoo("torchvision/resnet18"),
    "mobilenet_v2": lambda: zoo("torchvision/mobilenet_v2"),
    "resnet8": lambda: make_demo("resnet8"),
    "torch_lstm": recurrent,
    "examples_lstm": lambda: zoo("executorch/lstm"),
}


def compiled(farm: FarmProcess, source: ModelSource, recipe: str, path: Path, sizes: set[str], at_least_db: float) -> Any:
    """Compile the model, check the server's findings at each size of inputs, and load it into ExecuTorch's runtime.

    Returns:
        The loaded method.
    """
    from executorch.runtime import Runtime

    with farm.client() as client:
        job = client.compile(source, recipe)
        report = job.result().report
        job.save_program(path)
    assert report.compile.delegation["forward"]["subgraphs"] > 0
    checks = {check["inputs"]: check for check in report.compile.checks}
    assert set(checks) == sizes
    for check in checks.values():
        assert check["ran"], check
        assert all(output["sqnr_db"] is None or output["sqnr_db"] > at_least_db for output in check["outputs"]), check
    return Runtime.get().load_program(path).load_method("forward")


def assert_close(got: torch.Tensor, expected: torch.Tensor, at_least_db: float) -> None:
    noise = (got - expected).double().square().sum().item()
    power = expected.double().square().sum().item()
    assert got.shape == expected.shape and power > 0
    assert noise == 0 or 10 * math.log10(power / noise) > at_least_db


@pytest.mark.parametrize("name", MODELS)
def test_a_models_outputs_equal_eager(farm: FarmProcess, tmp_path: Path, name: str) -> None:
    source = MODELS[name]()
    method = compiled(farm, source, "xnnpack_fp32", tmp_path / "x.pte", {"EXAMPLE"}, EXACT_DB)
    inputs = [torch.randn_like(leaf) for leaf in torch.utils._pytree.tree_leaves(source.example_inputs["forward"])]
    spec = torch.utils._pytree.tree_structure(source.example_inputs["forward"])
    with torch.no_grad():
        expected = source.methods["forward"](*torch.utils._pytree.tree_unflatten(inputs, spec))
    leaves = torch.utils._pytree.tree_leaves(expected)
    outputs = method.execute(inputs)
    assert len(outputs) == len(leaves)
    for got, want in zip(outputs, leaves, strict=True):
        assert_close(got, want, EXACT_DB)


WIDTH, HEADS, LENGTH, VOCABULARY, AT_ONCE = 64, 4, 32, 50, 8


class Layer(nn.Module):
    """Attention over a cache of keys and values that it writes into, and a feed-forward part."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(self.before(x)).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.project)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        y = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(1, -1, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Logits for one to AT_ONCE tokens at their positions, after all preceding tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(LENGTH) <= positions.unsqueeze(1)
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.head(x)


@pytest.mark.parametrize(("recipe", "at_least_db"), [("xnnpack_fp32", EXACT_DB), ("xnnpack_pt2e_int8_dynamic_per_channel", 15.0)])
def test_a_transformer_keeps_its_cache_between_steps(farm: FarmProcess, tmp_path: Path, recipe: str, at_least_db: float) -> None:
    """A prompt of several tokens, then one token after the other: each step equals eager's, which has the same past."""
    torch.manual_seed(0)
    module = Transformer().eval()
    count = Dim("count", min=1, max=AT_ONCE)
    source = ModelSource.of(
        module,
        (torch.randint(VOCABULARY, (1, 4)), torch.arange(4)),
        dynamic_shapes={"tokens": {1: count}, "positions": {0: count}},
    )
    method = compiled(farm, source, recipe, tmp_path / "x.pte", {"EXAMPLE", "MIN", "MAX"}, at_least_db)
    assert all(not layer.keys.any() for layer in module.layers), "compiling leaves the user's module as it was"
    tokens = torch.randint(VOCABULARY, (1, 16))
    past = 0
    for length in (5, 1, 1, 8, 1):
        step = (tokens[:, past : past + length], torch.arange(past, past + length))
        with torch.no_grad():
            expected = module(*step)
        (logits,) = method.execute(list(step))
        assert_close(logits, expected, at_least_db)
        past += length
