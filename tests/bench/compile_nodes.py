"""The compile throughput of Ray nodes against the local pool on the same cores.

python -m tests.bench.compile_nodes [--models 8] [--rounds 2] [--json FILE]

Each node is pinned to one core; the head and the connector share the cores with them, as the daemon does with the local pool.
Models differ in their weights, so that nothing is cached. The pools take turns, and each is warm before it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from etfarm.server.compile.prewarm import PRELOAD
from etfarm.server.compile.request import LowerRequest
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire import recipes
from tests.support.ray_cluster import running_cluster

TASK: Final = "etfarm.server.compile.lower.tasks:lower_model"
LIMITS: Final = Limits(threads=1)
READY_S: Final = 300.0


def write_models(folder: Path, count: int) -> list[Path]:
    """Write exported networks that differ in their weights."""
    import torch

    from etfarm.client.export.demo_models.resnet8 import INPUT_SHAPE, ResNet8

    paths = []
    for number in range(count):
        torch.manual_seed(number)
        paths.append(folder / f"{number}.pt2")
        torch.export.save(torch.export.export(ResNet8().eval(), (torch.randn(INPUT_SHAPE),)), paths[-1])
    return paths


async def compile_all(pool: ChildPool, models: Sequence[Path]) -> dict[str, Any]:
    """Compile all models at once. Return the time and the rate."""
    recipe = recipes.parse("xnnpack_fp32").json

    async def compile_one(model: Path) -> float:
        request = LowerRequest(models={"forward": model}, originals={"forward": model}, model_name="net", recipe_json=recipe)
        async with await pool.run(TASK, request, deadline_s=600) as finished:
            return finished.cpu_s

    start_s = time.perf_counter()
    cpu_s = await asyncio.gather(*map(compile_one, models))
    took_s = time.perf_counter() - start_s
    return {
        "s": round(took_s, 3),
        "models_per_minute": round(60 * len(models) / took_s, 2),
        "children_cpu_s": round(sum(cpu_s), 2),
    }


@asynccontextmanager
async def local(folder: Path, cores: Sequence[int]) -> AsyncIterator[ChildPool]:
    """A warm local pool whose processes are pinned to the cores, one child for each."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # what is started from here on inherits it
    pool = Workers(preload=PRELOAD, limits=LIMITS, folder=folder, concurrency=len(cores))
    pool.start()
    os.sched_setaffinity(0, own)
    try:
        async with asyncio.timeout(READY_S):
            await pool.ready()
        yield pool
    finally:
        await pool.stop()


@asynccontextmanager
async def nodes(folder: Path, cores: Sequence[int]) -> AsyncIterator[ChildPool]:
    """A warm pool on a Ray cluster with one node for each core."""
    with running_cluster() as cluster:
        await asyncio.to_thread(cluster.start)
        for core in cores:
            await asyncio.to_thread(cluster.add_node, cores=[core])
        os.environ.update(cluster.credentials)
        pool = ClusterPool(address=cluster.address, preload=PRELOAD, limits=LIMITS, folder=folder)
        pool.start()
        try:
            async with asyncio.timeout(READY_S):
                while sum(node.state == "ready" for node in await pool.settled(READY_S)) < len(cores):
                    await pool.changed()
            yield pool
        finally:
            await pool.stop()


async def measure(count: int, rounds: int) -> dict[str, Any]:
    """Return the results of all pools."""
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="etfarm-bench-") as name:
        folder = Path(name)
        models = await asyncio.to_thread(write_models, folder, count)
        for number in range(rounds):
            for kind, create in (("local", local), ("ray", nodes)):
                for cores in ([0], [0, 1]):
                    async with AsyncExitStack() as stack:
                        pool = await stack.enter_async_context(create(folder / f"{kind}{number}", cores))
                        await compile_all(pool, models[: len(cores)])  # first uses of files and code
                        measured = await compile_all(pool, models)
                        results.setdefault(f"{kind}_{len(cores)}_core", []).append(measured)
                        print(f"{kind}, {len(cores)} cores: {measured}", file=sys.stderr, flush=True)
    best = {name: max(each["models_per_minute"] for each in tries) for name, tries in results.items()}
    return {
        "schema": "etfarm.bench.compile_nodes/1",
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "load_1min": os.getloadavg()[0]},
        "models": count,
        "pools": results,
        "best_models_per_minute": best,
        "ray_of_local_1_core": round(best["ray_1_core"] / best["local_1_core"], 3),
        "ray_of_local_2_core": round(best["ray_2_core"] / best["local_2_core"], 3),
        "ray_2_nodes_of_1": round(best["ray_2_core"] / best["ray_1_core"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(asyncio.run(measure(arguments.models, arguments.rounds)), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
