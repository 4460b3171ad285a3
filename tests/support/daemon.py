"""A stand-in for the daemon: starts workers, prints the forkserver's pid, runs `linger`, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers


async def main() -> None:
    workers = Workers(preload=sys.argv[2:], limits=Limits(), folder=Path(sys.argv[1]), concurrency=1)
    workers.start()
    assert workers.forkserver_pid is not None
    print(json.dumps({"pids": [workers.forkserver_pid]}), flush=True)
    await workers.run("tests.support.worker_tasks:linger", None, deadline_s=60, on_event=lambda _: print("lingers", flush=True))


if __name__ == "__main__":
    asyncio.run(main())
