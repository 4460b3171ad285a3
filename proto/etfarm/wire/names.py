"""Names that clients, agents and servers share: the protocol version, environment variables, folders of user data."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

PROTOCOL_VERSION = 4
"""The newest version of the contract that this code speaks (Hello.protocol_version, ServerInfo.protocol_version)."""
OLDEST_PROTOCOL_VERSION = 4
"""The oldest version that it speaks: that of 0.3.0, the first release."""

SERVER_VARIABLE = "ETFARM_SERVER"
TOKEN_VARIABLE = "ETFARM_TOKEN"
TLS_CA_VARIABLE = "ETFARM_TLS_CA"
DATA_VARIABLE = "ETFARM_DATA"
PROJECT_VARIABLE = "ETFARM_PROJECT"
SERVER_WAIT_VARIABLE = "ETFARM_SERVER_WAIT"
RESERVATION_VARIABLE = "ETFARM_RESERVATION"

SETTING_PREFIX: Final = "ETFARM_SERVE_"
"""Prefix of the variables for the options of `etfarm serve`: ETFARM_SERVE_TLS_CERT stands for --tls-cert."""
CONFIG_VARIABLE: Final = f"{SETTING_PREFIX}CONFIG"
"""The variable for the configuration file of `etfarm serve`."""

RETRY_LABEL: Final = "retry_of"
"""The label of a job that repeats cells of another one, whose id is its value."""

PROJECT_METADATA: Final = "etfarm-project"
"""The request metadata that selects the project that owns what a call creates."""

FORWARDED_PEER_METADATA: Final = "etfarm-forwarded-peer"
"""The request metadata that names the connection of the caller that a call is made for, as gRPC does: `ipv4:10.0.0.7:4711`."""
FORWARDED_KEY_METADATA: Final = "etfarm-forwarded-key"
"""The request metadata with the secret by which a server believes the one above."""

_PROJECT: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")


def is_project_name(text: str) -> bool:
    """Return whether the text is a valid name of a project."""
    return _PROJECT.match(text) is not None


TOKEN_PREFIX = "etf_"
"""Prefix of every token that a server creates, so that scanners for leaked secrets recognize it."""
ENROLMENT_PREFIX = "etfe_"
"""Prefix of every one-time enrolment token, which an agent exchanges for a token of its own (AgentService.Enroll)."""


def data_folder() -> Path:
    """Return the folder of a user's data: $ETFARM_DATA, else $XDG_DATA_HOME/etfarm, else ~/.local/share/etfarm."""
    if chosen := os.environ.get(DATA_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "etfarm"


def embedded_farm_folder() -> Path:
    """Return the data folder of a user's embedded farm, with its server's in `server` and its agent's in `agent`."""
    return data_folder() / "farm"


def boot_id() -> str:
    """Return the unique id of this boot of this machine (Hello.boot_id); empty if the kernel does not provide it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def prebuilt_runner() -> Path | None:
    """Return the archive of the runner bundle in the distribution `etfarm-runner`; None if that is not installed."""
    try:
        from etfarm_runner import BUNDLE
    except ImportError:
        return None
    return Path(BUNDLE)
