"""How each of the tiny programs of `tests.support.programs` is made. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import executorch.kernels.quantized  # noqa: F401 - its out variants
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from etfarm.server.compile.program.values import to_value
from etfarm.wire import tensors
from tests.support import flow_models, language_models
from tests.support.exports import Function, Unwritten


def _make(folder: Path, model: Any, *inputs: Any, shapes: Any = None, xnnpack: bool = False, **config: Any) -> None:
    """Write a program with inputs and what eager PyTorch gives for them.

    Args:
        folder: where to write.
        model: a module, or several by their names, of which the first gives the outputs.
        inputs: of the module.
        shapes: its dynamic shapes.
        xnnpack: whether XNNPACK takes what it can.
        config: values of `ExecutorchBackendConfig`.
    """
    modules = model if isinstance(model, Mapping) else {"forward": model}
    programs = {name: torch.export.export(module, inputs, dynamic_shapes=shapes) for name, module in modules.items()}
    edge = to_edge_transform_and_lower(
        programs, partitioner={name: [XnnpackPartitioner()] for name in programs} if xnnpack else {}
    )
    created = edge.to_executorch(ExecutorchBackendConfig(**config))
    (folder / "program.pte").write_bytes(created.buffer)
    created.write_tensor_data_to_file(str(folder))
    values = [to_value(f"in{i}", leaf) for i, leaf in enumerate(inputs)]
    (folder / "inputs.ett").write_bytes(tensors.encode(values))
    with torch.no_grad():
        result = next(iter(modules.values()))(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    (folder / "expected.ett").write_bytes(tensors.encode(to_value(f"out{i}", leaf) for i, leaf in enumerate(outputs)))


def _convolutions(*last: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), *last)


def _linear(inputs: int = 4, outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs)


def _tagged(module: nn.Module, x: Tensor) -> nn.Module:
    """Return a module whose weights XNNPACK's delegate leaves to a .ptd file."""
    unlifted = torch.export.export(module, (x,)).module()
    delegate_external_constants_pass_unlifted(module=unlifted, gen_tag_fn=lambda node: "weights")
    return unlifted


def _quantized(module: nn.Module, x: Tensor, *, is_per_channel: bool) -> nn.Module:
    """Return a module that is quantized statically."""
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=is_per_channel))
    prepared = prepare_pt2e(torch.export.export(module, (x,)).module(), quantizer)
    prepared(x)
    converted: nn.Module = convert_pt2e(prepared)
    return converted


class Add(nn.Module):
    """The sum of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Counter(nn.Module):
    """A mutable buffer that counts its calls, added to x: tells whether state was kept or reset."""

    count: Tensor

    def __init__(self, step: float) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(self.step)
        return x + self.count


class Scale(nn.Module):
    """x * factor + bias with a Python float baked in and an absent bias."""

    def forward(self, x: Tensor, factor: float, times: int, bias: Tensor | None) -> Tensor:
        y = x * factor * times
        return y if bias is None else y + bias


class Moved(nn.Module):
    """One value of each dtype; each comes back moved."""

    def forward(self, half: Tensor, brain: Tensor, flag: Tensor, large: Tensor, one: Tensor, none: Tensor) -> tuple[Tensor, ...]:
        return half * 2, brain * 2, torch.logical_not(flag), large + 1, one * 2, none * 2


def _six_times(x: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.sin(x) + 1.0
    return x


DOUBLE: Final = Function(lambda x: x * 2.0)
NEXT: Final = Function(lambda x: x + 1.0)
_IMAGE: Final = (1, 3, 16, 16)
_ROWS: Final = {"x": {0: torch.export.Dim("n", min=1, max=8)}}

MAKERS: Final[dict[str, Callable[[Path], None]]] = {
    # x + y, float32 [2, 3], portable kernels
    "add": lambda folder: _make(folder, Add(), torch.arange(6.0).reshape(2, 3), torch.ones(2, 3) * 0.5),
    # x * 2 for float32 [n, 3] with n up to 8
    "batch": lambda folder: _make(folder, DOUBLE, torch.rand(4, 3), shapes=_ROWS),
    # two convolutions with ReLU in XNNPACK
    "conv": lambda folder: _make(folder, _convolutions(nn.ReLU()), torch.rand(_IMAGE), xnnpack=True),
    "counter": lambda folder: _make(folder, Counter(1.0), torch.zeros(1)),
    # each adds to x what it has counted, by one and by ten; their buffers are their own
    "counters": lambda folder: _make(folder, {"ones": Counter(1.0), "tens": Counter(10.0)}, torch.zeros(1)),
    # float16, bfloat16, bool, int64, a 0-d float32 and a float32 of no element
    "dtypes": lambda folder: _make(
        folder, Moved(), torch.tensor([1.5, -2.0], dtype=torch.float16), torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]), torch.tensor([2**40, -1]), torch.tensor(0.25), torch.empty(0, 3),
    ),
    # 2 MiB in and out
    "wide": lambda folder: _make(folder, NEXT, torch.rand(1024, 512)),
    # portable operators whose intermediates reuse the input's memory: a second run without setting it again is wrong
    "chain": lambda folder: _make(folder, Function(_six_times), torch.rand(64)),
    # -x exported for a channels-last float32 [1, 2, 3, 4]
    "channels_last": lambda folder: _make(
        folder, Function(lambda x: -x), torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    # intermediates of some 256 MB, for tests of the memory limit
    "large": lambda folder: _make(folder, Function(lambda x: (x.expand(8192, 4096) + 1.0).sin().amax()), torch.rand(4096)),
    "scalars": lambda folder: _make(folder, Scale(), torch.rand(3), 2.5, 3, None),
    # in one program; the expected outputs are of `double`
    "methods": lambda folder: _make(folder, {"double": DOUBLE, "shift": Function(lambda x: x + 10.0)}, torch.arange(3.0)),
    # x * 2 and, as an int, the rows of x; float32 [n, 3] with n up to 8
    "rows": lambda folder: _make(folder, Function(lambda x: (x * 2.0, x.shape[0])), torch.rand(4, 3), shapes=_ROWS),
    # a quantized linear layer without a delegate: the runtime's own quantized kernels around a portable one
    "int8": lambda folder: _make(folder, _quantized(_linear(8, 4), x := torch.rand(2, 8), is_per_channel=False), x),
    # `conv`, quantized per channel
    "conv_int8": lambda folder: _make(
        folder, _quantized(_convolutions(), x := torch.rand(_IMAGE), is_per_channel=True), x, xnnpack=True
    ),
    # a linear layer whose weight and whose bias are in a .ptd file each
    "split": lambda folder: _make(
        folder, _linear(), torch.rand(2, 4), external_constants=lambda node: "bias" if "bias" in node.name else "weight"
    ),
    # x * 2 for float32 [n, 3] with n up to 8, whose input and output have no place in the memory plan
    "unplanned": lambda folder: _make(
        folder, Function(lambda x: torch.sin(x) * 2.0), torch.rand(4, 3), shapes=_ROWS,
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
    ),
    # x + noise: no two executions give the same
    "random": lambda folder: _make(folder, Function(lambda x: x + torch.rand(2, 3)), torch.zeros(2, 3)),
    # x and noise in its last bits: executions differ by what rounding explains
    "rounding": lambda folder: _make(folder, Function(lambda x: x + 4e-6 * torch.rand(2, 3)), torch.ones(2, 3)),
    # for zeros [1, 2, 4, 4]; the first execution is right
    "unwritten": lambda folder: _make(folder, Unwritten(), torch.zeros(1, 2, 4, 4), xnnpack=True),
    # a linear layer whose weights are in a .ptd file
    "external": lambda folder: _make(folder, _linear(), torch.rand(2, 4), external_constants=True),
    "external_xnnpack": lambda folder: _make(folder, _tagged(_linear(), x := torch.rand(2, 4)), x, xnnpack=True),
    # a Llama as ExecuTorch's `export_llm` makes it, which takes most of a minute; see `language_models`
    "llama": language_models.make_llama,
    # decoders with a KV cache: `inputs` is a prompt, `expected` the tokens after it
    **{
        f"decoder_{kind}": lambda folder, kind=kind: language_models.make(folder, kind)  # type: ignore[misc]
        for kind in ("start", "vector", "static", "int32", "half", "bfloat16", "custom", "shared", "chunked", "xnnpack", "long")
    },
    # vision-language models: `inputs` is an image and a prompt, `expected` the tokens after them
    **{
        f"flow_{kind}": lambda folder, kind=kind: flow_models.make(folder, kind)  # type: ignore[misc]
        for kind in ("start", "vector", "static", "short", "shared", "xnnpack", "misfit")
    },
}  # fmt: skip
