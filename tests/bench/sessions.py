"""What a session costs: from asking for one to the first result of a program that the device has, and one call of a tiny model.

python -m tests.bench.sessions
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from etfarm.client import LocalSession
from tests.support.farm import FarmProcess, wait_until
from tests.support.programs import program

ROUNDS = 15
CALLS = 2000
LIMITS = {"first_result_ms": 60.0, "call_ms": 2.0}
"""The medians stay below; on loopback."""


def main() -> int:
    x = np.zeros(1, np.float32)
    path = program("counter").path
    with tempfile.TemporaryDirectory() as name:
        running = FarmProcess(Path(name))
        try:
            with running.start().client() as farm:
                firsts = []
                for _ in range(ROUNDS + 1):
                    assert wait_until(lambda: farm.devices()[0].state.name == "IDLE")
                    started = time.perf_counter()
                    with farm.session(path) as session:
                        session.run("forward", x)
                        firsts.append((time.perf_counter() - started) * 1e3)
                with farm.session(path) as session:
                    calls = _calls(session, x)
        finally:
            running.stop()
    with LocalSession(path) as local:
        local_calls = _calls(local, x)
    result = {
        # The first one inspects the program and fetches it to the device.
        "first_result_ms": statistics.median(firsts[1:]), "call_ms": statistics.median(calls),
        "call_p99_ms": statistics.quantiles(calls, n=100)[98], "local_call_ms": statistics.median(local_calls),
    }  # fmt: skip
    passed = all(result[name] < limit for name, limit in LIMITS.items())
    print(json.dumps({"result": result, "limits": LIMITS, "passed": passed}, indent=1))
    return 0 if passed else 1


def _calls(session: object, x: np.ndarray) -> list[float]:
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        session.run("forward", x)  # type: ignore[attr-defined]
        times.append((time.perf_counter() - started) * 1e3)
    return times


if __name__ == "__main__":
    sys.exit(main())
