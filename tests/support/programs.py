"""Tiny programs for tests: made once, kept in a cache outside of the checkout, loaded without torch afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.wire import digest, tensors
from etfarm.wire.tensors import Tensor, Value

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Program:
    """A .pte, inputs for it, and what torch gave for them."""

    path: Path
    inputs: list[Value]
    expected: list[Value]
    data: tuple[Path, ...] = ()
    """Its .ptd files."""

    @property
    def bytes(self) -> bytes:
        """The .pte's content."""
        return self.path.read_bytes()


def cache_folder() -> Path:
    """Where tests keep what is expensive to make; per user, outside of the checkout."""
    folder = Path(tempfile.gettempdir()) / f"etfarm-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _toolchain() -> str:
    makers = [Path(__file__), *(Path(__file__).with_name(f"{name}_models.py") for name in ("language", "flow"))]
    return digest.of_value([*map(digest.of_file, makers), version("torch"), version("executorch")])[:16]


def program(name: str) -> Program:
    """The program of that name; see `_MAKERS`."""
    folder = cache_folder() / f"programs-{_toolchain()}" / name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Several test runs at once make it one time: another one may read it already.
            if not (folder / "done").exists():
                _MAKERS[name](folder)
                (folder / "done").write_text(json.dumps(name))
    inputs = tensors.decode((folder / "inputs.ett").read_bytes())
    expected = tensors.decode((folder / "expected.ett").read_bytes())
    return Program(folder / "program.pte", inputs, expected, tuple(sorted(folder.glob("*.ptd"))))


def _value(name: str, value: torch.Tensor) -> Tensor:
    import numpy as np

    order = tuple(value.dim_order())
    array: np.ndarray = value.detach().numpy()
    return tensors.from_array(name, array, order)


def _make(
    folder: Path,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    dynamic_shapes: object = None,
    xnnpack: bool = False,
) -> None:
    import torch
    from executorch.exir import to_edge_transform_and_lower

    module.eval()
    exported = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)  # type: ignore[arg-type]
    partitioners = []
    if xnnpack:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    edge = to_edge_transform_and_lower(exported, partitioner=partitioners, generate_etrecord=False)
    (folder / "program.pte").write_bytes(edge.to_executorch().buffer)
    with torch.no_grad():
        values = [_value(f"in{i}", tensor) for i, tensor in enumerate(inputs)]
        result = module(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    (folder / "inputs.ett").write_bytes(tensors.encode(values))
    (folder / "expected.ett").write_bytes(tensors.encode(_value(f"out{i}", t) for i, t in enumerate(outputs)))


def _add(folder: Path) -> None:
    """x + y, float32 [2, 3], portable kernels."""
    import torch

    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    _make(folder, Add(), (torch.arange(6.0).reshape(2, 3), torch.ones(2, 3) * 0.5))


def _batch(folder: Path) -> None:
    """x * 2 for float32 [n, 3] with n up to 8."""
    import torch

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

    _make(folder, Double(), (torch.rand(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=1, max=8)}})


def _conv(folder: Path) -> None:
    """Two convolutions with ReLU in XNNPACK, float32 [1, 3, 16, 16]."""
    import torch

    torch.manual_seed(7)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, stride=2), torch.nn.ReLU()
    )
    _make(folder, layers, (torch.rand(1, 3, 16, 16),), xnnpack=True)


def _counter(folder: Path) -> None:
    """A mutable buffer that counts its calls, added to x: tells whether state was kept or reset."""
    import torch

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1.0)
            return x + self.calls

    _make(folder, Counter(), (torch.zeros(1),))


def _chain(folder: Path) -> None:
    """Portable operators whose intermediates reuse the input's memory: a second run without setting it again is wrong."""
    import torch

    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.sin(x) + 1.0
            return x

    _make(folder, Chain(), (torch.rand(64),))


def _channels_last(folder: Path) -> None:
    """-x exported for a channels-last float32 [1, 2, 3, 4]."""
    import torch

    class Negative(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    x = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    _make(folder, Negative(), (x,))


def _large(folder: Path) -> None:
    """Intermediates of some 256 MB, for tests of the memory limit."""
    import torch

    class Large(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.expand(8192, 4096) + 1.0).sin().amax()

    _make(folder, Large(), (torch.rand(4096),))


def _scalars(folder: Path) -> None:
    """x * factor + bias with a Python float baked in and an absent bias."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: float, times: int, bias: torch.Tensor | None) -> torch.Tensor:
            y = x * factor * times
            return y if bias is None else y + bias

    x = torch.rand(3)
    exported = torch.export.export(Scale().eval(), (x, 2.5, 3, None))
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    inputs: list[Value] = [
        _value("x", x), tensors.Scalar("factor", 2.5), tensors.Scalar("times", 3), tensors.Scalar("bias", None),
    ]  # fmt: skip
    (folder / "inputs.ett").write_bytes(tensors.encode(inputs))
    (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", x * 2.5 * 3)]))


def _random(folder: Path) -> None:
    """x + noise: no two executions give the same."""
    import torch

    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(2, 3)

    _make(folder, Noisy(), (torch.zeros(2, 3),))


def _rounding(folder: Path) -> None:
    """x and noise in its last bits: executions differ by what rounding explains."""
    import torch

    class Rounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 4e-6 * torch.rand(2, 3)

    _make(folder, Rounded(), (torch.ones(2, 3),))


def _external(folder: Path, *, xnnpack: bool) -> None:
    """A linear layer whose weights are in a .ptd file."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted

    torch.manual_seed(3)
    layer = torch.nn.Linear(4, 3).eval()
    x = torch.rand(2, 4)
    exported = torch.export.export(layer, (x,))
    if xnnpack:
        unlifted = exported.module()
        delegate_external_constants_pass_unlifted(module=unlifted, gen_tag_fn=lambda node: "weights")
        exported = torch.export.export(unlifted, (x,))
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()] if xnnpack else [])
    created = edge.to_executorch(ExecutorchBackendConfig(external_constants=not xnnpack))
    (folder / "program.pte").write_bytes(created.buffer)
    created.write_tensor_data_to_file(str(folder))
    with torch.no_grad():
        (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", layer(x))]))
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))


def _methods(folder: Path) -> None:
    """`double` and `shift` of float32 [3], in one program; the expected outputs are of `double`."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 10.0

    x = torch.arange(3.0)
    exported = {name: torch.export.export(module.eval(), (x,)) for name, module in (("double", Double()), ("shift", Shift()))}
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", x * 2.0)]))


def _dtypes(folder: Path) -> None:
    """One value each as float16, bfloat16, bool, int64, a 0-d float32 and a float32 of no element; each comes back moved."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Moved(torch.nn.Module):
        def forward(
            self,
            half: torch.Tensor,
            brain: torch.Tensor,
            flag: torch.Tensor,
            large: torch.Tensor,
            one: torch.Tensor,
            none: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            return half * 2, brain * 2, torch.logical_not(flag), large + 1, one * 2, none * 2

    inputs = (
        torch.tensor([1.5, -2.0], dtype=torch.float16),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([2**40, -1]),
        torch.tensor(0.25),
        torch.empty(0, 3),
    )
    exported = torch.export.export(Moved().eval(), inputs)
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)

    def value(name: str, tensor: torch.Tensor) -> Tensor:
        # numpy has no bfloat16: its bits are carried.
        dtype = str(tensor.dtype).removeprefix("torch.")
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return Tensor(name, dtype, tuple(tensor.shape), data, tuple(range(tensor.dim())))

    names = ("half", "brain", "flag", "large", "one", "none")
    values = [value(name, tensor) for name, tensor in zip(names, inputs, strict=True)]
    (folder / "inputs.ett").write_bytes(tensors.encode(values))
    expected = [value(f"out{i}", tensor) for i, tensor in enumerate(Moved()(*inputs))]
    (folder / "expected.ett").write_bytes(tensors.encode(expected))


def _counters(folder: Path) -> None:
    """`ones` and `tens`: each adds to x what it has counted, by one and by ten; their buffers are their own."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Counter(torch.nn.Module):
        def __init__(self, step: float) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.step = step

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(self.step)
            return x + self.count

    x = torch.zeros(1)
    exported = {name: torch.export.export(Counter(step).eval(), (x,)) for name, step in (("ones", 1.0), ("tens", 10.0))}
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", x + 1.0)]))


def _wide(folder: Path) -> None:
    """x + 1 for float32 [1024, 512]: 2 MiB in and out."""
    import torch

    class Next(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1.0

    _make(folder, Next(), (torch.rand(1024, 512),))


def _rows(folder: Path) -> None:
    """x * 2 and, as an int, the rows of x; float32 [n, 3] with n up to 8."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x * 2.0, x.shape[0]

    x = torch.rand(4, 3)
    dynamic = {"x": {0: torch.export.Dim("n", min=1, max=8)}}
    exported = torch.export.export(Rows().eval(), (x,), dynamic_shapes=dynamic)
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", x * 2.0), tensors.Scalar("out1", 4)]))


def _int8(folder: Path) -> None:
    """A quantized linear layer without a delegate: the runtime's own quantized kernels around a portable one."""
    import executorch.kernels.quantized  # noqa: F401 - its out variants
    import torch
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.manual_seed(5)
    x = torch.rand(2, 8)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=False))
    prepared = prepare_pt2e(torch.export.export(torch.nn.Linear(8, 4).eval(), (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    exported = torch.export.export(converted, (x,))
    (folder / "program.pte").write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    with torch.no_grad():
        (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", converted(x))]))


def _conv_int8(folder: Path) -> None:
    """`conv`, statically quantized per channel, in XNNPACK."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, stride=2)).eval()
    x = torch.rand(1, 3, 16, 16)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(layers, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    lowered = to_edge_transform_and_lower(torch.export.export(converted, (x,)), partitioner=[XnnpackPartitioner()])
    (folder / "program.pte").write_bytes(lowered.to_executorch().buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    with torch.no_grad():
        (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", converted(x))]))


def _split(folder: Path) -> None:
    """A linear layer whose weight and whose bias are in a .ptd file each."""
    import torch
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    torch.manual_seed(3)
    layer = torch.nn.Linear(4, 3).eval()
    x = torch.rand(2, 4)
    edge = to_edge_transform_and_lower(torch.export.export(layer, (x,)))
    config = ExecutorchBackendConfig(external_constants=lambda node: "bias" if "bias" in node.name else "weight")
    created = edge.to_executorch(config)
    (folder / "program.pte").write_bytes(created.buffer)
    created.write_tensor_data_to_file(str(folder))
    with torch.no_grad():
        (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", layer(x))]))
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))


def _unplanned(folder: Path) -> None:
    """x * 2 for float32 [n, 3] with n up to 8, whose input and output have no place in the memory plan."""
    import torch
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * 2.0

    x = torch.rand(4, 3)
    dynamic = {"x": {0: torch.export.Dim("n", min=1, max=8)}}
    edge = to_edge_transform_and_lower(torch.export.export(Chain().eval(), (x,), dynamic_shapes=dynamic))
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    (folder / "program.pte").write_bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning)).buffer)
    (folder / "inputs.ett").write_bytes(tensors.encode([_value("x", x)]))
    (folder / "expected.ett").write_bytes(tensors.encode([_value("out0", torch.sin(x) * 2.0)]))


def _language_model(folder: Path, *, kind: str) -> None:
    """A decoder with a KV cache; see `language_models`. `inputs` is a prompt, `expected` the tokens after it."""
    from tests.support.language_models import make

    make(folder, kind)


def _flow_model(folder: Path, *, kind: str) -> None:
    """A vision-language model; see `flow_models`. `inputs` is an image and a prompt, `expected` the tokens after them."""
    from tests.support.flow_models import make

    make(folder, kind)


def _llama(folder: Path) -> None:
    """A Llama as ExecuTorch's `export_llm` makes it, which takes most of a minute; see `language_models`."""
    from tests.support.language_models import make_llama

    make_llama(folder)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "add": _add,
    "batch": _batch,
    "conv": _conv,
    "counter": _counter,
    "dtypes": _dtypes,
    "counters": _counters,
    "wide": _wide,
    "chain": _chain,
    "channels_last": _channels_last,
    "large": _large,
    "scalars": _scalars,
    "methods": _methods,
    "rows": _rows,
    "int8": _int8,
    "conv_int8": _conv_int8,
    "split": _split,
    "unplanned": _unplanned,
    "random": _random,
    "rounding": _rounding,
    "external": partial(_external, xnnpack=False),
    "external_xnnpack": partial(_external, xnnpack=True),
    "llama": _llama,
    **{
        f"decoder_{kind}": partial(_language_model, kind=kind)
        for kind in ("start", "vector", "static", "int32", "half", "bfloat16", "custom", "shared", "chunked", "xnnpack", "long")
    },
    **{
        f"flow_{kind}": partial(_flow_model, kind=kind)
        for kind in ("start", "vector", "static", "short", "shared", "xnnpack", "misfit")
    },
}
