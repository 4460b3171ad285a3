"""How long scheduling takes: 10,000 waiting runs on 1,000 devices decided at once, and the next change of each sort.

    .venv/bin/python -m tests.bench.scheduling [--runs 10000] [--devices 1000] [--repeat 7] [--json FILE]

The fleet has three architectures, fifty racks and named devices; the queue has twenty owners in five projects, whose cells
ask for any device, an architecture, a rack, a size of memory or one device. A tenth of the runs is not measured and shares
devices. Numbers are medians of the repetitions, in milliseconds of this thread's CPU time, which other programs on the machine
change little. No server is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from etfarm.server.devices.scheduling.board import Board
from etfarm.server.devices.scheduling.usage import Usage
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire import selectors
from tests.support.scheduling import schedule

START_S = 1_700_000_000


def fleet(count: int) -> list[Device]:
    arches = ("aarch64", "aarch64", "aarch64", "armv7l", "x86_64")
    return [
        Device(
            id=f"device-{number:05}", name=f"pi-{number:05}", arch=arches[number % 5], soc="Broadcom BCM2712", cores=4,
            memory_bytes=(1 + number % 4) << 31, features=["dotprod", "fp16"], labels={"rack": str(number % 50)},
            state=DeviceState.DEVICE_STATE_IDLE, concurrent_runs=4 if number % 10 == 0 else 1,
        )
        for number in range(count)
    ]  # fmt: skip


def queue(count: int, devices: int, chance: random.Random) -> list[Waiting]:
    texts = [
        *("", "arch=aarch64", "arch=x86_64", "memory>=4GiB", "arch=armv7l,memory>=2GiB", "emulated=false"),
        *(f"label.rack={rack}" for rack in range(50)),
        *(f"id=device-{number:05}" for number in range(0, devices, 5)),
    ]
    parsed = {text: selectors.parse(text) for text in texts}
    return [
        Waiting(
            f"cell-{number:06}", parsed[chance.choice(texts) if number % 2 else texts[number % 6]], chance.randint(-5, 5),
            ((START_S + number) * 10**9, 0), project=f"project-{number % 5}", owner=f"owner-{number % 20}",
            exclusive=number % 10 != 0, program=f"program-{number % 300}",
        )
        for number in range(count)
    ]  # fmt: skip


def timed_ms(do: Callable[[], Any]) -> float:
    began_s = time.thread_time()
    do()
    return (time.thread_time() - began_s) * 1e3


def measure(runs: int, devices: int, seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    known, waiting = fleet(devices), queue(runs, devices, chance)
    chance.shuffle(waiting)
    usage = Usage(lately={(f"project-{n % 5}", f"owner-{n}"): 900.0 * n for n in range(20)})
    taken: dict[str, float] = {}
    placed: list[Any] = []
    taken["all_at_once_ms"] = timed_ms(lambda: placed.extend(schedule(waiting, known, usage)))
    assert len(placed) >= devices * 9 // 10, len(placed)

    board = Board()
    for device in known:
        board.put(device)
    taken["fill_queue_ms"] = timed_ms(lambda: [board.add(cell) for cell in waiting])
    taken["first_round_ms"] = timed_ms(lambda: board.assign(usage.lately))

    def free() -> None:
        device = board.pool.records[chance.choice(known).id].device
        board.put(device, sent=[f"program-{chance.randrange(300)}"])
        assert board.assign(usage.lately)

    def submit() -> None:
        board.add(next(more))
        board.assign(usage.lately)

    def cancel() -> None:
        board.remove(chance.choice(list(board.cells)))
        board.assign(usage.lately)

    def relabel() -> None:
        device = Device()
        device.CopyFrom(board.pool.records[chance.choice(known).id].device)
        device.labels["rack"] = str(chance.randrange(50))
        board.put(device, board.pool.records[device.id].running)
        board.assign(usage.lately)

    more = iter([replace(cell, cell_id=f"more-{cell.cell_id}") for cell in queue(100, devices, chance)])
    for name, change in (
        ("freed_device", free),
        ("submission", submit),
        ("cancellation", cancel),
        ("relabelled_device", relabel),
    ):
        each = sorted(timed_ms(change) for _ in range(100))
        taken[f"{name}_ms"], taken[f"{name}_worst_ms"] = statistics.median(each), each[-1]
    return taken


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rounds = [measure(options.runs, options.devices, seed) for seed in range(options.repeat)]
    medians = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    result = {"runs": options.runs, "devices": options.devices, "repeat": options.repeat, **medians}
    for name, value in result.items():
        print(f"{name:28} {value:>12,}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
