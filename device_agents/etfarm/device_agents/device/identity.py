"""Ids of devices: equal after a reinstallation of the agent, different for agents that share a machine."""

from __future__ import annotations

import hashlib
import re
from typing import Final

_MACHINE_ID: Final = re.compile(r"[0-9a-f]{32}")
"""Source: machine-id(5)."""


def device_id(machine_id: str, agent_id: str, *, is_default_folder: bool) -> str:
    """Return the id of this machine as a device: 16 hex digits that depend on the machine, or the agent's id.

    An agent with its own data folder is a separate device, since a second agent on the machine would otherwise take the
    first one's place; its id depends on the machine and the agent. Without a machine id the agent's id is used: the placeholder
    in an image before its first start ("uninitialized"), or a file damaged by a power cut, may be the same on other machines.

    Args:
        machine_id: the content of /etc/machine-id.
        agent_id: the agent's UUID.
        is_default_folder: whether the agent works in the default data folder.
    """
    if not _MACHINE_ID.fullmatch(machine_id):
        return agent_id
    # As machine-id(5) requires: the id itself stays here, and only a hash of it with etfarm's name is sent.
    text = f"{machine_id} etfarm" if is_default_folder else f"{machine_id} etfarm {agent_id}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def emulated_id(agent_id: str, arch: str, cpu: str) -> str:
    """Return the id of an emulated device: 16 hex digits that depend on the agent and the processor, not on the machine."""
    return hashlib.sha256(f"{agent_id} etfarm {arch} {cpu}".encode()).hexdigest()[:16]
