"""Real traces for tests: compiled, run and traced by ExecuTorch itself in a child, kept in a cache outside of the checkout.

The networks are defined here, so that lines of this file are the user's lines in what is found.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.wire import digest
from tests.support.programs import cache_folder

if TYPE_CHECKING:
    import torch

ITERATIONS = 12
CALIBRATION = 8


@dataclass(frozen=True)
class Traced:
    """One method's run with everything that an analysis takes."""

    folder: Path
    method: str

    @property
    def source(self) -> str:
        """The path of this file in the checkout that made the run, which names it as the model's."""
        return (self.folder.parent / "source").read_text()

    @property
    def pte(self) -> Path:
        return self.folder / "program.pte"

    @property
    def etrecord(self) -> Path:
        return self.folder / "program.etrecord"

    @property
    def etdump(self) -> Path:
        """Of ITERATIONS executions, the first of them cold."""
        return self.folder / "trace.etdp"

    @property
    def traced_ns(self) -> tuple[int, ...]:
        """By a clock of the caller's around each execution."""
        return tuple(json.loads((self.folder / "traced_ns.json").read_text()))

    @property
    def model(self) -> Path:
        """Before quantization."""
        return self.folder / "model.pt2"

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
def traced(name: str) -> Traced:
    """Return the run of that name, see `_MAKERS`. The first call makes all of them, in one process that loads torch once."""
    key = digest.of_value([digest.of_file(Path(__file__)), version("torch"), version("executorch")])[:16]
    folder = cache_folder() / f"traces-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "tests.support.traces", str(folder)]
            # A process that is to be forked must not have threads.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            maker = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
            assert maker.returncode == 0, maker.stderr[-4000:]
            (folder / "done").touch()
    return Traced(folder / name, json.loads((folder / name / "method.json").read_text()))


def _network() -> torch.nn.Module:
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            convolved = self.conv(x)
            return torch.relu(convolved)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.fc = torch.nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.block(x)
            pooled = y.mean((2, 3))
            scores = self.fc(pooled)
            return scores, scores.argmax(1)

    torch.manual_seed(11)
    return Network().eval()


def _residual() -> torch.nn.Module:
    """One line for each kind of node that XNNPACK fuses, drops or splits."""
    import torch
    import torch.nn.functional as F

    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.branch = torch.nn.Conv2d(8, 8, 2)
            self.mix = torch.nn.Conv2d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            stemmed = self.stem(x)
            normal = self.norm(stemmed)
            active = F.relu(normal)
            padded = F.pad(active, (0, 1, 0, 1))
            branched = self.branch(padded)
            joined = branched + active
            clipped = F.relu(joined)
            small = F.max_pool2d(clipped, 4)
            positive = F.relu6(small)
            doubled = torch.cat([positive, positive * positive], 1)
            smooth = F.gelu(doubled)
            mixed = self.mix(smooth)
            tokens = mixed.flatten(2)
            turned = tokens.transpose(1, 2)
            similar = torch.bmm(tokens, turned)
            return similar.softmax(-1)

    torch.manual_seed(13)
    return Residual().eval()


def _gated() -> torch.nn.Module:
    import torch

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(32, 32)
            self.down = torch.nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            gate = hidden.tanh()
            return self.down(gate)

    torch.manual_seed(14)
    return Gated().eval()


def _images(count: int) -> list[tuple[torch.Tensor]]:
    import torch

    torch.manual_seed(12)
    return [(torch.rand(1, 3, 32, 32),) for _ in range(count)]


def _lower(folder: Path, programs: Any, *, xnnpack: bool) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()] if xnnpack else [], generate_etrecord=True)
    _save(folder, edge.to_executorch())


def _save(folder: Path, program: Any) -> None:
    (folder / "program.pte").write_bytes(program.buffer)
    program.get_etrecord().save(str(folder / "program.etrecord"))


def _single(folder: Path, network: torch.nn.Module | None = None, *, xnnpack: bool) -> str:
    import torch

    exported = torch.export.export(network or _network(), _images(1)[0])
    torch.export.save(exported, folder / "model.pt2")
    _lower(folder, exported, xnnpack=xnnpack)
    return "forward"


def _quantized(folder: Path, network: torch.nn.Module | None = None, kind: str = "PT2E_INT8_STATIC_PER_CHANNEL") -> str:
    import torch
    from executorch.backends.xnnpack.recipes.xnnpack_recipe_types import XNNPackRecipeType
    from executorch.export import ExportRecipe, ExportSession

    network, inputs = network or _network(), _images(CALIBRATION)
    torch.export.save(torch.export.export(network, inputs[0]), folder / "model.pt2")
    recipe = ExportRecipe.get_recipe(XNNPackRecipeType[kind])
    session = ExportSession(network, example_inputs=inputs, export_recipe=recipe, generate_etrecord=True)
    session.export()
    _save(folder, session.get_executorch_program_manager())
    return "forward"


def _methods(folder: Path) -> str:
    """Two methods, of which the second runs."""
    import torch

    class Encode(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    class Decode(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2.0
            return doubled.sigmoid()

    decode = torch.export.export(Decode(), _images(1)[0])
    torch.export.save(decode, folder / "model.pt2")
    _lower(folder, {"encode": torch.export.export(Encode(), _images(1)[0]), "decode": decode}, xnnpack=False)
    return "decode"


def _renamed(folder: Path) -> str:
    """One method that is not called forward."""
    import torch

    exported = torch.export.export(_network(), _images(1)[0])
    torch.export.save(exported, folder / "model.pt2")
    _lower(folder, {"classify": exported}, xnnpack=True)
    return "classify"


_MAKERS: dict[str, Callable[[Path], str]] = {
    "xnnpack": lambda folder: _single(folder, xnnpack=True),
    "portable": lambda folder: _single(folder, xnnpack=False),
    "int8": _quantized,
    "methods": _methods,
    "renamed": _renamed,
    "residual": lambda folder: _single(folder, _residual(), xnnpack=True),
    "residual_int8": lambda folder: _quantized(folder, _residual()),
    "gated_dynamic": lambda folder: _quantized(folder, _gated(), "PT2E_INT8_DYNAMIC_PER_CHANNEL"),
    "gated_int4": lambda folder: _quantized(folder, _gated(), "TORCHAO_INT8_DYNAMIC_ACT_INT4_WEIGHT_PER_CHANNEL"),
}


def _run(folder: Path, method: str) -> None:
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    from etfarm.server.reports.numerics import reference
    from etfarm.wire import tensors

    (inputs,) = _images(1)
    module = _load_for_executorch(str(folder / "program.pte"), enable_etdump=True)
    traced_ns = []
    for _ in range(ITERATIONS):
        began_ns = time.perf_counter_ns()
        outputs = module.run_method(method, inputs)
        traced_ns.append(time.perf_counter_ns() - began_ns)
    (folder / "traced_ns.json").write_text(json.dumps(traced_ns))
    module.write_etdump_result_to_file(str(folder / "trace.etdp"))
    for file, leaves in (("inputs.ett", inputs), ("outputs.ett", outputs)):
        (folder / file).write_bytes(tensors.encode(reference.from_torch(str(at), leaf) for at, leaf in enumerate(leaves)))
    (folder / "method.json").write_text(json.dumps(method))


def _make_all(folder: Path) -> None:
    """Make each run in a fork of its own, so that none depends on what was compiled before it; one on each core at a time."""
    from etfarm.server.compile import prewarm

    (folder / "source").write_text(__file__)
    prewarm.warm()
    running: dict[int, str] = {}
    for name, make in _MAKERS.items():
        if len(running) == len(os.sched_getaffinity(0)):
            _wait(running)
        running[_fork(folder / name, make)] = name
    while running:
        _wait(running)


def _wait(running: dict[int, str]) -> None:
    """Wait for the end of one of the forks."""
    child, status = os.wait()
    name = running.pop(child)
    if status != 0:
        sys.exit(f"{name}: status {status}")


def _fork(target: Path, make: Callable[[Path], str]) -> int:
    """Make a run in a fork, and return its process id."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if (child := os.fork()) != 0:
        return child
    status = 1
    try:
        _run(target, make(target))
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


if __name__ == "__main__":
    _make_all(Path(sys.argv[1]))
