"""The command line of `etfarm agent`."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from etfarm.device_agents.config import AgentConfig, emulated_data_folder, phones_data_folder
from etfarm.wire.names import SERVER_VARIABLE
from etfarm.wire.options import PRINT_UNIT, add_options, built, options_of


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
