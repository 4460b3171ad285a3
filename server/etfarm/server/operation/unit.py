"""The systemd unit of `etfarm serve ... --print-unit`, which runs the same command from the machine's start on."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from etfarm.server.config import LOCAL
from etfarm.server.operation.settings import Setting, has_secret, option_of, variable_of
from etfarm.wire import systemd
from etfarm.wire.errors import UserError
from etfarm.wire.names import DATA_VARIABLE, SETTING_PREFIX

UNIT_NAME: Final = "etfarm-server"
USER: Final = "etfarm"
STATE: Final = "etfarm-server"
"""Folder below /var/lib with the server's data, unless the command names another one."""

_READ: Final = {
    "database": re.compile(r"PG[A-Z]+"),
    "blobs": re.compile(r"AWS_(ENDPOINT_URL|ENDPOINT_URL_S3|REGION|DEFAULT_REGION)"),
    "keys": re.compile(r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)"),
    "compile_pool": re.compile(r"RAY_\w+"),
    "otlp": re.compile(r"OTEL_\w+"),
}  # fmt: skip
"""Names of the variables of each engine, which libpq, this server, Ray and OpenTelemetry read."""
_SECRET: Final = re.compile(r"PASSWORD|ACCESS_KEY|TOKEN\b|HEADERS")
"""In the names of variables whose values are secrets."""
SECRETS: Final = "/etc/etfarm/server.env"
"""File of the variables whose values the unit does not show."""
_STOP_S: Final = 30
"""Seconds beyond the drain's time limit after which systemd kills a server that does not stop."""

_STEPS: Final = """\
#   sudo useradd --system --home-dir /var/lib/{state} --shell /usr/sbin/nologin {user}
#   sudo install -d -m 700 -o {user} -g {user} {data}
{steps}#   {first_token}
"""
_NOTES: Final = """\
# `systemctl reload {name}` reads renewed TLS files, which the server also does by itself. `systemctl stop` lets running work go
# on for --drain-timeout; a second signal (`systemctl kill {name}`) stops at once. Nothing is lost either way.
"""
_SERVICE: Final = """\

[Service]
Type=notify
NotifyAccess=main
ExecStart=:{command}
ExecReload=/bin/kill -HUP $MAINPID
User={user}
{settings}Restart=on-failure
RestartSec=2
# A new version may have to convert its database first.
TimeoutStartSec=15min
TimeoutStopSec={stop_s}s
# The event loop sends a sign of life twice in this time.
WatchdogSec=60
# Only the server gets the signal: compilations end with it.
KillMode=mixed
LimitNOFILE=65536
LimitCORE=0
TasksMax=infinity
# For the memory limits of compilations.
Delegate=yes
# Where memory runs out a compilation goes, and the server stays and reports it.
OOMPolicy=continue

# What the server can break. Compilations confine themselves further, with namespaces of their own: nothing here forbids
# namespaces, nor covers a part of /proc, without which a child could not mount its own (so no ProtectKernelTunables,
# ProtectKernelLogs, ProtectHostname or ProcSubset).
NoNewPrivileges=yes
CapabilityBoundingSet=
{protection}PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectKernelModules=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
"""


def unit(
    arguments: Sequence[str],
    *,
    program: Sequence[str],
    environment: Mapping[str, str],
    drain_s: float,
    engines: Collection[str] = (),
    data: Path | None = None,
    folder: Path | None = None,
    database: Sequence[str] = (),
) -> str:
    """Return the unit's text. No I/O.

    Args:
        arguments: the arguments of `etfarm serve` as the user typed them.
        program: the command `etfarm`.
        environment: the command's environment; the variables that the server reads are kept, and of secrets only the names.
        drain_s: the time limit of a graceful stop.
        engines: those that the server uses, see `engines_of`.
        data: the data folder, if it is the user's choice and not the default.
        folder: the base of relative paths among the arguments; None if there are none.
        database: the options by which another command finds the server's database, see `database_options`.

    Raises:
        UserError: an argument is not valid text, which a unit cannot hold.
    """
    variables = {name: value for name, value in sorted(environment.items()) if _is_read(name, engines)}
    secrets = [name for name, value in variables.items() if _is_secret(name, value)]
    settings = systemd.environment({name: value for name, value in variables.items() if name not in secrets})
    if secrets:
        settings += [f"# Has the secrets of this command's environment: {' '.join(secrets)}", f"EnvironmentFile={SECRETS}"]
    steps = (
        [
            f"sudo test -e {SECRETS} || sudo install -D -m 600 /dev/null {SECRETS}",
            f"# then write NAME=VALUE in {SECRETS} for {' '.join(secrets)}",
        ]
        if secrets
        else []
    )
    if files := [name for name, value in variables.items() if value.startswith("/") and not name.startswith(SETTING_PREFIX)]:
        steps.append(f"# {USER} must be able to read the files that {' '.join(files)} name")
    settings += systemd.working_directory(folder)
    if data is None:
        settings += systemd.state_directory(STATE, f"{SETTING_PREFIX}DATA=%S/{STATE}")
        protection = ["ProtectSystem=strict", "ProtectHome=read-only"]
    else:
        # The data may be anywhere.
        protection = ["ProtectSystem=full"]
    where = str(data or f"/var/lib/{STATE}")
    first_token = [*program, "tokens", "init", "ann", "--data", where, *database]
    command = [*program, "serve", *arguments]
    of_database = {name: value for name, value in variables.items() if _of_database(name)}
    return systemd.unit_of(
        "serve", UNIT_NAME, "server: compiles models and sends them to the devices of a farm",
        steps=_STEPS.format(
            state=STATE, user=USER, data=where, steps="".join(f"#   {step}\n" for step in steps),
            first_token=_as_service(first_token, of_database, secrets),
        ),
        notes=_NOTES.format(name=UNIT_NAME),
        service=_SERVICE.format(
            user=USER, command=" ".join(map(systemd.quoted, command)), stop_s=math.ceil(drain_s) + _STOP_S,
            settings="".join(f"{line}\n" for line in settings), protection="".join(f"{line}\n" for line in protection),
        ),
    )  # fmt: skip


def _of_database(name: str) -> bool:
    """Return whether a variable says where the database is, or how to connect to it."""
    return name == variable_of("database") or _READ["database"].fullmatch(name) is not None


def _as_service(command: Sequence[str], variables: Mapping[str, str], secrets: Collection[str]) -> str:
    """Return the line of a shell that runs a command as the service's user, with the service's variables."""
    shown = [f"{name}={value}" for name, value in variables.items() if name not in secrets]
    if len(shown) < len(variables):
        # Only systemd reads the file of the secrets for another user.
        run = ["systemd-run", "--quiet", "--pipe", "--wait", f"--uid={USER}", f"--property=EnvironmentFile={SECRETS}"]
        return shlex.join(["sudo", *run, *(f"--setenv={each}" for each in shown), *command])
    return shlex.join(["sudo", "-u", USER, *(["env", *shown] if shown else []), *command])


def _is_read(name: str, engines: Collection[str]) -> bool:
    """Return whether the server reads a variable."""
    is_own = name == DATA_VARIABLE or name.startswith(SETTING_PREFIX)
    return is_own or any(_READ[engine].fullmatch(name) for engine in engines)


def _is_secret(name: str, value: str) -> bool:
    """Return whether a variable's value must not be shown."""
    return _SECRET.search(name) is not None or has_secret(option_of(name), value)


def refuse_secrets(settings: Sequence[Setting]) -> None:
    """Check that no option of the command line has a secret, which the unit's command would show.

    Args:
        settings: the effective options with their sources.

    Raises:
        UserError: one has.
    """
    for each in settings:
        if each.source == f"--{each.name}" and each.has_secret:
            example = '["URL"]' if isinstance(each.value, list) else '"URL"'
            raise UserError(
                f"The unit would show the secret in --{each.name}.",
                f"Name a file with --config that only the server may read, and write {each.name} = {example} there.",
            )


def engines_of(settings: Mapping[str, object]) -> list[str]:
    """Return the engines with variables of their own that a server uses.

    Args:
        settings: the effective options by destination.
    """
    used = [name for name in ("database", "blobs", "otlp") if settings[name]]
    used += ["keys"] if settings["blobs"] and not settings["blobs_credentials"] else []
    return used + (["compile_pool"] if settings["compile_pool"] != LOCAL else [])


def database_options(settings: Sequence[Setting], config: Path | None) -> list[str]:
    """Return the options by which another command finds the server's database; none for SQLite, and for a URL with a secret.

    Args:
        settings: the effective options with their sources.
        config: the configuration file, if there is one.
    """
    setting = next(each for each in settings if each.name == "database")
    if setting.value is None:
        return []
    if setting.source in ("--database", variable_of("database")):
        return [] if setting.has_secret else ["--database", setting.value.text]
    return ["--config", str(config.absolute())] if config is not None else []


def unit_of_this(
    arguments: Sequence[str],
    options: Mapping[str, object],
    *,
    engines: Collection[str],
    is_data_chosen: bool,
    drain_s: float,
    database: Sequence[str] = (),
) -> str:
    """Return the unit for the current command: this program, these arguments, this environment.

    Args:
        arguments: the arguments of `etfarm serve`.
        options: the parsed arguments; relative paths among them refer to the working folder.
        engines: those that the server uses, whatever names them.
        is_data_chosen: whether the command names the data folder.
        drain_s: the time limit of a graceful stop.
        database: the options by which another command finds the server's database.
    """
    chosen = options.get("data") if is_data_chosen else None
    return unit(
        arguments,
        program=systemd.own_program(),
        environment=os.environ,
        drain_s=drain_s,
        engines=engines,
        data=chosen.absolute() if isinstance(chosen, Path) else None,
        folder=systemd.base_of(options.values()),
        database=database,
    )
