"""What strangers cost a farm, and what TLS and tokens cost its users.

python -m tests.bench.door
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import grpc
import trustme

from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from tests.support.contract import address_of
from tests.support.farm import Daemon
from tests.support.http2 import Http2

MIB = 1 << 20
TOKEN = "secret-of-ann-0123456789"
SUBMIT = "/etfarm.v1.JobService/Submit"
CALLS, ROUNDS, TRANSFER_BYTES, ATTACK_S = 400, 8, 128 * MIB, 5.0
LIMITS = {
    "strangers_messages_mib": 50.0, "strangers_bombs_mib": 50.0, "tls_and_token_ms_a_call": 0.3, "tls_and_token_throughput": 0.10,
    "p99_ms_while_messages": 100.0, "p99_ms_while_calls": 100.0, "p99_ms_while_connections": 100.0,
}  # fmt: skip
"""The results stay below."""


class Server:
    """One server, with TLS and tokens or with neither."""

    def __init__(self, folder: Path, *, guarded: bool) -> None:
        folder.mkdir()
        arguments = ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--exit-with-stdin"]
        self._ca: Path | None = None
        if guarded:
            authority = trustme.CA()
            certificate = authority.issue_cert("localhost", "127.0.0.1")
            self._ca = folder / "ca.pem"
            authority.cert_pem.write_to_path(self._ca)
            certificate.private_key_pem.write_to_path(folder / "key.pem")
            certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
            arguments += ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
        self._token = TOKEN if guarded else ""
        if guarded:
            arguments += ["--tokens", str(tokens_in(folder))]
        self.daemon = Daemon(arguments, folder / "log")
        self.daemon.start()
        self.address = address_of(self.daemon)

    def channel(self) -> grpc.aio.Channel:
        return open_channel(Access(self.address, self._token, self._ca))


def tokens_in(folder: Path) -> Path:
    path = folder / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"ann admin {TOKEN}\n")
    return path


async def call_ms(channel: grpc.aio.Channel, calls: int = CALLS) -> list[float]:
    """Return the times of calls one after the other."""
    stub, times = farm_pb2_grpc.FarmServiceStub(channel), []
    for _ in range(calls):
        started = time.perf_counter()
        await stub.GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=60)
        times.append((time.perf_counter() - started) * 1e3)
    return times


async def transfer_s(channel: grpc.aio.Channel) -> float:
    """How long an artifact takes to the server and back."""
    data = os.urandom(TRANSFER_BYTES)
    artifact, stub = artifact_of(data), artifact_pb2_grpc.ArtifactServiceStub(channel)
    started = time.perf_counter()
    await upload(stub, artifact, data)
    taken = 0
    async for chunk in stub.Download(artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)):
        taken += len(chunk.data)
    assert taken == TRANSFER_BYTES
    return time.perf_counter() - started


async def costs_of_a_user(folder: Path) -> dict[str, float]:
    servers = [Server(folder / "open", guarded=False), Server(folder / "guarded", guarded=True)]
    calls: list[list[float]] = [[], []]
    transfers: list[list[float]] = [[], []]
    try:
        async with servers[0].channel() as plain, servers[1].channel() as guarded:
            for channel in (plain, guarded):
                await call_ms(channel, 50)
            for _ in range(ROUNDS):  # in turns, so that both see the same machine
                for index, channel in enumerate((plain, guarded)):
                    calls[index] += await call_ms(channel)
                    transfers[index].append(await transfer_s(channel))
    finally:
        for server in servers:
            server.daemon.stop()
    before, after = (statistics.median(times) for times in calls)
    plain_s, guarded_s = (min(times) for times in transfers)
    return {
        "call_ms_open": before, "call_ms_guarded": after, "tls_and_token_ms_a_call": after - before,
        "mib_a_second_open": 2 * TRANSFER_BYTES / MIB / plain_s, "mib_a_second_guarded": 2 * TRANSFER_BYTES / MIB / guarded_s,
        "tls_and_token_throughput": 1 - plain_s / guarded_s,
    }  # fmt: skip


def memory(pid: int, name: str) -> float:
    result = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert result is not None
    return int(result[1]) / 1024


async def attack_with_messages(address: str, rounds: int = 4) -> None:
    """16 messages of 62 MB without a token, four at a time."""
    message = bytes(62 * MIB)

    async def one() -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            submit: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SUBMIT)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await submit(message, timeout=60)

    for _ in range(rounds):
        await asyncio.gather(*(one() for _ in range(4)))


def attack_with_bombs(address: str, token: str = "") -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(MIB)) for _ in range(1024)) + packer.flush()
    headers = {"grpc-encoding": "gzip"} | ({"authorization": f"Bearer {token}"} if token else {})
    for _ in range(16):
        with Http2(address, timeout_s=60) as connection:
            connection.begin()
            connection.call(SUBMIT, headers, bomb, compressed=True)


async def attack_with_calls(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        submit: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SUBMIT)

        async def one() -> None:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await submit(b"", timeout=60)

        await asyncio.gather(*(one() for _ in range(16)))


def attack_with_connections(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        opened = []
        for index in range(200):
            with contextlib.suppress(OSError):
                attacker = socket.socket()
                attacker.bind((f"127.0.0.{2 + index % 8}", 0))
                opened.append(attacker)
                attacker.connect((host, int(port)))
                attacker.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        for attacker in opened:
            attacker.close()


async def costs_of_strangers(folder: Path) -> dict[str, float]:
    folder.mkdir()
    daemon = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--exit-with-stdin", "--tokens",
         str(tokens_in(folder))],
        folder / "log",
    )  # fmt: skip
    daemon.start()
    address, result = address_of(daemon), {}
    try:
        async with open_channel(Access(address, TOKEN)) as channel:
            result["p99_ms_alone"] = statistics.quantiles(await call_ms(channel), n=100)[98]
            for name, attack in (
                ("messages", attack_with_messages(address)),
                ("bombs", asyncio.to_thread(attack_with_bombs, address)),
            ):
                Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
                before = memory(daemon.pid, "VmRSS")
                await attack
                result[f"strangers_{name}_mib"] = memory(daemon.pid, "VmHWM") - before
            for kind in ("messages", "calls", "connections"):
                attacker = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.door", kind, address)
                try:
                    until, times = time.monotonic() + ATTACK_S, []
                    while time.monotonic() < until:
                        times += await call_ms(channel, 20)
                        await asyncio.sleep(0.01)
                finally:
                    attacker.kill()
                    await attacker.wait()
                result[f"p99_ms_while_{kind}"] = statistics.quantiles(times, n=100)[98]
    finally:
        daemon.stop()
    return result


def main(arguments: list[str]) -> int:
    if arguments:
        kind, address = arguments
        attacks: dict[str, Any] = {"messages": lambda to: attack_with_messages(to, 10_000), "calls": attack_with_calls}
        if kind in attacks:
            asyncio.run(attacks[kind](address))
        else:
            attack_with_connections(address)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = asyncio.run(costs_of_strangers(folder / "strangers")) | asyncio.run(costs_of_a_user(folder))
    passed = all(result[key] < limit for key, limit in LIMITS.items())
    print(json.dumps({"result": result, "limits": LIMITS, "passed": passed}, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
