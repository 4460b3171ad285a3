"""What strangers cost a farm, and what TLS and tokens cost its users.

python -m tests.bench.door [users | strangers | floods | quick-floods]

Without an argument, everything. `quick-floods` takes less than two minutes.
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
from collections.abc import Callable, Coroutine
from functools import partial
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
    "flood_longest_wait_s": 1.0, "flood_memory_after_to_before": 1.1,
    "reconnect_longest_wait_s": 6.0, "reconnect_memory_after_to_before": 1.5,
}  # fmt: skip
"""The results stay below. An attacker that reconnects for each burst of calls begins thousands of calls before it is noticed."""
QUICK_FLOODS = [(kind, connections, 6.0) for kind in ("reset", "headers", "reconnect") for connections in (8, 32)]
FLOODS = [(kind, connections, seconds) for kind, connections, _ in QUICK_FLOODS for seconds in (6.0, 15.0, 35.0)]
"""Kinds, numbers of connections and seconds of first floods: each meets a server of its own."""
GET_SERVER_INFO = "/etfarm.v1.FarmService/GetServerInfo"


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
            (folder / "key.pem").chmod(0o600)
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
    folder.mkdir()
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


async def bare() -> None:
    """Serve one method without a guard, until the end of stdin."""

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    server = grpc.aio.server()
    service, _, method = GET_SERVER_INFO[1:].partition("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)


async def flood(folder: Path, kind: str, connections: int, seconds: float) -> dict[str, Any]:
    """Flood a fresh server of the farm and then a bare one; return what callers with a token wait, and the servers' memory."""
    folder.mkdir()
    daemon = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--exit-with-stdin", "--no-prewarm",
         "--tokens", str(tokens_in(folder))],
        folder / "log",
    )  # fmt: skip
    daemon.start()
    try:
        ours = await one_flood(address_of(daemon), daemon.pid, kind, connections, seconds)
    finally:
        daemon.stop()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.door", "bare", stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        theirs = await one_flood(address, process.pid, kind, connections, seconds)
    finally:
        process.stdin.close()
        await process.wait()
    return {"kind": kind, "connections": connections, "seconds": seconds, "etfarm": ours, "bare": theirs}


async def one_flood(address: str, pid: int, kind: str, connections: int, seconds: float) -> dict[str, Any]:
    waits: dict[str, list[float]] = {"connected": [], "new": []}

    async def ask(channel: grpc.aio.Channel) -> None:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(GET_SERVER_INFO)
        while True:  # as etfarm's clients do
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(b"", timeout=120)
                return
            await asyncio.sleep(0.1)

    async def ask_on(name: str, channel: grpc.aio.Channel | None) -> None:
        while not attacking.done():
            started = time.monotonic()
            if channel is not None:
                await ask(channel)
            else:
                async with open_channel(Access(address, TOKEN)) as fresh:
                    await ask(fresh)
            waits[name].append(time.monotonic() - started)
            await asyncio.sleep(0.05)

    async with open_channel(Access(address, TOKEN)) as channel:
        for _ in range(300):
            await ask(channel)
        await asyncio.sleep(1)
        before = memory(pid, "VmRSS")
        attackers = ["-m", "tests.support.flood", address, kind, str(connections), str(seconds)]
        process = await asyncio.create_subprocess_exec(sys.executable, *attackers, stdout=asyncio.subprocess.PIPE)
        attacking = asyncio.create_task(process.communicate())
        await asyncio.gather(ask_on("connected", channel), ask_on("new", None))
        seen, _ = await attacking
        await asyncio.sleep(5)
        after = memory(pid, "VmRSS")
    return {
        **{f"longest_wait_{name}_s": round(max(times), 3) for name, times in waits.items()},
        "mib_before": round(before, 1), "mib_peak": round(memory(pid, "VmHWM"), 1), "mib_after": round(after, 1),
        "attackers": json.loads(seen), "load": os.getloadavg()[0],
    }  # fmt: skip


async def costs_of_floods(folder: Path, floods: list[tuple[str, int, float]]) -> dict[str, Any]:
    folder.mkdir()
    results = []
    for number, (kind, connections, seconds) in enumerate(floods):
        results.append(await flood(folder / str(number), kind, connections, seconds))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    worst: dict[str, Any] = {"floods": results}
    for name in ("flood", "reconnect"):
        ours = [result["etfarm"] for result in results if (result["kind"] == "reconnect") is (name == "reconnect")]
        worst[f"{name}_longest_wait_s"] = max(max(each["longest_wait_connected_s"], each["longest_wait_new_s"]) for each in ours)
        worst[f"{name}_memory_after_to_before"] = max(each["mib_after"] / each["mib_before"] for each in ours)
    return worst


def main(arguments: list[str]) -> int:
    if arguments == ["bare"]:
        asyncio.run(bare())
        return 0
    if len(arguments) == 2:
        kind, address = arguments
        attacks: dict[str, Any] = {"messages": lambda to: attack_with_messages(to, 10_000), "calls": attack_with_calls}
        if kind in attacks:
            asyncio.run(attacks[kind](address))
        else:
            attack_with_connections(address)
        return 0
    parts: dict[str, Callable[[Path], Coroutine[None, None, dict[str, Any]]]] = {
        "strangers": costs_of_strangers,
        "users": costs_of_a_user,
        "floods": partial(costs_of_floods, floods=FLOODS),
        "quick-floods": partial(costs_of_floods, floods=QUICK_FLOODS),
    }
    with tempfile.TemporaryDirectory() as name:
        result: dict[str, Any] = {}
        for part in arguments or ["strangers", "users", "floods"]:
            result |= asyncio.run(parts[part](Path(name) / part))
    limits = {key: limit for key, limit in LIMITS.items() if key in result}
    passed = all(result[key] < limit for key, limit in limits.items())
    print(json.dumps({"result": result, "limits": limits, "passed": passed}, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
