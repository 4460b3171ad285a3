"""The systemd unit of `etfarm agent ... --print-unit`, which runs the same command from the board's start on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from etfarm.wire import systemd
from etfarm.wire.names import DATA_VARIABLE, SERVER_VARIABLE, TLS_CA_VARIABLE, TOKEN_VARIABLE

UNIT_NAME: Final = "etfarm-agent"
TOKEN_FILE: Final = "/etc/etfarm/agent.env"
"""File with the token, which only root, and thus systemd, can read; the token is in no unit, command line or file of the agent.
"""
_STATE: Final = "etfarm"
"""Folder below /var/lib that serves as root's data folder: the agent's own default is then /var/lib/etfarm/agent."""
_VARIABLES: Final = (
    SERVER_VARIABLE, TLS_CA_VARIABLE, DATA_VARIABLE, "ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT",
)  # fmt: skip
"""Environment variables that the command reads, except for the token."""
_OPTIONS: Final = {SERVER_VARIABLE: "--server", TLS_CA_VARIABLE: "--tls-ca", DATA_VARIABLE: "--data"}
"""Options that take the place of variables."""
_JAIL_CAPABILITIES: Final = "CAP_SETUID CAP_SETGID CAP_SETPCAP CAP_CHOWN CAP_KILL"
"""Capabilities with which the agent gives each program its own user with fewer rights, and ends it."""

_STEPS: Final = """\
#   sudo install -D -m 600 /dev/null {token_file}
#   echo {token}=... | sudo tee {token_file} >/dev/null    # where the server asks for a token
"""
_NOTES: Final = """\
# It runs as root, since only root may set the cpus' governor for a measurement, which makes times repeatable. To run it as an
# unprivileged user instead: `sudo systemctl edit {name}`, with [Service] and DynamicUser=yes; reports then say that the
# governor was left as it was.
"""
_SERVICE: Final = """\
# Boards come before their network, and networks go: it is restarted forever.
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=:{command}
EnvironmentFile=-{token_file}
{settings}Restart=always
RestartSec=5
# The agent signs off and ends its runner. Whatever is left then is killed.
KillMode=mixed
TimeoutStopSec=15
# Where memory runs out the program goes, which has a higher score, and the agent stays and reports it.
OOMScoreAdjust=-500
OOMPolicy=continue

# What the agent can break; it confines programs further itself: to a user of their own, their folder and no network. Nothing here
# filters system calls, which the agent does for its programs without slowing down what is measured, and /sys stays
# writable for the governor (so no ProtectKernelTunables). Root may read all files, as a user's TLS key, and write its own.
NoNewPrivileges=yes
{protection}PrivateTmp=yes
ProtectControlGroups=yes
# systemd has read it; neither the agent nor a program needs to.
InaccessiblePaths=-{token_file}
LimitCORE=0
UMask=0077
"""


def unit(
    arguments: Sequence[str],
    *,
    program: Sequence[str],
    environment: Mapping[str, str] | None = None,
    own_data: bool = False,
    phones: bool = False,
    folder: Path | None = None,
) -> str:
    """Return the unit's text. No I/O.

    Args:
        arguments: the arguments of `etfarm agent` as the user typed them.
        program: the absolute path of the program that takes them, and what precedes them.
        environment: the command's environment; the variables that an agent reads are kept, except for the token, which comes from
            TOKEN_FILE.
        own_data: whether the data folder is the user's choice, and not the default.
        phones: whether the agent serves phones; an adb server that it starts keeps its keys in root's home.
        folder: the base of relative paths among the arguments; None if there are none.

    Raises:
        UserError: an argument is not valid text, which a unit cannot hold.
    """
    typed = {each.partition("=")[0] for each in arguments}
    variables = {name: (environment or {}).get(name) for name in _VARIABLES if _OPTIONS.get(name) not in typed}
    settings = [
        *systemd.environment({name: value for name, value in variables.items() if value}),
        *systemd.working_directory(folder),
    ]
    if not own_data:
        settings += systemd.state_directory(_STATE, "XDG_DATA_HOME=%S")
    if phones:
        # adb's keys may be anywhere, and programs run elsewhere.
        protection = ["CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE", "ProtectSystem=full"]
    elif own_data:
        # The written files may be anywhere and belong to any user.
        protection = [f"CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE {_JAIL_CAPABILITIES}", "ProtectSystem=full"]
    else:
        protection = [
            f"CapabilityBoundingSet=CAP_DAC_READ_SEARCH {_JAIL_CAPABILITIES}",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
        ]
    # A machine may have one of each.
    name = f"{UNIT_NAME}-phones" if phones else UNIT_NAME
    return systemd.unit_of(
        "agent", name, "agent: serves this machine as a device of a farm",
        steps=_STEPS.format(token=TOKEN_VARIABLE, token_file=TOKEN_FILE),
        notes=_NOTES.format(name=name),
        service=_SERVICE.format(
            token_file=TOKEN_FILE,
            command=" ".join(map(systemd.quoted, [*program, *arguments])),
            settings="".join(f"{line}\n" for line in settings),
            protection="".join(f"{line}\n" for line in protection),
        ),
    )  # fmt: skip


def unit_of_this(arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """Return the unit for the current command: this program, these arguments, this environment.

    Args:
        arguments: the arguments of `etfarm agent`.
        options: the parsed arguments; relative paths among them refer to the working folder, and `data` is the data folder.
    """
    return unit(
        arguments,
        program=[*systemd.own_program(), "agent"],
        environment=os.environ,
        own_data=bool(options.get("data") or os.environ.get(DATA_VARIABLE)),
        phones=bool(options.get("adb")),
        folder=systemd.base_of(options.values()),
    )
