"""Faults of ExecuTorch whose messages name no operator: each has its line, and what it says helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from executorch.exir import to_edge_transform_and_lower  # noqa: E402
from functorch.experimental.control_flow import map as mapped  # noqa: E402
from torch import nn  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch._higher_order_ops.while_loop import while_loop  # noqa: E402

from etfarm.server.compile.lower import build, quantize  # noqa: E402
from etfarm.server.compile.program.explain import stage_failed  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support.compiling import STATIC  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="lowers models")]


class Limited(nn.Module):
    """Has limits of any type."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Any) -> Any:
        return F.hardtanh(x, self.low, self.high)


class Several(nn.Module):
    """Maps rows to two outputs."""

    def forward(self, x: Any) -> Any:
        return mapped(lambda row: (row.sin(), row.cos()), x)


class Joined(nn.Module):
    """Maps rows to one output."""

    def forward(self, x: Any) -> Any:
        y = mapped(lambda row: torch.cat([row.sin(), row.cos()]), x)
        return y[:, :3], y[:, 3:]


class Apart(nn.Module):
    """Maps rows twice."""

    def forward(self, x: Any) -> Any:
        return mapped(lambda row: row.sin(), x), mapped(lambda row: row.cos(), x)


class Paired(nn.Module):
    """Maps pairs of rows."""

    def forward(self, x: Any, y: Any) -> Any:
        return mapped(lambda pair: pair[0].sin() * pair[1], (x, y))


class Stacked(nn.Module):
    """Maps pairs of rows that are one tensor."""

    def forward(self, x: Any, y: Any) -> Any:
        return mapped(lambda pair: pair[0].sin() * pair[1], torch.stack([x, y], 1))


class Scanned(nn.Module):
    """Computes with pairs of rows in a scan."""

    def forward(self, x: Any, y: Any) -> Any:
        return scan(lambda carry, pair: (carry.clone(), pair[0].sin() * pair[1]), torch.zeros(1), (x, y))[1]


class Nested(nn.Module):
    """A loop in a loop."""

    def forward(self, i: Any, x: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            _, y = while_loop(lambda j, y: j < 3, lambda j, y: (j + 1, y * 1.5), (torch.tensor(0), y))
            return i + 1, y

        return while_loop(lambda i, y: i < 2, body, (i, x))


class Unrolled(nn.Module):
    """The same without loops."""

    def forward(self, i: Any, x: Any) -> Any:
        for _ in range(2):
            for _ in range(3):
                x = x * 1.5
        return i + 2, x


class Weighted(nn.Module):
    """Returns its weight, or a copy of it."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.copies = copies

    def forward(self, x: Any) -> Any:
        return self.lin(x), self.lin.weight * 1 if self.copies else self.lin.weight


class Returned(nn.Module):
    """Returns what it subtracts from."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        return y, y - 2.0


class Last(nn.Module):
    """Has the weights of its convolution in another memory format than the one that they have at first."""

    def __init__(self, memory_format: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)

    def forward(self, x: Any) -> Any:
        return F.relu(self.a(x))


class Read(nn.Module):
    """Returns two buffers, as a function of them gives them, and takes no inputs unless it ignores one."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("h", torch.zeros(2, 4))
        self.register_buffer("n", torch.zeros(3))

    def forward(self, *ignored: Any) -> Any:
        return self.function(self.h), self.function(self.n)


class Largest(nn.Module):
    """Takes the maximum along a dim of an image."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


X: Final = torch.rand(2, 3)
IMAGE: Final = torch.rand(1, 3, 8, 8)
LINE: Final = "test_lowering_faults.py:"
CASES: Final[dict[str, tuple[nn.Module, Any, str, list[tuple[nn.Module, str]], list[str]]]] = {
    "integer limits": (
        Limited(0, 1), X, "xnnpack_fp32", [(Limited(0.0, 1.0), "xnnpack_fp32")],
        ["aten::hardtanh at ", LINE, "F.hardtanh(", "nn.Hardtanh(0.0, 1.0)"],
    ),
    "one integer limit": (
        Limited(-2, 1), X, "xnnpack_fp32", [(Limited(-2.0, 1.0), "xnnpack_fp32")],
        ["aten::hardtanh at ", LINE, "limits as floats"],
    ),
    "a map with several outputs": (
        Several(), X, "portable", [(Joined(), "portable"), (Apart(), "portable")],
        ["map with several outputs: map at ", LINE, "torch.cat", "for each output"],
    ),
    "a map over two tensors": (
        Paired(), (X, X + 1), "portable", [(Stacked(), "portable"), (Scanned(), "portable")],
        ["map over several tensors: map at ", LINE, "torch.stack([x, y], 1)", "a scan"],
    ),
    "a loop in a loop": (
        Nested(), (torch.tensor(0), X), "portable", [(Unrolled(), "portable")], ["torch.while_loop at ", LINE, "fixed number"],
    ),
    "a weight that is returned": (
        Weighted(copies=False), X, "xnnpack_fp32", [(Weighted(copies=True), "xnnpack_fp32")],
        ["the weight lin.weight to a delegate and return it too", "self.lin.weight * 1"],
    ),
    "weights that are channels last": (
        Last(torch.channels_last), IMAGE, STATIC, [(Last(torch.contiguous_format), STATIC)],
        ["weights in the usual memory format", "channels last", "Leave out model.to(memory_format"],
    ),
    "maxima without their dim": (
        Largest(lambda x: x.max(1)[0]), IMAGE, "xnnpack_fp32", [(Largest(lambda x: x.amax(1)), "xnnpack_fp32")],
        ["aten::max at ", LINE, "Write x.amax(dim) for x.max(dim)[0]"],
    ),
    "numbers in a method without inputs": (
        Read(lambda x: x + 0), (), "portable", [(Read(lambda x: x.clone()), "portable")],
        ["forward has no inputs", "aten::add at ", LINE, "self.h.clone(), not self.h + 0"],
    ),
    "a difference with a returned value": (
        Returned(), IMAGE, STATIC, [(Returned(), "xnnpack_fp32")], ["KeyError: 'val'", "aten::sub at ", LINE, "y - 2.0", "fp32"],
    ),
}  # fmt: skip


def lower(module: nn.Module, x: Any, name: str) -> tuple[Any, EtfarmError | None]:
    """Return the exported program, and the error of lowering it, if any."""
    program = torch.export.export(module.eval(), x if isinstance(x, tuple) else (x,))
    if name.startswith("xnnpack_pt2e"):
        quantization = build.quantization(build.resolved(recipes.parse(name)), "forward")
        program = quantize.export_again(quantize.quantize(program, quantization, name, "forward", ()), program, strict=False)
    try:
        with torch.no_grad():
            partitioners = [] if name == "portable" else [XnnpackPartitioner()]
            to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
    except Exception as error:  # noqa: BLE001 - what is tested
        return program, stage_failed("TO_EDGE_TRANSFORM_AND_LOWER", error, {"forward": program})
    return program, None


@pytest.mark.parametrize("name", CASES)
def test_a_fault_has_its_line_and_what_helps(name: str) -> None:
    broken, x, recipe, mended, words = CASES[name]
    _, error = lower(broken, x, recipe)
    assert error is not None and error.reason == "STAGE_FAILED"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    for module, other in mended:
        assert lower(module, x, other)[1] is None


def test_a_loop_that_shares_its_values_is_named() -> None:
    program = torch.export.export(Nested(), (torch.tensor(0), X))
    message = "torch.while_loop's cond_fn might be aliasing the input or the output!"
    error = stage_failed("TO_EDGE_TRANSFORM_AND_LOWER", RuntimeError(message), {"forward": program})
    assert "torch.while_loop at " in error.message and LINE in error.message and "torch.where" in error.remedy


def test_an_input_that_is_not_used_lets_a_method_compute_with_numbers() -> None:
    module = Read(lambda x: x * 2 + 3)
    _, error = lower(module, (), "xnnpack_fp32")
    assert error is not None and error.remedy.endswith("or give the method an input, which it need not use.")
    assert lower(module, X, "xnnpack_fp32")[1] is None


@pytest.mark.parametrize("proxied", [False, True])
def test_a_failure_without_an_explanation_names_the_operator_in_hand(proxied: bool) -> None:
    class Failing(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            held = torch.fx.Proxy(torch.fx.Graph().placeholder("x")) if proxied else None
            raise ZeroDivisionError(f"a pass divides by {'zero' if held is None else '0'}")

    program = torch.export.export(Limited(0.0, 1.0), (X,))
    with pytest.raises(ZeroDivisionError) as caught:
        Failing(program.graph_module).run(X)
    caught.value.args = ("a pass divides by zero",)
    error = stage_failed("TO_EDGE_TRANSFORM_AND_LOWER", caught.value, {"forward": program})
    assert "a pass divides by zero, near aten::hardtanh at " in error.message and LINE in error.message, error.message
