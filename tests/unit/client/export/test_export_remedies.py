"""What torch.export refuses has a remedy, and the remedy works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.errors import BadModel, DimSpecialized
from tests.support.exports import export_called, export_program
from tests.support.refusals import refuses

IMAGE, KERNEL = torch.rand(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


class Model(nn.Module):
    """A call with a weight, a cache with a position, and a recurrent layer."""

    cache: Tensor
    position: Tensor

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.gru = nn.GRU(3, 2, batch_first=True)
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("position", torch.tensor(1))

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def must_equal_eager(body: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    """Check that a model is exported, and that its archive gives what it gives in three calls."""
    module = Model(body).eval()
    program = export_program(ModelSource.of(module, inputs))
    targets = {getattr(node.target, "__module__", "") for node in program.graph.nodes if node.op == "call_function"}
    assert "torch._functorch.predispatch" not in targets
    called = program.module()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(called(*inputs), module(*inputs))


def write_at(m: Any, x: Tensor, position: Tensor) -> Tensor:
    m.cache[position] = x[0]
    return m.cache * 1


def write_slice(m: Any, x: Tensor, where: Any) -> Tensor:
    m.cache[where] = x
    return m.cache * 1


def scanned(x: Tensor, a: Tensor, b: Tensor) -> Any:
    def step(h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n = h * a + v * b
        return n, n.clone()

    return scan(step, torch.zeros(3), x, dim=0)[1]


def scanned_positions(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Return a model that goes through positions in a scan, with what a step adds."""

    def body(m: Any, x: Tensor, positions: Tensor) -> Any:
        table = m.gru.weight_ih_l0

        def step(h: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            n = h + add(table, position)
            return n, n.clone()

        return scan(step, torch.zeros(3), positions, dim=0)[1]

    return body


def written_in_scan(write: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def body(m: Any, x: Tensor, positions: Tensor) -> Any:
        def step(h: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            n = write(h.clone(), position)
            return n, n.clone()

        return scan(step, x.sum() * torch.ones(4), positions, dim=0)[1]

    return body


def counted_in_scan(m: Any, x: Tensor) -> Any:
    table = m.gru.weight_ih_l0

    def step(carried: tuple[Tensor, Tensor], v: Tensor) -> Any:
        index, h = carried
        h = h + table[index.item()] * v
        return (index + 1, h), h.clone()

    return scan(step, (torch.tensor(0), torch.zeros(3)), x, dim=0)[1]


def numbered_in_scan(m: Any, x: Tensor) -> Any:
    table = m.gru.weight_ih_l0

    def step(h: Tensor, each: tuple[Tensor, Tensor]) -> Any:
        v, index = each
        h = h + table.index_select(0, index.reshape(1))[0] * v
        return h, h.clone()

    return scan(step, torch.zeros(3), (x, torch.arange(2)), dim=0)[1]


def assign_at(h: Tensor, position: Tensor) -> Tensor:
    h[position.item()] = 1.0
    return h


def gradient(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        v = x.detach().clone().requires_grad_(True)
        return torch.autograd.grad((v**3).sum(), v)[0]


def assign_data(m: Any, x: Tensor) -> Tensor:
    m.cache.data = m.cache + 1
    return m.cache + x[0]


def copy_data(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.cache.copy_(m.cache + 1)
    return m.cache + x[0]


def choose(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: torch.cond(x.sum() > 0, one, other, (x,))


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m.gru(sequence)[0], batch_first=True)[0]


def masked(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[1]) < lengths[:, None])[:, :, None], m.gru(x)[0], 0.0)


def printed(m: Any, x: Tensor) -> Tensor:
    if not torch.compiler.is_exporting():
        print(f"{x.sum().item():.1f}")
    return x * 1


POSITIONS = torch.tensor([1, 3, 0])
SEQUENCES = (torch.arange(24.0).reshape(2, 4, 3) / 24, torch.tensor([4, 2]))

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, Callable[..., Any]]] = {
    "index": (
        lambda m, x: write_at(m, x, m.position), (X,), "self.cache[self.pos.reshape(1)] = x",
        lambda m, x: write_at(m, x, m.position.reshape(1)),
    ),
    "slice": (
        lambda m, x: write_slice(m, x, slice(m.position, m.position + 2)), (X,), "self.cache[self.pos + torch.arange(n)] = x",
        lambda m, x: write_slice(m, x, m.position + torch.arange(2)),
    ),
    "cond convolution": (
        choose(lambda v: F.conv2d(v, KERNEL), lambda v: F.conv2d(v, KERNEL) * 2), (IMAGE,), "y.view(1, 4, 6, 6)",
        choose(lambda v: F.conv2d(v, KERNEL).view(1, 4, 6, 6), lambda v: (F.conv2d(v, KERNEL) * 2).view(1, 4, 6, 6)),
    ),
    "scan of parts": (
        lambda m, x: scanned(x, m.weight[:1], m.weight[1:2]), (X,), "a = self.w[0].clone()",
        lambda m, x: scanned(x, m.weight[:1].clone(), m.weight[1:2].clone()),
    ),
    "cond dtype": (
        choose(lambda v: v.double(), lambda v: v * 2), (X,), "end each with .to(dtype).contiguous()",
        choose(lambda v: (v * 1).to(torch.float32).contiguous(), lambda v: (v * 2).to(torch.float32).contiguous()),
    ),
    "cond strides": (
        choose(lambda v: v.t() * 1, lambda v: v.t().contiguous() * 2), (X,), "end each with .to(dtype).contiguous()",
        choose(lambda v: (v.t() * 1).contiguous(), lambda v: (v.t().contiguous() * 2).contiguous()),
    ),
    "cond alias": (
        choose(lambda v: v, lambda v: v * 2), (X,), "return a copy, v.clone()",
        choose(lambda v: v.clone(), lambda v: v * 2),
    ),
    "func.grad": (
        lambda m, x: torch.func.grad(lambda v: (v**3).sum())(x), (X,), "torch.autograd.grad(f(v).sum(), v)[0]", gradient,
    ),
    "vmap of grad": (
        lambda m, x: torch.vmap(torch.func.grad(lambda v: (v**3).sum()))(x), (X,), "torch.autograd.grad(f(v).sum(), v)[0]",
        gradient,
    ),
    "data": (assign_data, (X,), "torch.no_grad(): tensor.copy_(value)", copy_data),
    "vmap": (
        lambda m, x: torch.vmap(lambda v: m.gru.weight_ih_l0 @ v)(x), (X,), "vector @ matrix.t() instead of matrix @ vector",
        lambda m, x: torch.vmap(lambda v: v @ m.gru.weight_ih_l0.t())(x),
    ),
    "packed": (packed, SEQUENCES, "zero its outputs beyond the lengths", masked),
    "text": (
        lambda m, x: (f"{x.sum().item():.1f}", x * 1)[1], (X,), "under `if not torch.compiler.is_exporting():`", printed,
    ),
    "index in a scan": (
        scanned_positions(lambda table, at: table[at.item()]), (X, POSITIONS),
        "w.index_select(0, i.reshape(1))[0] for w[i.item()]",
        scanned_positions(lambda table, at: table.index_select(0, at.reshape(1))[0]),
    ),
    "write in a scan": (
        written_in_scan(assign_at), (X, POSITIONS), "write with torch.where(torch.arange(n) == i, new, old)",
        written_in_scan(lambda h, at: torch.where(torch.arange(4) == at, 1.0, h)),
    ),
    "number carried by a scan": (counted_in_scan, (X,), "scan(step, h, (x, torch.arange(n)))", numbered_in_scan),
    "unsqueeze_": (
        lambda m, x: x.unsqueeze_(0) * 2, (X.clone(),), "Write x = x.unsqueeze(dim), instead",
        lambda m, x: x.unsqueeze(0) * 2,
    ),
    "resize_": (
        lambda m, x: x.clone().resize_(2, 2) * 2, (X,), "Write x = x.flatten()[:n].view(sizes)",
        lambda m, x: x.flatten()[:4].view(2, 2) * 2,
    ),
    "set_": (
        lambda m, x: x.clone().set_(m.weight.detach().clone()) * 2, (X,), "Write x = other, instead",
        lambda m, x: m.weight * 2,
    ),
    "numpy": (
        lambda m, x: torch.from_numpy(np.sin(x.numpy())), (X,), "such as torch.sin for np.sin", lambda m, x: torch.sin(x),
    ),
}  # fmt: skip


WITHOUT_LINE = ("func.grad", "vmap of grad", "data", "vmap")
"""What torch refuses without saying where."""


@pytest.mark.remedy("EXPORT_FAILED")
@pytest.mark.parametrize("case", CASES)
def test_a_refusal_has_a_remedy_that_works(case: str) -> None:
    refused, inputs, words, mended = CASES[case]
    with refuses("EXPORT_FAILED") as caught:
        export_source(ModelSource.of(Model(refused).eval(), inputs), name="m")
    assert words in str(caught.value)
    assert "test_export_remedies.py:" in str(caught.value) or case in WITHOUT_LINE
    must_equal_eager(mended, inputs)


def test_data_of_a_strict_export_has_the_same_remedy() -> None:
    with refuses("EXPORT_FAILED", match=r"torch.no_grad\(\): tensor.copy_\(value\)"):
        export_source(ModelSource.of(Model(assign_data).eval(), (X,)), name="m", strict=True)


def count(m: Any, x: Tensor) -> Tensor:
    m.cache.add_(1)
    return torch.vmap(lambda v: v * m.cache.sum())(x)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: torch.vmap(lambda v: v.sin() + v.sum())(x),
        lambda m, x: torch.vmap(lambda v: v * m.weight)(x),
        lambda m, x: torch.vmap(lambda v, w: v * w, in_dims=(0, None))(x, m.weight),
        lambda m, x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"),
        lambda m, x: torch.func.jvp(lambda v: (v**3).sum(), (x,), (x,))[1],
        count,
    ],
)
def test_vmap_becomes_plain_operators(body: Callable[..., Any]) -> None:
    must_equal_eager(body, (X,))


@pytest.mark.remedy("UNSUPPORTED_OUTPUT")
def test_a_string_in_the_outputs_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Any:
        return {"y": x * 1, "kinds": [x.shape[0], "relu"]}

    with refuses("UNSUPPORTED_OUTPUT", match=r"^forward returns a str as its output 'kinds\[1\]', which a program cannot"):
        export_source(ModelSource.of(Model(body).eval(), (X,)), name="m")
    must_equal_eager(lambda m, x: {"y": x * 1, "kinds": [x.shape[0], 2.5, True, None]}, (X,))


@pytest.mark.parametrize("convert", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_modules_of_torchscript_are_refused(convert: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(3, 3).eval()
    with pytest.raises(BadModel, match="Give the module of Python that was given to"):
        export_source(ModelSource.of(convert(module), (X,)), name="m")
    export_source(ModelSource.of(module, (X,)), name="m")


class Steps(nn.Module):
    """Goes through a series with a cell, by a scan or by a layer that does so itself."""

    def __init__(self, *, scans: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(3, 2, batch_first=True)
        self.cell = nn.GRUCell(3, 2)
        self.scans = scans

    def forward(self, x: Tensor) -> Any:
        if not self.scans:
            return self.layer(x)[0]

        def step(h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(v, h)
            return h, h.clone()

        return scan(step, torch.zeros(1, 2), x.transpose(0, 1), dim=0)[1].transpose(0, 1)


def test_a_recurrent_layer_of_a_dynamic_length_is_refused_and_a_scan_of_its_cell_is_not() -> None:
    shapes, x = {"x": {1: Dim("time", min=2, max=9)}}, torch.rand(1, 5, 3)
    with pytest.raises(DimSpecialized) as caught:
        export_source(ModelSource.of(Steps(scans=False).eval(), (x,), dynamic_shapes=shapes), name="m")
    assert "a recurrent layer" in caught.value.remedy and "unrolls" in caught.value.remedy
    called = export_called(ModelSource.of(Steps(scans=True).eval(), (x,), dynamic_shapes=shapes))
    for length in (2, 9):
        series = torch.rand(1, length, 3)
        torch.testing.assert_close(called(series), Steps(scans=True)(series))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("empty", [(), [], {}, ((),)])
def test_an_empty_output_is_refused(empty: Any, strict: bool) -> None:
    def body(m: Any, x: Tensor) -> Any:
        m.cache.add_(x.sum())
        return empty

    with refuses("EXPORT_FAILED", match="forward returns no value, but a program needs an output") as caught:
        export_source(ModelSource.of(Model(body).eval(), (X,)), name="m", strict=strict)
    assert caught.value.remedy == "Return a tensor."
    must_equal_eager(lambda m, x: m.cache.add_(x.sum()) * 1, (X,))


def test_an_unpacking_of_the_models_own_keeps_its_line() -> None:
    def body(m: Any, x: Tensor) -> Any:
        first, second = ()
        return first + second

    with refuses("EXPORT_FAILED", match=r"test_export_remedies\.py:\d+ with ValueError: not enough values to unpack"):
        export_source(ModelSource.of(Model(body).eval(), (X,)), name="m")


def masked(is_decoder: bool, is_causal: bool | None) -> Callable[[Tensor], Tensor]:
    """Return a transformer of torch with a causal mask."""
    torch.manual_seed(0)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    if is_decoder:
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 1).eval()
        return lambda x: decoder(x, x, tgt_mask=mask, tgt_is_causal=is_causal)  # type: ignore[no-any-return]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    return lambda x: encoder(x, mask=mask, is_causal=is_causal)  # type: ignore[no-any-return]


class Masked(nn.Module):
    def __init__(self, called: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_branch_of_a_layer_of_torch_is_named_with_the_argument_that_avoids_it(*, is_decoder: bool) -> None:
    x = torch.ones(1, 4, 4)
    with refuses("DATA_DEPENDENT_BRANCH") as refused:
        export_source(ModelSource.of(Masked(masked(is_decoder, None)).eval(), (x,)), name="m")
    assert re.search(r"torch/nn/modules/transformer\.py:\d+, which \S*test_export_remedies\.py:\d+ calls", refused.value.message)
    assert ("tgt_is_causal" if is_decoder else "is_causal=False") in refused.value.remedy
    for is_causal in (False, True):
        assert export_source(ModelSource.of(Masked(masked(is_decoder, is_causal)).eval(), (x,)), name="m").methods
