"""The health programs: two small layers whose weights, inputs and outputs are whole numbers.

All sums are whole numbers below 2^24, which float32 represents exactly. The outputs are therefore the same bytes on every
processor, in whatever order a kernel adds and with or without fused multiplications. Any other byte is an error of the device.

`server/generate_health_programs.py` lowers them. One runs on XNNPACK, as most users' programs do; the other needs portable
kernels only, for runners without XNNPACK.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etfarm.server.access.scope import FARM_HOLDER
from etfarm.server.artifacts.store import Store
from etfarm.server.devices.runners import Runner
from etfarm.v1 import common_pb2, compile_pb2
from etfarm.wire import digest, tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDER: Final = Path(__file__).parent / "programs"
METHOD: Final = "forward"
ROWS: Final = 1024
THREADS: Final = 1
"""Number of threads: the time of several that wake each other for some microseconds of work scatters too much."""
FEATURES: Final = 32

_XNNPACK: Final = "XnnpackBackend"


@dataclass(frozen=True)
class HealthProgram:
    """One of the programs, and what a runner needs for it."""

    name: str
    backends: frozenset[str]
    operators: frozenset[str]

    @property
    def path(self) -> Path:
        """The program's file."""
        return FOLDER / f"{self.name}.pte"

    def suits(self, runner: Runner) -> bool:
        """Return whether a runner has what the program needs, as far as that is known."""
        return self.backends <= {*runner.backends} and (not runner.operators or self.operators <= {*runner.operators})


PROGRAMS: Final = (
    HealthProgram("xnnpack", frozenset({_XNNPACK}), frozenset()),
    HealthProgram(
        "portable",
        frozenset(),
        frozenset({"aten::mm.out", "aten::permute_copy.out", "aten::relu.out"}),
    ),
)
"""The programs, the preferred one first."""


def choose(runner: Runner) -> HealthProgram | None:
    """Return the program for a runner; None if the runner can run none of them."""
    return next((program for program in PROGRAMS if program.suits(runner)), None)


def weights(layer: int) -> NDArray[np.float32]:
    """Return the weights of layer 0 or 1, [FEATURES out, FEATURES in]: whole numbers from -2 to 2."""
    import numpy as np

    row, column = np.indices((FEATURES, FEATURES))
    return ((row * (7 + layer) + column * 5 + row * column * (3 - layer)) % 5 - 2).astype(np.float32)


def inputs() -> NDArray[np.float32]:
    """Return the inputs, [ROWS, FEATURES]: whole numbers from -3 to 3."""
    import numpy as np

    row, column = np.indices((ROWS, FEATURES))
    return ((row * 11 + column * 13 + row * column) % 7 - 3).astype(np.float32)


@cache
def inputs_file() -> bytes:
    """Return the tensor file of the inputs."""
    return tensors.encode([tensors.Tensor("x", "float32", (ROWS, FEATURES), inputs().astype("<f4").tobytes())])


@cache
def expected_bytes() -> bytes:
    """Return the payload of the only output: float32 [ROWS, FEATURES], little-endian."""
    import numpy as np

    # In whole numbers, so that the host's own arithmetic is no part of the answer.
    hidden = inputs().astype(np.int64) @ weights(0).astype(np.int64).T
    outputs = np.maximum(hidden, 0) @ weights(1).astype(np.int64).T
    assert max(np.abs(hidden).max(), np.abs(outputs).max()) < 1 << 24
    return bytes(outputs.astype("<f4").tobytes())


def describe_difference(outputs: Sequence[tensors.Value]) -> str | None:
    """Return how outputs differ from the known ones, as a sentence without its full stop; None if each byte is equal."""
    if len(outputs) != 1 or not isinstance(outputs[0], tensors.Tensor):
        return f"The health program returned {len(outputs)} values instead of one tensor"
    output = outputs[0]
    if (output.dtype, output.shape) != ("float32", (ROWS, FEATURES)) or not output.is_contiguous:
        return f"The health program returned {output.dtype} {list(output.shape)} instead of float32 [{ROWS}, {FEATURES}]"
    expected = expected_bytes()
    if output.data == expected:
        return None
    import numpy as np

    differing = np.frombuffer(output.data, "<u4") != np.frombuffer(expected, "<u4")
    return f"{int(differing.sum()):,} of {differing.size:,} elements of the health program's output are wrong"


@dataclass(frozen=True)
class StoredProgram:
    """A health program and its inputs, as agents fetch them."""

    program: compile_pb2.Program
    inputs: common_pb2.Artifact

    @property
    def artifacts(self) -> tuple[common_pb2.Artifact, ...]:
        """Everything that an agent reads."""
        return self.program.pte, self.inputs


async def store(program: HealthProgram, artifacts: Store) -> StoredProgram:
    """Put a program and its inputs into the artifact store, where they stay, and return them.

    Raises:
        DiskFull: the store cannot write.
    """
    pte = await _put(program.path.read_bytes(), artifacts)
    stored = compile_pb2.Program(pte=pte)
    stored.digest = digest.of_program(pte.digest, {})
    return StoredProgram(stored, await _put(inputs_file(), artifacts))


async def _put(data: bytes, artifacts: Store) -> common_pb2.Artifact:
    known = common_pb2.Artifact(digest=digest.of_bytes(data), size_bytes=len(data))
    if await artifacts.has(known.digest):
        # It may be the upload of a user, which a collection would delete.
        await artifacts.hold(FARM_HOLDER, [known.digest], "farm")
        return known
    return await artifacts.put(data, "farm", holder=FARM_HOLDER)
