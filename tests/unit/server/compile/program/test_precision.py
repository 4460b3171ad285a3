"""Which operators of a quantized program are reported to compute in fp32, of programs that the real quantizers made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.backends.xnnpack.partition.config.generic_node_configs import BMMConfig  # noqa: E402
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (  # noqa: E402
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.examples.models import MODEL_NAME_TO_MODEL  # noqa: E402
from executorch.examples.models.model_factory import EagerModelFactory  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: E402

from etfarm.server.compile.program import fp32_layers, places  # noqa: E402
from tests.support import models  # noqa: E402

pytestmark = pytest.mark.slow(reason="quantizes and compiles dozens of networks")

Forward = Callable[..., Any]


class Behind(nn.Module):
    """Something behind a linear, whose output a static quantizer quantizes."""

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, self.first(x))


class Attention(nn.Module):
    """One head between linears."""

    def __init__(self, softmax: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.softmax = softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.q(x) @ self.k(x).transpose(-1, -2)
        return self.o((torch.softmax(seen, -1) if self.softmax else seen) @ self.v(x))


class Branches(nn.Module):
    """A linear, and one of two behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.yes(y), lambda y: self.no(y), (self.first(x),))


class InBranch(nn.Module):
    """A product with weights that were quantized outside of the branch that has it."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(8, 8, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(8))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.codes, self.scales, self.zeros, 0, -127, 127, torch.int8
        )
        return torch.cond(x.sum() > 0, lambda y, w: F.linear(y, w), lambda y, w: y - w[0], (x, weight))


def quantized(module: nn.Module, *inputs: torch.Tensor, dynamic: bool = False, per_channel: bool = True) -> Any:
    """Return the program that XNNPACK's quantizer makes of a module."""
    quantizer = XNNPACKQuantizer()
    quantizer.set_global(get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic))
    prepared = prepare_pt2e(torch.export.export(module.eval(), inputs).module(check_guards=False), quantizer)
    prepared(*inputs)
    return torch.export.export(convert_pt2e(prepared), inputs)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Observers' many small operators wait for each other's threads where a machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def left(program: Any, *, xnnpack: bool = True) -> dict[str, int]:
    return {row.op: row.count for row in places.fp32(program, xnnpack=xnnpack)}


X = torch.randn(1, 5, 8)

BEHIND: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "attention": (Attention, {"matmul": 2}),
    "attention_without_softmax": (lambda: Attention(softmax=False), {"matmul": 2}),
    "fused_attention": (
        lambda: Behind(lambda self, y: F.scaled_dot_product_attention(y, y, y)), {"scaled_dot_product_attention": 1}
    ),
    "two_computed_operands": (
        lambda: Behind(lambda self, y: F.linear(y, self.other(y)[0]), other=nn.Linear(8, 8)), {"linear": 1}
    ),
    "lstm": (lambda: Behind(lambda self, y: self.more(y)[0], more=nn.LSTM(8, 4, batch_first=True)), {"lstm": 1}),
    "gru": (lambda: Behind(lambda self, y: self.more(y)[0], more=nn.GRU(8, 4, batch_first=True)), {"gru": 1}),
    "rnn": (lambda: Behind(lambda self, y: self.more(y)[0], more=nn.RNN(8, 4, batch_first=True)), {"rnn_tanh": 1}),
    "lstm_cell": (lambda: Behind(lambda self, y: self.more(y[0])[0], more=nn.LSTMCell(8, 4)), {"lstm_cell": 1}),
    "own_weights": (
        lambda: Behind(lambda self, y: torch.addmm(self.b, y[0], self.w) @ self.w, w=nn.Parameter(torch.randn(8, 8)),
                       b=nn.Parameter(torch.randn(8))),
        {"addmm": 1, "matmul": 1},
    ),
    "einsum": (lambda: Behind(lambda self, y: torch.einsum("bij,bkj->bik", y, y)), {"einsum": 1}),
    "branches": (Branches, {"linear": 2}),
    "linears": (lambda: Behind(lambda self, y: self.more(torch.relu(y)), more=nn.Linear(8, 8)), {}),
    "one_linear_twice": (lambda: Behind(lambda self, y: self.first(y)), {}),
    "elementwise": (lambda: Behind(lambda self, y: torch.softmax(y * y + 1, -1)), {}),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", BEHIND)
def test_fp32_operators_behind_a_quantized_layer_are_reported(case: str, dynamic: bool) -> None:
    make, expected = BEHIND[case]
    program = quantized(make(), X, dynamic=dynamic)
    assert left(program) == expected


@pytest.mark.parametrize("name", ["resnet8", "ds_cnn", "mobilenet_v1_025"])
def test_fully_int8_models_have_no_fp32_operators(name: str) -> None:
    module, inputs, _, _ = EagerModelFactory.create_model(*MODEL_NAME_TO_MODEL[name])
    assert left(quantized(module, *inputs)) == {}


def test_of_a_4_bit_model_what_was_left_alone() -> None:
    assert left(models.four_bit()) == {}


def test_products_that_another_backend_multiplies_in_int8_are_not_reported() -> None:
    program = quantized(Attention(), X)
    assert left(program, xnnpack=False) == {"matmul": 1}, "softmax gives fp32 to the other one"
    fused = quantized(Behind(lambda self, y: F.scaled_dot_product_attention(y, y, y)), X)
    assert left(fused, xnnpack=False) == {}


def test_xnnpack_does_multiply_batches_in_fp32_only() -> None:
    assert BMMConfig().supported_precision_types() == [ConfigPrecisionType.FP32]


def test_layers_that_xnnpack_refuses_in_int8_are_reported() -> None:
    conv = quantized(nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv3d(4, 2, 1)), torch.randn(1, 2, 5, 5, 5))
    assert left(conv) == {"conv3d": 2}
    assert left(conv, xnnpack=False) == {}
    assert left(quantized(nn.Linear(8, 8), X, dynamic=True, per_channel=False)) == {"linear": 1}
    assert left(quantized(nn.Linear(8, 8), X, dynamic=False, per_channel=False)) == {}


def test_weights_that_a_branch_is_given_are_constants_in_it() -> None:
    assert left(torch.export.export(InBranch().eval(), (torch.randn(2, 8),))) == {}


def test_a_buffer_that_the_model_writes_is_no_weight() -> None:
    class Cache(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            self.seen.copy_(y[0])
            return y @ self.seen.t()

    assert left(quantized(Cache(), X)) == {"matmul": 1}


def test_whose_quantizers_and_partitioners_are_xnnpacks() -> None:
    class Own(XNNPACKQuantizer):  # type: ignore[misc]
        """As a plug-in has it."""

    assert fp32_layers.by_xnnpack([XNNPACKQuantizer(), Own()])
    assert fp32_layers.by_xnnpack([XnnpackPartitioner()])
    assert fp32_layers.by_xnnpack([]), "ExecuTorch's portable kernels"
    assert not fp32_layers.by_xnnpack([XNNPACKQuantizer(), object()])
