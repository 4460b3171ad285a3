"""`etfarm agent`: the daemon on target hardware. Settings in, exit code out; everything is put together here."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import re
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path

from etfarm.device_agents import inventory
from etfarm.device_agents.agent import Agent, DataFolder, device_id
from etfarm.device_agents.cache import Cache
from etfarm.device_agents.config import DEFAULT_CACHE_LIMIT_BYTES, AgentConfig, default_data_folder
from etfarm.device_agents.errors import NoCores
from etfarm.device_agents.session import Outgoing, Session
from etfarm.device_agents.telemetry import Telemetry
from etfarm.v1 import device_pb2
from etfarm.wire.channel import Access, parse_address
from etfarm.wire.names import DATA_VARIABLE, SERVER_VARIABLE
from etfarm.wire.owner import at_end_of_stdin

_SIZE = re.compile(r"(\d+)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """The command; `argv` is what follows `agent`. Ends by SIGTERM, SIGINT, or with `--exit-with-stdin` at the end of stdin.

    Raises:
        EtfarmError: the agent cannot work, or the server refuses it; the message is for people.
    """
    options = _parser().parse_args(argv)
    if not options.server:
        _parser().error(f"give --server ADDR, or set {SERVER_VARIABLE}")
    parse_address(options.server)
    _log_to_stderr()
    config = _config(options)
    folder = DataFolder(config.data)
    try:
        asyncio.run(_serve(config, folder, options.exit_with_stdin))
    finally:
        folder.close()
    return 0


async def _serve(config: AgentConfig, folder: DataFolder, exit_with_stdin: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        at_end_of_stdin(stop.set)
    agent_id = folder.agent_id()
    outgoing = Outgoing()
    cache = Cache(config.data / "cache", config.cache_limit_bytes)
    agent = Agent(config, _device(config, agent_id), folder, cache, outgoing)
    session = Session(
        config, agent, agent_id, outgoing, Telemetry(config.data), _say, version=version("etfarm"), host=socket.gethostname()
    )
    _say(f"etfarm agent: connecting to {config.access.server}")
    try:
        await session.run(stop)
    finally:
        await agent.close()


def _device(config: AgentConfig, agent_id: str) -> device_pb2.Device:
    device = inventory.parse(inventory.collect(), config.cores)
    if not device.cores:
        wanted = inventory.format_cpu_list(config.cores or ())
        raise NoCores(f"None of the cpus {wanted} may be used here.", "Choose others with --cores.", cores=wanted)
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = ""
    # $ETFARM_DATA may name another folder for every agent, so a folder that comes from there is not *the* default.
    is_default = not os.environ.get(DATA_VARIABLE) and config.data.resolve() == default_data_folder().resolve()
    device.id = device_id(machine_id, agent_id, is_default_folder=is_default)
    device.agent_id = agent_id
    device.name = config.name
    device.labels.update(config.labels)
    return device


def _config(options: argparse.Namespace) -> AgentConfig:
    access = dataclasses.replace(Access.of(options.server, options.tls_ca), tls_cert=options.tls_cert, tls_key=options.tls_key)
    return AgentConfig(
        access=access,
        name=options.name or socket.gethostname(),
        data=options.data or default_data_folder(),
        labels=dict(options.label),
        cores=options.cores,
        cache_limit_bytes=options.cache_limit,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etfarm agent",
        description="Serve this machine as a device of a farm. It dials out to the server, so it works behind NAT; it runs "
        "programs one at a time, each in a process of its own. The token is read from ETFARM_TOKEN.",
    )
    add = parser.add_argument
    server = os.environ.get(SERVER_VARIABLE)
    add("--server", metavar="ADDR", default=server, help="HOST:PORT, [IPV6]:PORT or unix:PATH; default: $ETFARM_SERVER")
    add("--name", metavar="N", help="what people call the device; default: the host's name")
    add("--label", metavar="K=V", type=_label, action="append", default=[], help="for selectors (label.K=V); several times")
    add("--data", metavar="DIR", type=Path, help=f"the agent's id, cache and unsent results; default: {default_data_folder()}")
    add("--tls-ca", metavar="FILE", type=Path, help="certificates (PEM) that the server's is signed by; default: $ETFARM_TLS_CA")
    add("--tls-cert", metavar="FILE", type=Path, help="client certificate (PEM), where the server demands one")
    add("--tls-key", metavar="FILE", type=Path, help="the client certificate's key (PEM)")
    add("--cores", metavar="LIST", type=_cores, help="cpus that programs may use, as 4-7 or 0,2; default: all")
    size = f"{DEFAULT_CACHE_LIMIT_BYTES >> 30}GiB"
    add("--cache-limit", metavar="BYTES", type=_size, default=DEFAULT_CACHE_LIMIT_BYTES, help=f"as 500MiB; default: {size}")
    add("--exit-with-stdin", action="store_true", help="end when stdin ends, for programs that start an agent of their own")
    return parser


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return key, value


def _cores(text: str) -> frozenset[int]:
    try:
        return inventory.parse_cpu_list(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of cpus such as 4-7 or 0,2") from None


def _size(text: str) -> int:
    found = _SIZE.match(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 1000000 or 500MiB")
    number, unit = int(found.group(1)), (found.group(2) or "").upper()
    if not unit:
        return number
    base = 1024 if unit.endswith("I") else 1000
    return number * int(base ** " KMGT".index(unit[0]))


def _say(line: str) -> None:
    print(line, flush=True)


class _OneLine(logging.Formatter):
    """A record, its traceback included, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
