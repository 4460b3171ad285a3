"""How long a person waits for the commands that ask little, and what the daemons weigh.

python -m tests.bench.commands
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.farm import FarmProcess

RUNS = 9


def timed(*arguments: str) -> dict[str, float]:
    """Median CPU and wall seconds of a command over RUNS runs, after one that warms the disk cache."""
    cpu, wall = [], []
    for _ in range(RUNS + 1):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([Path(sys.executable).with_name("etfarm"), *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - started)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"cpu_s": statistics.median(cpu[1:]), "wall_s": statistics.median(wall[1:])}


def rss_bytes(pid: int) -> int:
    """Resident bytes of one process, without its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        running = FarmProcess(Path(name))
        try:
            with running.start().client() as farm:
                farm.compile("demo:ds_cnn").wait()
                report = farm.bench("demo:ds_cnn", min_time_s=0.0).result().report
                assert report.state == "SUCCEEDED"
            assert running.server is not None
            result: dict[str, Any] = {
                "help": timed("--help"),
                "devices_list": timed("devices", "list", "--server", running.address),
                "server_rss_bytes": rss_bytes(running.server.pid),
                "agent_rss_bytes": rss_bytes(running.agents[0].pid),
            }
        finally:
            running.stop()
    limits = {
        "help_cpu_below_0.3_s": result["help"]["cpu_s"] < 0.3,
        "devices_list_wall_below_0.6_s": result["devices_list"]["wall_s"] < 0.6,
        "server_below_120_MB": result["server_rss_bytes"] < 120e6,
        "agent_below_50_MB": result["agent_rss_bytes"] < 50e6,
    }
    print(json.dumps({"bench": "commands", **result, "holds": limits}, indent=1))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
