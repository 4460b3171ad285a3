"""What the farm adds to ExecuTorch's own lowering, in time and memory, and what it saves over scripts.

python -m tests.bench.lowering [--rounds 5] [--only warm memory hit recipes]

Everything is a ratio of things that were measured in one run, in turns. A plain call is ExportSession from a loaded .pt2 in a
process that was warmed as the server's forkserver is; a script is a fresh process that takes the module all the way.
The file runs itself for both, by --plain, --script and --job.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

ADDED: Final = 1.10
ADDED_S: Final = 0.2
"""A compilation through the farm takes at most ADDED plain calls and ADDED_S."""
OF_SCRIPTS: Final = 0.4
HIT_MS: Final = 50.0
OF_MEMORY: Final = 1.10

THREADS: Final = 2
"""The server's default."""
RECIPE: Final = "xnnpack_fp32"
RECIPES: Final = (
    RECIPE, "xnnpack_pt2e_int8_dynamic_per_channel", "xnnpack_pt2e_int8_static_per_channel",
    "xnnpack_pt2e_int8_static_per_tensor", "xnnpack_torchao_int8da_int4w_per_channel", "xnnpack_torchao_int8da_int4w_per_tensor",
)  # fmt: skip
PARTS: Final = ("warm", "memory", "hit", "recipes")


def resnet8(seed: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the demo's module, untrained, and its example inputs. All six recipes take it: its linear has 64 inputs."""
    import torch

    from etfarm.client.export.demo_models.resnet8 import INPUT_SHAPE, ResNet8

    torch.manual_seed(seed)
    return ResNet8().eval(), (torch.randn(INPUT_SHAPE),)


def transformer(seed: int) -> tuple[Any, tuple[Any, ...]]:
    """Return an encoder of 12 layers, 64 wide with 4 heads, for 32 positions, and its example inputs."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
            self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).reshape(1, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(attended.transpose(1, 2).reshape(1, 32, 64))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Layer() for _ in range(12))).eval(), (torch.randn(1, 32, 64),)


MODELS: Final[dict[str, Callable[[int], tuple[Any, tuple[Any, ...]]]]] = {"resnet8": resnet8, "transformer": transformer}


def plain(path: Path) -> None:
    """A warm process that lowers `path` once for each line of stdin. Answers seconds and its peak in bytes as JSON."""
    from etfarm.server.compile.prewarm import PRELOAD
    from etfarm.server.workers.child import forkserver

    assert not forkserver.warm(PRELOAD)
    gc.collect()
    gc.freeze()
    import torch
    from executorch.backends.xnnpack.recipes import XNNPackRecipeType
    from executorch.export import ExportRecipe, ExportSession, StageType

    torch.set_num_threads(THREADS)
    stages = [StageType.TO_EDGE_TRANSFORM_AND_LOWER, StageType.TO_EXECUTORCH]
    print(json.dumps({"warm": True}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        program = torch.export.load(path)
        loaded = time.perf_counter()
        recipe = ExportRecipe.get_recipe(XNNPackRecipeType.FP32)
        recipe.pipeline_stages = list(stages)
        session = ExportSession({"forward": program}, export_recipe=recipe, name="plain", generate_etrecord=True)
        session.export()
        ended = time.perf_counter()
        # Not ru_maxrss: that one remembers the process that started this one.
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        reported = {"call_s": ended - loaded, "load_s": loaded - began, "peak_rss_bytes": int(peak.split()[1]) << 10}
        print(json.dumps(reported), flush=True)
        del program, recipe, session


@contextmanager
def plain_process(path: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """One more plain call of `path` for each call of what this gives."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.lowering", "--plain", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    asked, text = process.stdin, process.stdout

    def answer() -> dict[str, float]:
        for line in text:
            with suppress(ValueError):  # ExecuTorch prints there too
                if isinstance(reported := json.loads(line), dict):
                    return reported
        raise AssertionError(f"the plain process of {path} ended")

    def call() -> dict[str, float]:
        asked.write("\n")
        asked.flush()
        return answer()

    try:
        answer()
        yield call
    finally:
        asked.close()
        process.wait()
        text.close()


def script(name: str, seed: int, folder: Path) -> None:
    """What a user's script does for one recipe: from the module to its .pte and ETRecord, all by ExportSession itself."""
    import executorch.kernels.quantized  # noqa: F401 - dynamic int8 outside of the delegate
    from executorch.backends.xnnpack.recipes import XNNPackRecipeType
    from executorch.export import ExportRecipe, ExportSession

    module, inputs = resnet8(seed)
    recipe = ExportRecipe.get_recipe(next(kind for kind in XNNPackRecipeType if kind.value == name))
    session = ExportSession(module, [inputs], recipe, name="resnet8", generate_etrecord=True)
    session.export()
    session.save_to_pte(str(folder / name))
    session.get_etrecord().save(str(folder / f"{name}.etrecord"))


def job(address: str, seed: int) -> None:
    """A user's script that asks the farm for all six, and waits."""
    from etfarm.client import Farm

    module, inputs = resnet8(seed)
    with Farm(address) as farm:
        assert len(farm.compile(module, RECIPES, example_inputs=inputs).result().reports) == len(RECIPES)


def seconds_of(*arguments: str | Path) -> float:
    """Wall seconds of a fresh process of this file."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.lowering", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    took = time.perf_counter() - began
    assert done.returncode == 0, done.stderr[-3000:]
    return took


def warm(farm: Any, path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a compilation through the farm, and of a plain call, in turns; each once before, which does not count."""
    result: dict[str, list[float]] = {"farm_s": [], "plain_s": [], "plain_load_s": []}
    with plain_process(path) as call:
        for index in range(rounds + 1):
            began = time.perf_counter()
            report = farm.compile(path, RECIPE, no_cache=True).result().report
            farm_s = time.perf_counter() - began
            assert not report.compile.cached
            reported = call()
            if index:
                result["farm_s"].append(farm_s)
                result["plain_s"].append(reported["call_s"])
                result["plain_load_s"].append(reported["load_s"])
    return result


def hits(farm: Any, path: Path, rounds: int) -> list[float]:
    """Milliseconds of the job's compile stage where the cache has the answer, by the server's clock."""
    farm.compile(path, RECIPE).result()
    result: list[float] = []
    for _ in range(max(rounds, 7)):
        report = farm.compile(path, RECIPE).result().report
        assert report.compile.cached
        result.extend(one["duration_ms"] for one in report.json()["timeline"] if one["phase"] == "COMPILE")
    return result


async def memory(path: Path, folder: Path, rounds: int) -> list[int]:
    """Peak bytes of lowering children as the kernel counts them, without a server around the forkserver."""
    from etfarm.server.compile.request import LowerRequest
    from etfarm.wire import recipes
    from tests.support.compiling import warm_workers

    request = LowerRequest({"forward": path}, {"forward": path}, path.stem, recipes.parse(RECIPE).json, threads=THREADS)
    peaks = []
    async with warm_workers(folder) as workers:
        for _ in range(rounds):
            finished = await workers.run("etfarm.server.compile.lower.tasks:lower_model", request, deadline_s=600)
            async with finished:
                peaks.append(finished.peak_rss_bytes)
    return peaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--script-rounds", type=int, default=2, help="of six scripts each, which take minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    for hidden, count in (("--plain", 1), ("--script", 3), ("--job", 2)):
        parser.add_argument(hidden, nargs=count, help=argparse.SUPPRESS)
    text = parser.parse_args()
    if text.plain:
        plain(Path(text.plain[0]))
    elif text.script:
        script(text.script[0], int(text.script[1]), Path(text.script[2]))
    elif text.job:
        job(text.job[0], int(text.job[1]))
    else:
        return measured(text.rounds, text.script_rounds, text.only)
    return 0


def measured(rounds: int, script_rounds: int, parts: list[str]) -> int:
    """Measure and print; return the exit code."""
    import torch

    from tests.support.farm import FarmProcess

    results: dict[str, dict[str, Any]] = {}
    raw: dict[str, Any] = {}

    def hold(name: str, value: float, limit: float) -> None:
        results[name] = {"measured": value, "limit": limit, "ok": value <= limit}
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)  # all of it takes minutes

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {model: folder / f"{model}.pt2" for model in MODELS}
        for model, make in MODELS.items():
            module, inputs = make(0)
            torch.export.save(torch.export.export(module, inputs), paths[model])
        running = FarmProcess(folder, bundle=False)
        try:
            with running.start(agents=0).client() as farm:
                for model, path in paths.items() if "warm" in parts else ():
                    result = {key: statistics.median(values) for key, values in warm(farm, path, rounds).items()}
                    raw[f"warm_{model}"] = {**result, "ratio": result["farm_s"] / result["plain_s"]}
                    hold(f"warm_{model}_s", result["farm_s"], ADDED * result["plain_s"] + ADDED_S)
                if "hit" in parts:
                    for model, path in paths.items():
                        hold(f"cache_hit_{model}_ms", statistics.median(hits(farm, path, rounds)), HIT_MS)
                if "recipes" in parts:
                    farm.compile(paths["resnet8"], RECIPE).result()  # the forkserver is warm
                    jobs, scripts = [], []
                    for seed in range(1, script_rounds + 1):  # each with weights of its own, so that no cache has it
                        jobs.append(seconds_of("--job", running.address, str(seed)))
                        scripts.append(sum(seconds_of("--script", recipe, str(seed), folder) for recipe in RECIPES))
                    raw["six_recipes"] = {"one_job_s": statistics.median(jobs), "six_scripts_s": statistics.median(scripts)}
                    ratios = [one / six for one, six in zip(jobs, scripts, strict=True)]
                    hold("six_recipes_over_scripts", statistics.median(ratios), OF_SCRIPTS)
        finally:
            running.stop()
        for model, path in paths.items() if "memory" in parts else ():
            peaks = asyncio.run(memory(path, folder / f"workers-{model}", rounds))
            with plain_process(path) as call:
                peak = call()["peak_rss_bytes"]  # of its first call: later ones keep what earlier ones allocated
            raw[f"memory_{model}"] = {"child_bytes": statistics.median(peaks), "plain_bytes": peak}
            hold(f"memory_{model}", statistics.median(peaks) / peak, OF_MEMORY)
    print(json.dumps({"bench": "lowering", "results": results, "medians": raw}, indent=1))
    return 0 if all(one["ok"] for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
