"""How long a board takes from the start of its agent to its first finished run, what that sends to it, and what the agent weighs.

The agent is the real one on Debian's Python for aarch64, and so is its runner; both under qemu's user mode, which is some ten
times slower than a board. The board knows nothing: no id, no bundle, no program. The server has all of it, and is warm.

    python -m tests.bench.enrolment
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from etfarm.client import Farm
from tests.support.emulation import aarch64_archive
from tests.support.farm import FarmProcess
from tests.support.programs import program
from tests.support.qemu_agent import QemuAgent
from tests.support.rootfs import PACKAGES, PYTHON, board_root, guest_rss_bytes, install_agent, on_board

ROUNDS = 5


def first_run(farm: Farm, address: str, folder: Path) -> dict[str, float]:
    """Seconds of one enrolment, from the process' start, and what the agent holds afterwards."""
    name = folder.name
    agent = QemuAgent(address, folder, "--name", name, "--idle-wait", "0", "--cool-down", "0")
    started = time.perf_counter()
    agent.start()
    try:
        agent.expect("connecting to")
        told_s = time.perf_counter() - started
        agent.expect("connected to")
        connected_s = time.perf_counter() - started
        result = farm.bench(program("conv").path, devices=f"name={name}", iterations=10, min_time_s=0.0).result()
        finished_s = time.perf_counter() - started
        assert result.report.state == "SUCCEEDED", result.report.error
        phases = {phase["phase"]: phase["duration_ms"] / 1e3 for phase in result.report.json()["timeline"]}
        received = sum(path.stat().st_size for path in (folder / "data" / "cache" / "blobs").iterdir())
        again = time.perf_counter()
        farm.bench(program("conv").path, devices=f"name={name}", iterations=10, min_time_s=0.0).result()
        return {
            "python_started_s": told_s, "connected_s": connected_s, "first_result_s": finished_s,
            "job_s": finished_s - connected_s, "fetch_and_self_test_s": phases["FETCH"],
            "second_job_s": time.perf_counter() - again, "received_bytes": float(received),
            "agent_rss_bytes": float(guest_rss_bytes(agent.pid)),
        }  # fmt: skip
    finally:
        agent.stop()


def bare_python_s(folder: Path) -> float:
    """Return what qemu takes for the interpreter and the agent's modules alone, which no agent can be faster than."""
    root, site = board_root(), install_agent(folder / "site")  # which makes the folder
    command = on_board(root, folder, str(root / PYTHON), "-c", "import etfarm.device_agents.main")
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, env=environment, check=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def installed_bytes(folder: Path) -> int:
    """Of all that `pip install etfarm[agent]` puts beside Python, with the bytecode that it makes."""
    folders = (board_root() / PACKAGES, install_agent(folder / "site"))
    return sum(path.stat().st_size for each in folders for path in each.rglob("*") if path.is_file())


def main() -> int:
    archive = aarch64_archive()
    with tempfile.TemporaryDirectory(prefix="enrol-") as name:
        folder = Path(name)
        running = FarmProcess(folder)
        try:
            with running.start(agents=0).client() as farm:
                farm.add_bundle(archive)
                # The first job warms the server's workers, and qemu's files in the page cache.
                first_run(farm, running.address, folder / "warm")
                rounds = [first_run(farm, running.address, folder / f"board{index}") for index in range(ROUNDS)]
        finally:
            running.stop()
        result = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        result["first_result_max_s"] = max(each["first_result_s"] for each in rounds)
        result["bare_python_s"] = bare_python_s(folder / "bare")
        result["installed_bytes"] = float(installed_bytes(folder / "bare"))
    limits = {
        "installed_below_60_MB": result["installed_bytes"] < 60e6,
        "agent_below_50_MB": result["agent_rss_bytes"] < 50e6,
        "enrolled_with_a_result_below_15_s": result["first_result_s"] < 15,
    }
    print(json.dumps({"bench": "enrolment", **result, "bundle_bytes": archive.stat().st_size, "holds": limits}, indent=1))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
