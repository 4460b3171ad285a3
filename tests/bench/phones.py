"""What a phone costs beside a board: bytes sent to it for a run, and time of each phase over the same run in a process here.

The phone is a real adbd on this machine, so that both run the same code on the same processor.

python -m tests.bench.phones
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from etfarm.client import Farm
from etfarm.device_agents.adb.link import Link
from tests.support.adbd import running_phone
from tests.support.farm import FarmProcess, wait_until
from tests.support.programs import program

ROUNDS = 7
SECOND_RUN_BYTES = 10_000
"""The most that a second run of a program may send, its inputs included, which are small here."""
PROGRAM = "conv"


class Meter:
    """A socket of an adb server that counts what its clients send."""

    def __init__(self, folder: Path, server: str) -> None:
        self.path = folder / "metered.sock"
        self.sent_bytes = 0
        self._server = server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await Link.open(self._server)
        await asyncio.gather(self._pump(reader, there.writer, True), self._pump(there.reader, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.sent_bytes += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def serve(self) -> asyncio.Server:
        """Start to serve."""
        return await asyncio.start_unix_server(self._accept, str(self.path))


def run(farm: Farm, device: str) -> tuple[dict[str, float], float]:
    """Milliseconds by phase on the device, and the median latency in milliseconds."""
    report = farm.bench(program(PROGRAM).path, devices=[device], threads=[1], min_time_s=0.3).result().report
    phases: dict[str, float] = defaultdict(float)
    for each in report["timeline"]:
        if each["actor"] == "DEVICE":
            phases[each["phase"]] += each["duration_ms"]
    return phases, report["latency"]["p50_ns"] / 1e6


async def measure(folder: Path) -> dict[str, object]:
    """Return the figures."""
    async with running_phone() as phone:
        meter = Meter(folder, phone.server.address)
        async with await meter.serve():
            return await asyncio.to_thread(_measured, folder, phone.serial, meter)


def _measured(folder: Path, serial: str, meter: Meter) -> dict[str, object]:
    farm, where = FarmProcess(folder), f"id={serial}"
    sent, ratios = list[int](), list[float]()
    there, here = list[dict[str, float]](), list[dict[str, float]]()
    try:
        farm.start(agents=0)
        farm.add_agent("--idle-wait", "0")
        farm.add_agent("--adb", "--idle-wait", "0", environment={"ADB_SERVER_SOCKET": f"localfilesystem:{meter.path}"})
        with farm.client() as client:
            assert wait_until(lambda: any(device.state.name == "IDLE" for device in client.devices(where)), 60)
            enrolled = meter.sent_bytes
            for _ in range(ROUNDS):
                before = meter.sent_bytes
                phases, p50_ms = run(client, where)
                sent.append(meter.sent_bytes - before)
                there.append(phases)
                own, own_ms = run(client, "name=board-0")
                here.append(own)
                ratios.append(p50_ms / own_ms)
    finally:
        farm.stop()
    phases_ms = {}
    for name in there[-1]:
        phone, process = _median(there, name), _median(here, name)
        phases_ms[name] = {"phone": phone, "process": process, "more": round(phone - process, 2)}
    return {
        "enrolment_bytes": enrolled, "first_run_bytes": sent[0], "second_run_bytes": sent[1], "phases_ms": phases_ms,
        "latency_ratio": statistics.median(ratios),
    }  # fmt: skip


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(each.get(name, 0.0) for each in rounds[1:]), 2)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(Path(name)))
    passed = int(str(result["second_run_bytes"])) < SECOND_RUN_BYTES
    print(json.dumps({"result": result, "limits": {"second_run_bytes": SECOND_RUN_BYTES}, "passed": passed}, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
