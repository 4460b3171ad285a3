"""A stand-in for the daemon: starts a pool on a Ray cluster, runs `linger`, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.limits import Limits

TASKS = "tests.support.worker_tasks"


async def main() -> None:
    pool = ClusterPool(address=sys.argv[1], preload=[TASKS], limits=Limits(), folder=Path(sys.argv[2]), report=lambda node: None)
    pool.start()
    await pool.run(f"{TASKS}:linger", None, deadline_s=300, on_event=lambda _: print("lingers", flush=True))


if __name__ == "__main__":
    asyncio.run(main())
