"""The command line of `etfarm serve`, and that of commands that work on a server's data, which share its sources."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from etfarm.server.config import Config
from etfarm.server.operation import settings
from etfarm.server.operation.settings import Setting
from etfarm.wire.names import SETTING_PREFIX
from etfarm.wire.options import PRINT_UNIT, Option, add_options, built, options_of

_OF_COMMAND = (
    Option(
        flag="--config", metavar="FILE", read=Path, only_on_line=True,
        help='TOML of these options without their dashes, as tls-cert = "ca.pem". Options on the command line '
        f"win, then variables such as {SETTING_PREFIX}TLS_CERT, then this file",
    ),
    Option(
        flag="--check", default=False, only_on_line=True, in_unit=False,
        help="print the configuration with its sources, the measures of the jail and every problem, and exit: "
        "with 1 if the server would not start",
    ),
    Option(flag="--json", default=False, only_on_line=True, in_unit=False, help="with --check: as JSON, etfarm.serve_check/1"),
    PRINT_UNIT,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `etfarm serve`."""
    serve = argparse.ArgumentParser(
        prog="etfarm serve",
        description="Run the compile server: it lowers models, sends programs to the devices whose agents connect to it, and "
        "keeps what they measured.",
    )
    add_options(serve, (*_OF_COMMAND, *options_of(Config)))
    return serve


def config_of(arguments: argparse.Namespace) -> Config:
    """Return the configuration that the command line specifies, not yet checked."""
    return built(Config, arguments)


def read_configuration(path: Path) -> argparse.Namespace:
    """Return the options of `etfarm serve` with a configuration file alone.

    Raises:
        BAD_SETTING: the file is not valid.
    """
    return settings.parse(parser(), ["--config", str(path)], {})[0]


def parse_command(command: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[Setting]]:
    """Return the options of a command that has some of the server's, and each one's value with its source.

    Raises:
        BAD_SETTING: the configuration file or a variable is not valid for `etfarm serve`.
    """
    return settings.parse(command, argv, os.environ, parser())
