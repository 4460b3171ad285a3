"""What a data set costs beside its executions: the wall time over the sum of the time in the program, for one and two devices.

python -m tests.bench.dataset
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from etfarm.client import Farm
from etfarm.client.datasets.dataset import Result
from tests.support.farm import FarmProcess

MODELS = {"demo:mobilenet_v1_025": ((1, 3, 96, 96), 400), "demo:resnet8": ((1, 3, 32, 32), 400)}
"""Shape of a sample, and how many there are."""


def main() -> int:
    """Measures; the numbers as JSON."""
    result = {}
    with tempfile.TemporaryDirectory() as name:
        running = FarmProcess(Path(name))
        try:
            with running.start(agents=2).client() as farm:
                for model, (shape, count) in MODELS.items():
                    path = Path(name) / "model.pte"
                    job = farm.compile(model)
                    job.result()
                    job.save_program(path)
                    run(farm, path, shape, 20, 1)
                    result[model] = {f"{devices} devices": run(farm, path, shape, count, devices) for devices in (1, 2)}
        finally:
            running.stop()
    print(json.dumps({"result": result}, indent=1))
    return 0


def run(farm: Farm, path: Path, shape: tuple[int, ...], count: int, devices: int) -> dict[str, float]:
    """One pass; times as the caller sees them, from the first result to the last one."""
    x = np.random.default_rng(0).random(shape, np.float32)
    ends: list[float] = []
    busy: list[int] = []

    def on_result(result: Result) -> None:
        assert result.outputs is not None
        ends.append(time.perf_counter())
        busy.append(result.outputs.run_ns or 0)

    def inputs() -> Iterator[np.ndarray]:
        for _ in range(count):
            yield x

    for _ in farm.run_dataset(path, inputs(), devices=devices, threads=1, on_result=on_result):
        pass
    wall_s, busy_s = ends[-1] - ends[0], sum(busy[1:]) / 1e9
    return {
        "samples_per_s": (count - 1) / wall_s,
        "run_ms": busy_s / (count - 1) * 1e3,
        "overhead_ms": (wall_s * devices - busy_s) / (count - 1) * 1e3,
        "overhead_share": 1 - busy_s / (wall_s * devices),
    }


if __name__ == "__main__":
    sys.exit(main())
