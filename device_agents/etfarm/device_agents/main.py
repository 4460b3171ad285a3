"""`etfarm agent`: the command line, and the composition of the daemon from it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.device_agents import logs
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.conditions.governor import KEPT_GOVERNORS, Governors
from etfarm.device_agents.config import AgentConfig, default_data_folder, emulated_data_folder, phones_data_folder
from etfarm.device_agents.daemon.agent import Agent
from etfarm.device_agents.daemon.connection import Outgoing, ServerConnection
from etfarm.device_agents.daemon.data_folder import MARKS, DataFolder
from etfarm.device_agents.daemon.device_choice import DeviceChoice
from etfarm.device_agents.daemon.enrolment import enroll
from etfarm.device_agents.daemon.launcher import RESTART, base_version, become, is_launched
from etfarm.device_agents.daemon.own_runners import own_runners
from etfarm.device_agents.daemon.systemd import unit_of_this
from etfarm.device_agents.daemon.upgrade import Upgrader
from etfarm.device_agents.daemon.versions import Versions
from etfarm.device_agents.device import inventory
from etfarm.device_agents.device.identity import device_id, emulated_id
from etfarm.device_agents.jail.confine import Jail
from etfarm.device_agents.jail.secrets import forget_variable, hide_memory
from etfarm.device_agents.runners.emulator import SME_WARNING
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import device_pb2
from etfarm.wire.channel import parse_addresses
from etfarm.wire.errors import error_for
from etfarm.wire.escapes import printable
from etfarm.wire.heap import share_one_heap
from etfarm.wire.names import DATA_VARIABLE, SERVER_VARIABLE, boot_id
from etfarm.wire.options import PRINT_UNIT, add_options, built, options_of
from etfarm.wire.owner import at_end_of_stdin
from etfarm.wire.private import close_umask, make_private
from etfarm.wire.shielding import end_tasks
from etfarm.wire.systemd import without_options

if TYPE_CHECKING:
    from etfarm.device_agents.daemon.phones.fleet import Fleet

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run `etfarm agent` until SIGTERM, SIGINT, or with `--exit-with-stdin` the end of stdin; return the exit code.

    Args:
        argv: the arguments that follow `agent`.

    Raises:
        EtfarmError: the agent cannot work, or the server refuses it; the message is for people.
    """
    agent = parser()
    options = parse(agent, argv)
    parse_addresses(options.server)
    if options.print_unit:
        _print_line(unit_of_this(without_options(argv, agent), vars(options)).rstrip("\n"))
        return 0
    config = config_of(options)
    close_umask()
    if config.allow_upgrade and not is_launched():
        make_private(config.data, MARKS)  # it has the code that is started
        become(config.data, argv)
    logs.configure(config.log_format)
    share_one_heap()
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
        return asyncio.run(_serve(config, device, folder))
    finally:
        folder.close()


async def _serve(config: AgentConfig, device: device_pb2.Device | None, folder: DataFolder) -> int:
    """Serve until a signal, the end of stdin, or an upgrade, and return the exit code.

    Args:
        config: the agent's settings.
        device: this machine, or the processor it emulates; None if phones are served.
        folder: the data folder.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.exit_with_stdin:
        at_end_of_stdin(stop.set)
    agent_id = folder.agent_id()
    choice = None if device is None else DeviceChoice(folder, _device_ids(config, agent_id))
    boot = "" if device is None else boot_id()
    enrolment = await enroll(config.access, config.data, agent_id, config.pauses(), choice, boot)
    config = dataclasses.replace(config, access=enrolment.access)
    outgoing = Outgoing()
    # A process that was killed during a measurement has left the governors changed.
    Governors(config.data / KEPT_GOVERNORS, None).restore()
    cache = Cache(config.data / "cache", config.cache_limit_bytes)
    agent = Agent(config, folder, cache, outgoing)
    restarts: list[int] = []

    def restart() -> None:
        restarts.append(RESTART)
        stop.set()

    upgrader = Upgrader(config, cache, Versions(config.data, base_version()), outgoing, lambda: agent.active, restart)
    connection = ServerConnection(
        config, agent, upgrader, agent_id, choice, outgoing, _print_line,
        version=version("etfarm"), host=socket.gethostname(), boot=boot, withheld=enrolment.withheld,
    )  # fmt: skip
    fleet = None if device is not None else await _fleet(config, agent, agent_id, cache)
    jail = Jail(config.jail)
    _print_line(f"etfarm agent: connecting to {config.access.server}")
    if device is not None and choice is not None:
        device.id, device.agent_id = choice.id, agent_id
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
        return restarts[0] if restarts else 0
    finally:
        await upgrader.close()
        await agent.close()
        await jail.close()
        if following is not None:
            await end_tasks(following)


async def _fleet(config: AgentConfig, agent: Agent, agent_id: str, cache: Cache) -> Fleet:
    # Imported here, because boards do not need it and have little memory.
    from etfarm.device_agents.adb import AdbServer
    from etfarm.device_agents.daemon.phones.fleet import Fleet

    adb = AdbServer()
    await adb.start_server()
    fleet = Fleet(adb, agent, agent_id, cache, config)
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
        await end_tasks(stopped, asking)


def _device(config: AgentConfig) -> device_pb2.Device:
    """Return the device that the agent serves, without ids."""
    emulator = config.emulator
    device = emulator.device(config.cores) if emulator else inventory.parse(inventory.collect(), config.cores)
    if not device.cores:
        wanted = inventory.format_cpu_list(config.cores or ())
        raise error_for("NO_CORES", f"None of the cpus {wanted} may be used here.", "Choose others with --cores.", cores=wanted)
    if emulator is not None and "sme" in device.features:
        log.warning("--cpu %s: %s", emulator.cpu, SME_WARNING)
    device.name = config.name
    device.concurrent_runs = config.concurrent_runs
    device.labels.update(config.labels)
    return device


def _device_ids(config: AgentConfig, agent_id: str) -> list[str]:
    """Return the ids that the agent may have for this machine, or for the processor that it emulates; the preferred one first."""
    if config.emulator is not None:
        return [emulated_id(agent_id, config.emulator.arch, config.emulator.cpu)]
    try:
        machine_id = Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        machine_id = ""
    # Agents of any kind may get their folder from $ETFARM_DATA, so such a folder is not *the* default.
    is_default = not os.environ.get(DATA_VARIABLE) and config.data.resolve() == default_data_folder().resolve()
    own = device_id(machine_id, agent_id, is_default_folder=False)
    return [device_id(machine_id, agent_id, is_default_folder=True), own] if is_default else [own]


def _print_line(line: str) -> None:
    print(printable(line), flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `etfarm agent`."""
    agent = argparse.ArgumentParser(
        prog="etfarm agent",
        description="Serve this machine as a device of a farm. It dials out to the server, so it works behind NAT; it runs "
        "programs one at a time (see --concurrent-runs), each in a process of its own. The token is read from ETFARM_TOKEN; a "
        "one-time token of `etfarm tokens create NAME --agent` is exchanged for the agent's own token at the first start.",
    )
    add_options(agent, (*options_of(AgentConfig), PRINT_UNIT))
    return agent


def parse(agent: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; where they contradict each other, end the process with usage's exit code."""
    options = agent.parse_args(argv)
    if options.server is None:
        options.server = os.environ.get(SERVER_VARIABLE)
    if not options.server:
        agent.error(f"give --server ADDR, or set {SERVER_VARIABLE}")
    if options.cpu and not options.emulate:
        agent.error("--cpu requires --emulate")
    if (options.phone_runner or options.phone_limit is not None) and not options.adb:
        agent.error("--phone-runner and --phone-limit require --adb")
    if options.adb and options.concurrent_runs != 1:
        agent.error("--concurrent-runs cannot be combined with --adb: phones run one program at a time")
    if options.adb and (options.emulate or options.cores):
        agent.error(
            "--adb cannot be combined with --emulate or --cores: start one agent for phones and another one for this machine"
        )
    return options


def config_of(options: argparse.Namespace) -> AgentConfig:
    """Return the configuration that the command line specifies.

    Raises:
        EmulatorMissing: the emulator is not installed.
    """
    config = built(AgentConfig, options)
    # What is not chosen depends on what is served.
    name, data = socket.gethostname(), config.data
    if config.phones is not None:
        name, data = "", phones_data_folder()
    elif config.emulator is not None:
        name, data = f"{name}-{config.emulator.cpu}", emulated_data_folder(config.emulator)
    return replace(config, name=config.name or name, data=options.data or data)
