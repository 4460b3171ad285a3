"""`etfarm agent`: the command line, and the composition of the daemon from it."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import logging
import os
import re
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.conditions.governor import KEPT_GOVERNORS, Governors
from etfarm.device_agents.config import (
    DEFAULT_CACHE_LIMIT_BYTES,
    AgentConfig,
    PhoneOptions,
    default_data_folder,
    emulated_data_folder,
    phones_data_folder,
)
from etfarm.device_agents.daemon.agent import Agent
from etfarm.device_agents.daemon.connection import Outgoing, ServerConnection
from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.daemon.enrolment import enroll
from etfarm.device_agents.daemon.own_runners import own_runners
from etfarm.device_agents.daemon.systemd import unit_of_this
from etfarm.device_agents.device import inventory
from etfarm.device_agents.device.identity import device_id, emulated_id
from etfarm.device_agents.errors import NoCores
from etfarm.device_agents.jail.confine import Jail
from etfarm.device_agents.jail.options import DEFAULT_USERS, JailOptions
from etfarm.device_agents.jail.secrets import forget_variable, hide_memory
from etfarm.device_agents.runners.emulator import DEFAULT_CPUS, SME_WARNING, Emulator
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import device_pb2
from etfarm.wire.channel import Access, parse_address
from etfarm.wire.escapes import in_a_line, printable
from etfarm.wire.names import DATA_VARIABLE, SERVER_VARIABLE, boot_id
from etfarm.wire.owner import at_end_of_stdin

if TYPE_CHECKING:
    from etfarm.device_agents.daemon.phones.fleet import Fleet

log = logging.getLogger(__name__)

_M_ARENA_MAX = -8
"""The option that limits malloc's arenas. Source: mallopt(3) and malloc.h."""
_SIZE = re.compile(r"(\d+)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """Run `etfarm agent` until SIGTERM, SIGINT, or with `--exit-with-stdin` the end of stdin; return the exit code.

    Args:
        argv: the arguments that follow `agent`.

    Raises:
        EtfarmError: the agent cannot work, or the server refuses it; the message is for people.
    """
    options = _parser().parse_args(argv)
    if not options.server:
        _parser().error(f"give --server ADDR, or set {SERVER_VARIABLE}")
    if options.cpu and not options.emulate:
        _parser().error("--cpu requires --emulate")
    if (options.phone_runner or options.phone_limit is not None) and not options.adb:
        _parser().error("--phone-runner and --phone-limit require --adb")
    if options.adb and (options.emulate or options.cores):
        _parser().error(
            "--adb cannot be combined with --emulate or --cores: start one agent for phones and another one for this machine"
        )
    parse_address(options.server)
    if options.print_unit:
        _print_line(unit_of_this(argv, vars(options)).rstrip("\n"))
        return 0
    _log_to_stderr()
    _share_one_heap()
    config = _config(options)
    # Fail now if the certificates cannot be used.
    config.access.credentials()
    device = None if config.phones else _device(config)
    # Check an explicit choice only: a kernel may lack the default.
    if options.governor is not None and not config.phones and config.emulator is None:
        Governors(config.data / KEPT_GOVERNORS, config.governor).check(config.cores)
    # The configuration holds the token from here on.
    forget_variable()
    hide_memory()
    folder = DataFolder(config.data)
    try:
        asyncio.run(_serve(config, device, folder, options.exit_with_stdin))
    finally:
        folder.close()
    return 0


async def _serve(config: AgentConfig, device: device_pb2.Device | None, folder: DataFolder, exit_with_stdin: bool) -> None:
    """Serve until a signal, or the end of stdin.

    Args:
        config: the agent's settings.
        device: this machine, or the processor it emulates; None if phones are served.
        folder: the data folder.
        exit_with_stdin: whether the end of stdin ends the agent.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        at_end_of_stdin(stop.set)
    agent_id = folder.agent_id()
    config = dataclasses.replace(config, access=await enroll(config.access, config.data, agent_id, config.pauses()))
    outgoing = Outgoing()
    # A process that was killed during a measurement has left the governors changed.
    Governors(config.data / KEPT_GOVERNORS, None).restore()
    cache = Cache(config.data / "cache", config.cache_limit_bytes)
    agent = Agent(config, folder, cache, outgoing)
    connection = ServerConnection(
        config, agent, agent_id, outgoing, _print_line,
        version=version("etfarm"), host=socket.gethostname(), boot="" if device is None else boot_id(),
    )  # fmt: skip
    fleet = None if device is not None else await _fleet(config, agent, agent_id, cache)
    jail = Jail(config.jail)
    _print_line(f"etfarm agent: connecting to {config.access.server}")
    if device is not None:
        device.id, device.agent_id = _device_id(config, agent_id), agent_id
        measures = await jail.measures()
        if not measures.is_complete:
            log.warning("%s", measures)
        # Before the farm can send anything, which this would disturb.
        device.own_runners.extend(await _own_runners(config, stop))
        agent.attach(Machine(config, device, jail))
        await jail.keep_ready()
    following = None if fleet is None else asyncio.create_task(fleet.run(), name="phones")
    try:
        await connection.run(stop)
    finally:
        await agent.close()
        await jail.close()
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _fleet(config: AgentConfig, agent: Agent, agent_id: str, cache: Cache) -> Fleet:
    # Imported here, because boards do not need it and have little memory.
    from etfarm.device_agents.adb import AdbServer
    from etfarm.device_agents.daemon.phones.fleet import Fleet

    fleet = Fleet(AdbServer(), agent, agent_id, cache, config)
    await fleet.find_server()
    return fleet


async def _own_runners(config: AgentConfig, stop: asyncio.Event) -> list[device_pb2.DeviceRunner]:
    """Return the runners that are installed here; none if the agent is stopped meanwhile, or serves an emulated processor."""
    if config.emulator is not None:
        return []
    stopped = asyncio.create_task(stop.wait(), name="stop")
    asking = asyncio.create_task(own_runners(config.data), name="own runners")
    try:
        await asyncio.wait({stopped, asking}, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else []
    finally:
        for task in (stopped, asking):
            task.cancel()
        await asyncio.gather(stopped, asking, return_exceptions=True)


def _device(config: AgentConfig) -> device_pb2.Device:
    """Return the device that the agent serves, without ids."""
    emulator = config.emulator
    device = emulator.device(config.cores) if emulator else inventory.parse(inventory.collect(), config.cores)
    if not device.cores:
        wanted = inventory.format_cpu_list(config.cores or ())
        raise NoCores(f"None of the cpus {wanted} may be used here.", "Choose others with --cores.", cores=wanted)
    if emulator is not None and "sme" in device.features:
        log.warning("--cpu %s: %s", emulator.cpu, SME_WARNING)
    device.name = config.name
    device.can_generate = device.can_generate_in_sessions = True
    device.labels.update(config.labels)
    return device


def _device_id(config: AgentConfig, agent_id: str) -> str:
    if config.emulator is not None:
        return emulated_id(agent_id, config.emulator.arch, config.emulator.cpu)
    try:
        machine_id = Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        machine_id = ""
    # Agents of any kind may get their folder from $ETFARM_DATA, so such a folder is not *the* default.
    is_default = not os.environ.get(DATA_VARIABLE) and config.data.resolve() == default_data_folder().resolve()
    return device_id(machine_id, agent_id, is_default_folder=is_default)


def _config(options: argparse.Namespace) -> AgentConfig:
    of_user = Access.of(options.server, options.tls_ca)
    # A device serves every project that it is not restricted from, so ETFARM_PROJECT does not apply.
    access = dataclasses.replace(of_user, tls_cert=options.tls_cert, tls_key=options.tls_key, project="")
    emulator = Emulator.find(options.emulate, options.cpu) if options.emulate else None
    return AgentConfig(
        access=access,
        name=options.name or ("" if options.adb else "-".join([socket.gethostname(), *([emulator.cpu] if emulator else [])])),
        # Beside that of the agent that serves this machine itself.
        data=options.data or _default_folder(options, emulator),
        emulator=emulator,
        phones=PhoneOptions(
            limit_bytes=PhoneOptions.limit_bytes if options.phone_limit is None else options.phone_limit,
            runner=options.phone_runner,
        )
        if options.adb
        else None,
        labels=dict(options.label),
        cores=options.cores,
        cache_limit_bytes=options.cache_limit,
        gates=GateLimits(
            cool_below_c=options.cool_below,
            cool_wait_s=options.cool_wait,
            cool_down_s=options.cool_down,
            idle_below=options.idle_below,
            idle_wait_s=options.idle_wait,
        ),
        governor=None if options.governor == "keep" else options.governor or AgentConfig.governor,
        jail=JailOptions(users=options.runner_users, required=options.require_jail),
    )


def _default_folder(options: argparse.Namespace, emulator: Emulator | None) -> Path:
    if options.adb:
        return phones_data_folder()
    return emulated_data_folder(emulator) if emulator else default_data_folder()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etfarm agent",
        description="Serve this machine as a device of a farm. It dials out to the server, so it works behind NAT; it runs "
        "programs one at a time, each in a process of its own. The token is read from ETFARM_TOKEN; a one-time token of "
        "`etfarm tokens create NAME --agent` is exchanged for the agent's own token at the first start.",
    )
    add = parser.add_argument
    server = os.environ.get(SERVER_VARIABLE)
    add("--server", metavar="ADDR", default=server, help="HOST:PORT, [IPV6]:PORT or unix:PATH; default: $ETFARM_SERVER")
    add(
        "--name",
        metavar="N",
        help="the device's name; default: the host's name. For phones: the prefix of each name",
    )
    add("--label", metavar="K=V", type=_label, action="append", default=[], help="for selectors (label.K=V); repeatable")
    add("--data", metavar="DIR", type=Path, help="the agent's id, cache and unsent results; default: "
        f"{str(default_data_folder()).replace('%', '%%')}, beside it for --adb and --emulate")  # fmt: skip
    add("--tls-ca", metavar="FILE", type=Path, help="certificates (PEM) that the server's is signed by; default: $ETFARM_TLS_CA")
    add("--tls-cert", metavar="FILE", type=Path, help="client certificate (PEM), where the server demands one")
    add("--tls-key", metavar="FILE", type=Path, help="the client certificate's key (PEM)")
    add("--cores", metavar="LIST", type=_cores, help="cpus that programs may use, as 4-7 or 0,2; default: all. Not for phones")
    size = f"{DEFAULT_CACHE_LIMIT_BYTES >> 30}GiB"
    add("--cache-limit", metavar="BYTES", type=_size, default=DEFAULT_CACHE_LIMIT_BYTES, help=f"as 500MiB; default: {size}")
    emulation = parser.add_argument_group(
        "emulation",
        "Serve an emulated device instead of this machine: programs run on another processor in software (qemu), with its "
        "kernels. Outputs are valid, times mean nothing: the verdict is NOT_BENCHMARKABLE.",
    )
    add = emulation.add_argument
    add("--emulate", metavar="ARCH", choices=sorted(DEFAULT_CPUS), help="the architecture: aarch64")
    add("--cpu", metavar="MODEL", help="the processor, as `qemu-aarch64-static -cpu help` lists them; default: cortex-a76. "
        "Not max, but max,sme=off: with SME qemu computes XNNPACK's int8 kernels wrongly")  # fmt: skip
    phones = parser.add_argument_group(
        "phones",
        "Serve the Android phones that are attached to this machine instead of it: each that the adb server lists is a device, "
        "comes and goes with its cable, and needs nothing installed. The server is that of ADB_SERVER_SOCKET, else adb's own, "
        "which is started where it does not run.",
    )
    add = phones.add_argument
    add("--adb", action="store_true", help="serve every phone")
    add("--phone-limit", metavar="BYTES", type=_size, help="of runners and programs that are kept on each phone; default: 2GiB")
    add("--phone-runner", metavar="COMMAND",
        help="a runner that was put on the phones beforehand, one built with the NDK for example, and speaks the protocol of the "
        "bundle's; its path on the phone")  # fmt: skip
    gates = parser.add_argument_group(
        "measurements",
        "What a measurement waits for, and what is set for it. It begins in any case when the wait is over, and the report tells "
        "what was missing. A machine without the sensor does not wait.",
    )
    add, limits = gates.add_argument, GateLimits()
    add("--cool-below", metavar="C", type=_number, default=limits.cool_below_c,
        help="temperature of the hottest sensor, in degrees Celsius; default: %(default)g")  # fmt: skip
    add("--cool-wait", metavar="S", type=_number, default=limits.cool_wait_s,
        help="the longest wait for it, shorter if it does not get cooler; 0: none; default: %(default)g")  # fmt: skip
    add("--cool-down", metavar="S", type=_number, default=limits.cool_down_s,
        help="least pause between two measurements on a machine with temperature sensors; default: %(default)g")  # fmt: skip
    add("--idle-below", metavar="N", type=_number, default=limits.idle_below,
        help="tasks per cpu that run while nothing is measured yet; default: %(default)g")  # fmt: skip
    add("--idle-wait", metavar="S", type=_number, default=limits.idle_wait_s,
        help="the longest wait for it; 0: none; default: %(default)g")  # fmt: skip
    add("--governor", metavar="NAME",
        help="the cpus' clock governor during measurements, where this agent may write it (as root); it is put back afterwards, "
        "also after a crash; keep: leave it as it is; default: " f"{AgentConfig.governor}")  # fmt: skip
    confinement = parser.add_argument_group(
        "confinement",
        "A program sees its own folder and its runner, but no network. Where the agent is root, the program has its own user. "
        "Measures that this machine's kernel lacks are left out and logged.",
    )
    add = confinement.add_argument
    add("--require-jail", action="store_true", help="do not start on a machine that cannot confine programs")
    add("--runner-users", metavar="FIRST-LAST", type=_users, default=DEFAULT_USERS,
        help="user ids without accounts that programs run as where the agent is root; default: "
        f"{DEFAULT_USERS.start}-{DEFAULT_USERS.stop - 1}")  # fmt: skip
    add = parser.add_argument
    add("--print-unit", action="store_true", help="print a systemd unit that runs this command from the machine's start on, and "
        "end; its first lines say how to install it")  # fmt: skip
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cpus such as 4-7 or 0,2") from None


def _users(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, such as 64000-64999")
    return range(int(first), int(last) + 1)


def _size(text: str) -> int:
    match = _SIZE.match(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1000000 or 500MiB")
    number, unit = int(match.group(1)), (match.group(2) or "").upper()
    if not unit:
        return number
    base = 1024 if unit.endswith("I") else 1000
    return number * int(base ** " KMGT".index(unit[0]))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    # Refuse NaN and infinity.
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1000000")
    return value


def _share_one_heap() -> None:
    """Let all threads share one heap: glibc would give each gRPC thread its own, a megabyte of a small board's memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _print_line(line: str) -> None:
    print(printable(line), flush=True)


class _OneLine(logging.Formatter):
    """A formatter that puts a record, traceback included, on one line without control characters.

    Instants are in UTC as ISO 8601, as in the server's log.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return in_a_line(super().format(record).replace("\n", " | "))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
