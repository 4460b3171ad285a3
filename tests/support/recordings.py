"""Real numerics passes for tests: compiled per operator by the compile room's own tasks and run by the C++ runner, in a child;
kept in a cache outside of the checkout.

The networks are defined here, so that lines of this file are the user's lines in what is found.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.wire import digest
from tests.support.programs import cache_folder

if TYPE_CHECKING:
    import torch

    from etfarm.device_agents.runners.bundle import Bundle


@dataclass(frozen=True)
class RecordedRun:
    """One method's numerics pass with everything that an analysis takes."""

    folder: Path
    method: str = "forward"

    @property
    def pte(self) -> Path:
        return self.folder / "program.pte"

    @property
    def etrecord(self) -> Path:
        return self.folder / "program.etrecord"

    @property
    def etdump(self) -> Path:
        return self.folder / "numerics.etdp"

    @property
    def debug(self) -> Path:
        return self.folder / "numerics.bin"

    @property
    def model(self) -> Path:
        """Before quantization. The store's names have no suffix."""
        return self.folder / "model"

    @property
    def quantized(self) -> Path | None:
        """As it was lowered, where something quantized it."""
        path = self.folder / "quantized"
        return path if path.exists() else None

    @property
    def inputs(self) -> Path:
        return self.folder / "inputs.ett"

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs.ett"


def line_of(code: str) -> int:
    """The number of this file's only line that starts with `code`."""
    (result,) = [at for at, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip().startswith(code)]
    return result


@cache
def recorded(name: str) -> RecordedRun:
    """The pass of that name; see `_RECIPES`. The first one asked for has all of them made, in one child."""
    key = digest.of_value([digest.of_file(Path(__file__)), version("torch"), version("executorch")])[:16]
    folder = cache_folder() / f"recordings-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "tests.support.recordings", str(folder)]
            created = subprocess.run(command, check=False, capture_output=True, text=True)
            assert created.returncode == 0, created.stderr[-4000:]
            (folder / "done").touch()
    return RecordedRun(folder / name, _RECIPES[name].method)


def _cnn() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch
    import torch.nn.functional as F

    class Cnn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(16)
            self.middle = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.last = torch.nn.Conv2d(16, 24, 1)
            self.head = torch.nn.Linear(24, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            stemmed = F.relu(self.norm(self.stem(x)))
            mixed = self.middle(stemmed)
            joined = mixed + stemmed
            small = F.max_pool2d(joined, 2)
            wide = F.relu(self.last(small))
            pooled = wide.mean((2, 3))
            return self.head(pooled)

    network = Cnn()
    for parameter in (network.norm.running_mean, network.norm.running_var):
        parameter.copy_(torch.rand(16) + 0.5)
    return network.eval(), (torch.randn(1, 3, 16, 16),)


def _mixed() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Operators that XNNPACK does not take between some that it does."""
    import torch

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(3, 8, 3)
            self.second = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.first(x)
            summed = result.cumsum(2)
            scaled = torch.erf(summed) * 3.0
            kept = torch.where(scaled > 0.5, scaled, -scaled)
            return self.second(kept.amax((2, 3)))

    return Mixed().eval(), (torch.randn(2, 3, 8, 8),)


def _attention() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 32)
            self.norm = torch.nn.LayerNorm(32)
            self.joint = torch.nn.Linear(32, 96)
            self.out = torch.nn.Linear(32, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            q, k, v = self.joint(self.norm(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(seen.transpose(1, 2).flatten(2))

    return Attention().eval(), (torch.randint(0, 50, (1, 6)),)


def _lstm() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.LSTM(8, 12, batch_first=True)
            self.out = torch.nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states, _ = self.cell(x)
            return self.out(states[:, -1])

    return Recurrent().eval(), (torch.randn(1, 5, 8),)


def _several() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Operators with several outputs."""
    import torch

    class Several(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            left, right = x.split([3, 5], 1)
            values, places = right.topk(2)
            largest, where = left.max(1)
            return values, places, largest, where, left > 0

    return Several().eval(), (torch.randn(4, 8),)


def _counter() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Buffers that change, and do not begin at zero."""
    import torch

    class Counter(torch.nn.Module):
        calls: torch.Tensor
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(4, 4)
            self.register_buffer("calls", torch.full((1,), 41.0))
            self.register_buffer("seen", torch.arange(12.0).reshape(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1.0)
            self.seen[1].copy_(x[0])
            return self.out(x) * self.calls + self.seen.sum(0)

    return Counter().eval(), (torch.randn(2, 4),)


def _any_batch() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Of any batch; exported with two, run with three."""
    import torch

    class AnyBatch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).relu()
            joined = torch.cat([hidden, x], 1)
            return joined.cumsum(0).transpose(0, 1)

    return AnyBatch().eval(), (torch.randn(3, 8),)


def _two() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch

    class Decode(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2.0
            return doubled.sigmoid()

    return Decode().eval(), (torch.randn(2, 4),)


def _lines() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Of three dims, for which each Linear ends in a view that is not executed."""
    import torch

    class Lines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            self.b = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.a(x)
            positive = torch.relu(turned)
            again = self.b(positive)
            return torch.sigmoid(again)

    return Lines().eval(), (torch.randn(1, 3, 8),)


def _looked_up() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Places of elements that are places in a table."""
    import torch

    class LookedUp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            best = torch.relu(x).argmax(-1)
            return torch.sigmoid(self.table(best))

    return LookedUp().eval(), (torch.tensor([[0.5, -1.0, 2.0, 2.0], [3.0, 1.0, -2.0, 0.0], [0.1, 0.4, 0.3, 0.2]]),)


def _rounded() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A stretch in bfloat16, of which no value is recorded."""
    import torch

    class Rounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2.0
            short = doubled.to(torch.bfloat16)
            long = torch.relu(short).to(torch.float32)
            return long.sigmoid()

    return Rounded().eval(), (torch.randn(2, 8),)


def _short() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Of bfloat16 throughout."""
    import torch

    class Short(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + x

    return Short().eval(), (torch.randn(2, 8).to(torch.bfloat16),)


def _halves() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Views of what an operator in place gives: the export computes each again where it is used, as part of its user."""
    import torch

    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 8, 1)
            self.turn = torch.nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.stem(x).relu_().chunk(2, 1)
            return torch.cat([first, self.turn(second).relu_()], 1)

    return Halves().eval(), (torch.randn(1, 3, 8, 8),)


@dataclass(frozen=True)
class _Recipe:
    """A network and the options with which its pass is recorded."""

    network: Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]
    """Returns a network and its inputs."""
    recipe: str = "xnnpack_fp32"
    like: str = ""
    """The pass whose files this one has, but for what follows."""
    wrong: str = ""
    """A parameter of which the program that runs has other values than the ETRecord and the .pt2s: what a wrong kernel looks
    like from outside."""
    nan: bool = False
    """Whether one element of the first input is NaN."""
    method: str = "forward"
    other: str = ""
    """A second method, which is another network."""


_INT8 = "xnnpack_pt2e_int8_static_per_channel"
_RECIPES = {
    "cnn": _Recipe(_cnn),
    "cnn_wrong": _Recipe(_cnn, like="cnn", wrong="middle.weight"),
    "cnn_nan": _Recipe(_cnn, like="cnn", nan=True),
    "cnn_int8": _Recipe(_cnn, _INT8),
    "cnn_int8_wrong": _Recipe(_cnn, _INT8, like="cnn_int8", wrong="_frozen_param2"),
    "mixed": _Recipe(_mixed),
    "attention_int8": _Recipe(_attention, "xnnpack_pt2e_int8_dynamic_per_channel"),
    "lstm": _Recipe(_lstm),
    "several": _Recipe(_several),
    "counter": _Recipe(_counter, "portable"),
    "any_batch": _Recipe(_any_batch),
    "lines": _Recipe(_lines, "portable"),
    "lines_wrong": _Recipe(_lines, "portable", like="lines", wrong="a.weight"),
    "looked_up": _Recipe(_looked_up, "portable"),
    "rounded": _Recipe(_rounded, "portable"),
    "short": _Recipe(_short, "portable"),
    "halves": _Recipe(_halves),
    "methods": _Recipe(_two, method="decode", other="encode"),
}


def _export(network: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    import torch

    if type(network).__name__ != "AnyBatch":
        return torch.export.export(network, inputs)
    batch = torch.export.Dim("batch", min=1, max=8)
    return torch.export.export(network, (inputs[0][:2],), dynamic_shapes=({0: batch},))


def _compile(
    folder: Path, models: Mapping[str, Path], recipe: str, method: str, calibration: Sequence[Path]
) -> tuple[Path, Path | None]:
    """The folder that model.pte and model.etrecord are in, and what was quantized."""
    from etfarm.server.compile.lower import tasks
    from etfarm.server.compile.request import LowerRequest, QuantizeRequest
    from etfarm.wire import recipes

    chosen = recipes.parse(recipe).per_operator()
    lowered, quantized = dict(models), None
    if "pt2e" in recipe:
        folder.joinpath("q").mkdir(parents=True)
        tasks.quantize_model(QuantizeRequest(models, "network", chosen.json, {method: calibration}), folder / "q", _ignore)
        lowered[method] = quantized = folder / "q" / f"{method}.pt2"
    folder.joinpath("p").mkdir(parents=True)
    request = LowerRequest(lowered, models, "network", chosen.json, quantized is not None)
    tasks.lower_model(request, folder / "p", _ignore)
    return folder / "p", quantized


def _ignore(event: bytes) -> None:
    """Nobody waits for progress here."""


def _make(run: RecordedRun, temporary: Path, created: _Recipe) -> None:
    import torch

    from etfarm.server.reports.numerics import reference
    from etfarm.wire import tensors

    run.folder.mkdir()
    torch.manual_seed(21)
    network, inputs = created.network()
    models = {created.method: run.model}
    _save(_export(network, inputs), run.model)
    if created.other:
        models[created.other] = temporary / "other"
        _save(_export(torch.nn.Tanh(), inputs), models[created.other])
    calibration = []
    for at in range(7):
        calibration.append(temporary / f"{at}.ett")
        leaves = [torch.randn_like(leaf) if leaf.is_floating_point() else leaf for leaf in inputs]
        calibration[-1].write_bytes(tensors.encode(reference.from_torch("", leaf) for leaf in leaves))
    compiled, quantized = _compile(temporary, models, created.recipe, created.method, calibration)
    shutil.copy(compiled / "model.etrecord", run.etrecord)
    shutil.copy(compiled / "model.pte", run.pte)
    if quantized is not None:
        shutil.copy(quantized, run.folder / "quantized")
    run.inputs.write_bytes(tensors.encode(reference.from_torch(str(at), leaf) for at, leaf in enumerate(inputs)))


def _make_other(run: RecordedRun, temporary: Path, created: _Recipe) -> None:
    from etfarm.server.reports.numerics import reference
    from etfarm.wire import tensors

    shutil.copytree(run.folder.parent / created.like, run.folder)
    if created.wrong:
        lowered = reference.load(run.quantized or run.model)
        _spoil(lowered.state_dict[created.wrong])
        _save(lowered, temporary / "wrong")
        recipe = created.recipe if created.recipe == "portable" else "xnnpack_fp32"  # what is quantized is so already
        compiled, _ = _compile(temporary, {created.method: temporary / "wrong"}, recipe, created.method, ())
        shutil.copy(compiled / "model.pte", run.pte)
    if created.nan:
        inputs = [reference.to_torch(value) for value in tensors.decode(run.inputs.read_bytes())]
        inputs[0].view(-1)[5] = float("nan")
        run.inputs.write_bytes(tensors.encode(reference.from_torch(str(at), leaf) for at, leaf in enumerate(inputs)))


def _save(program: Any, path: Path) -> None:
    import torch

    torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


def _spoil(weights: torch.Tensor) -> None:
    """Changes the weights of a quarter of the channels."""
    quarter = weights.view(-1)[: weights.numel() // 4]
    quarter.copy_(quarter.flip(0) if weights.dtype.itemsize == 1 else -quarter)


async def _run(bundle: Bundle, run: RecordedRun) -> None:
    from etfarm.device_agents.runners.native import NativeRunner
    from etfarm.wire import tensors

    async with NativeRunner.start(bundle.command(), run.folder) as runner:
        await runner.load(run.pte)
        await runner.load_method(run.method, trace=True, debug=True)
        await runner.set_inputs(tensors.decode(run.inputs.read_bytes()))
        await runner.debug(run.etdump, run.debug)
        run.outputs.write_bytes(tensors.encode(await runner.outputs()))


def _main(folder: Path) -> None:
    import torch

    from etfarm.device_agents.runners.bundle import unpack
    from etfarm.server.compile import prewarm
    from tests.support.runner import runner_archive

    prewarm.load_toolchain()
    with tempfile.TemporaryDirectory() as unpacked, torch.no_grad():
        bundle = unpack(runner_archive(), Path(unpacked) / "runner")
        for name, created in _RECIPES.items():
            run = RecordedRun(folder / name, created.method)
            shutil.rmtree(run.folder, ignore_errors=True)
            with tempfile.TemporaryDirectory() as temporary:
                (_make_other if created.like else _make)(run, Path(temporary), created)
            asyncio.run(_run(bundle, run))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
