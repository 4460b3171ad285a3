"""A farm's worth of targets around real workers, and what a hostile child could do to them.

Run as `python -m tests.support.attacked FOLDER`; prints the outcomes of all attacks by name as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from tests.support.attack_tasks import Request

TASKS = "tests.support.attack_tasks"


async def attack(folder: Path) -> dict[str, object]:
    """Return the outcome of every attack by name, and the jail's report as `measures`; `folder` is new."""
    data, code, home = folder / "data", folder / "code", folder / "home"
    for path in (data / "artifacts" / "ab", code, home / ".ssh"):
        path.mkdir(parents=True)
    secrets = {
        "tokens": folder / "tokens", "tokens_in_code": code / "tokens", "artifact": data / "artifacts" / "ab" / "other",
        "key": home / ".ssh" / "id_ed25519",
    }  # fmt: skip
    for path in secrets.values():
        path.write_text("s3cret")
        path.chmod(0o644)
    own = data / "artifacts" / "ab" / "own"
    own.write_text("mine")
    own.chmod(0o666)
    victim = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - a moment
    service, abstract = folder / "s", f"etfarm-attack-{os.getpid()}"
    workers = Workers(
        preload=[TASKS], limits=Limits(memory_bytes=512 << 20, cpu_s=60, threads=1, processes=64), folder=data / "children",
        concurrency=2, options=JailOptions(hidden=(data, secrets["tokens"], secrets["tokens_in_code"]), readable=(code,)),
    )  # fmt: skip
    workers.start()
    sibling: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as unnamed:
        listener.bind(os.fspath(service))
        unnamed.bind(f"\0{abstract}")
        for each in (listener, unnamed):
            each.listen()
        waiting = asyncio.create_task(
            workers.run(
                f"{TASKS}:wait_for_ever", None, deadline_s=300, on_event=lambda e: sibling.set_result(json.loads(e)["folder"])
            )
        )
        try:
            values = {name: str(path) for name, path in secrets.items()} | {
                "data": str(data), "home": str(home), "input": str(own), "sibling": await sibling, "socket": str(service),
                "abstract": abstract, "victim": victim.pid, "is_root": os.geteuid() == 0,
            }  # fmt: skip
            request = Request(json.dumps(values), own)
            async with await workers.run(f"{TASKS}:attack", request, deadline_s=120) as finished:
                outcomes: dict[str, object] = json.loads(finished.result)
            report: JailReport = await workers.describe_jail()
            outcomes["measures"] = {measure.name: measure.active for measure in report.measures}
            outcomes["victim lives"] = victim.poll() is None
            outcomes["daemon lives"] = True
            return outcomes
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await workers.stop()
            victim.kill()
            victim.wait()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(Path(sys.argv[1])))))
