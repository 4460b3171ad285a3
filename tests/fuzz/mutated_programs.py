"""`python -m tests.fuzz.mutated_programs --count 5000`: damaged programs that pass the server's own checks, run by a real agent.

The agent is a process of its own, its runner the native one. Whatever a program does, the agent answers within the attempt's
deadline and begins the next attempt at once; good programs in between give what they always give.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import io
import random
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from etfarm.server.compile.inspect import facts, sizes
from etfarm.server.compile.screening import screen
from etfarm.v1 import agent_pb2, compile_pb2, job_pb2
from etfarm.wire import digest
from etfarm.wire.errors import EtfarmError
from tests.support.agent import Connection, Server
from tests.support.runner import know_own_runners, runner_archive

SEEDS: Final = Path(__file__).parent / "seeds"
DEADLINE_S: Final = 10.0
"""Of an attempt; a program may run in circles."""
GRACE_S: Final = 30.0
"""After the deadline, until a result must have come: a busy machine."""
BACK_S: Final = 1.0
"""Within which the device takes the next attempt."""
GOOD_EVERY: Final = 10
MEASUREMENT: Final = job_pb2.Measurement(warmup=1, iterations=2, min_time_s=0.01, max_time_s=2)


@dataclass
class Figures:
    """What came of the programs."""

    run: int = 0
    refused: int = 0
    """By the server's checks: never sent."""
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    """How often each reason was answered; empty for a program that ran to its end."""
    back_s: list[float] = field(default_factory=list)
    """From each result until the next attempt showed its first sign of life."""
    took_s: list[float] = field(default_factory=list)
    """Each attempt."""

    def __str__(self) -> str:
        back, took = sorted(self.back_s), sorted(self.took_s)
        reasons = "\n".join(f"  {count:6}  {reason or 'ran to its end'}" for reason, count in self.reasons.most_common())
        return (
            f"{self.run} programs ran, {self.refused} were refused by the server's checks\n{reasons}\n"
            f"the next attempt began after p50 {back[len(back) // 2] * 1e3:.0f} ms, "
            f"p99 {back[len(back) * 99 // 100] * 1e3:.0f} ms, at most {back[-1] * 1e3:.0f} ms\n"
            f"an attempt took p50 {took[len(took) // 2]:.2f} s, at most {took[-1]:.2f} s"
        )


def damaged(seed: int) -> Iterator[bytes]:
    """Yield programs with a few bytes or numbers exchanged, without end; the same for equal seeds."""
    chance = random.Random(seed)
    good = [path.read_bytes() for path in sorted(SEEDS.glob("*.pte"))]
    while True:
        data = bytearray(chance.choice(good))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(32, len(data) - 8)
            match chance.randrange(4):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at] = chance.randrange(256)
                case 2:
                    struct.pack_into("<I", data, at & ~3, chance.choice((0, 1, 2, 7, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)))
                case _:
                    struct.pack_into("<I", data, at & ~3, chance.randrange(len(data)))
        yield bytes(data)


def passes(data: bytes, folder: Path) -> bool:
    """Return whether the server would send a program to a device."""
    path = folder / "program.pte"
    path.write_bytes(data)
    try:
        screen.screen_pte(path)
        facts.describe(sizes.read(path))
    except (EtfarmError, MemoryError):
        return False
    return True


async def run(count: int, seed: int, folder: Path, server: Server, connection: Connection) -> Figures:
    """Run so many damaged programs, one after the other, and good ones in between.

    Raises:
        AssertionError: an attempt gave no result, or a good program another one than it should.
    """
    figures, ended_s, number = Figures(), None, 0
    good = (SEEDS / "add.pte").read_bytes()
    for data in damaged(seed):
        if figures.run == count:
            return figures
        with contextlib.redirect_stderr(io.StringIO()):
            is_sent = await asyncio.to_thread(passes, data, folder)
        if not is_sent:
            figures.refused += 1
            continue
        for is_good, program in ((False, data), *([(True, good)] if figures.run % GOOD_EVERY == 0 else [])):
            number += 1
            attempt = f"attempt-{number}"
            # Time that passed here, in the checks, is not the device's.
            began_s = time.monotonic()
            connection.start(attempt, _candidate(server, program), deadline_s=DEADLINE_S, measurement=MEASUREMENT)
            await _first_sign(connection, attempt)
            if ended_s is not None:
                figures.back_s.append(time.monotonic() - began_s)
            result = await _result(connection, attempt)
            connection.ack(attempt)
            connection.received.clear()
            ended_s = time.monotonic()
            figures.took_s.append(ended_s - began_s)
            (cell,) = result.candidates or (agent_pb2.CandidateResult(error=result.error),)
            reason = cell.error.reason if cell.HasField("error") else ""
            if is_good:
                assert not reason, f"after program {figures.run}: {cell.error}"
            else:
                figures.run += 1
                figures.reasons[reason] += 1
    raise AssertionError("unreachable")


def _candidate(server: Server, data: bytes) -> agent_pb2.RunCandidate:
    pte = server.put(data)
    program = compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))
    bundle = agent_pb2.RunnerBundle(artifact=server.put(runner_archive().read_bytes()))
    return agent_pb2.RunCandidate(cell_id="cell", program=program, bundle=bundle)


async def _first_sign(connection: Connection, attempt: str) -> None:
    def is_of_it(message: agent_pb2.AgentMessage) -> bool:
        return attempt in (message.run_progress.attempt_id, message.run_result.attempt_id)

    async with asyncio.timeout(GRACE_S):
        await connection.until(is_of_it)


async def _result(connection: Connection, attempt: str) -> agent_pb2.RunResult:
    async with asyncio.timeout(DEADLINE_S + GRACE_S):
        return await connection.result(attempt)


@contextlib.asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[tuple[Server, Connection, asyncio.subprocess.Process]]:
    """Start a server that the caller holds and a real agent of it; both are gone afterwards."""
    server = Server()
    await server.start()
    know_own_runners(folder / "agent")
    arguments = ["--server", server.address, "--data", str(folder / "agent"), "--idle-wait", "0", "--exit-with-stdin"]
    with (folder / "agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "etfarm.wire.command", "agent", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    try:
        yield server, await server.connected(), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await server.stop()


async def _main(count: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as name:
        async with agent(Path(name)) as (server, connection, process):
            figures = await run(count, seed, Path(name), server, connection)
            assert process.returncode is None, "the agent died"
    print(figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutated_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(_main(options.count, options.seed))
