"""What is printed of devices that were retired, and of agents that were removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etfarm.client.models import RemovedAgent, RetiredDevice


def describe_retirement(retired: RetiredDevice) -> Iterator[str]:
    """Yield sentences on a retired device: what became of its runs, of its agent, and of the agent's token."""
    device, agent_id = retired.device, retired.device.agent_id
    if count := len(retired.ended_attempts):
        yield f"{count} run{'s' if count > 1 else ''} on {device.name} {'were' if count > 1 else 'was'} ended."
    yield f"Device {device.name} ({device.id}) is retired; its reports stay."
    if not agent_id:
        yield "The server's first answer was lost: `etfarm agents list` shows whether its agent is refused."
        return
    if retired.other_devices:
        also = ", ".join(each[:12] for each in retired.other_devices)
        yield f"Agent {agent_id} also has {also}, so it keeps its token, and {device.name} is back when it announces it again."
    elif retired.revoked_tokens:
        yield f"{_revoked(retired.revoked_tokens)} Agent {agent_id} is refused."
    else:
        yield f"Agent {agent_id} is refused; its token is not its alone, and stays valid for others."


def describe_removal(removed: RemovedAgent) -> Iterator[str]:
    """Yield sentences on a removed agent and its tokens."""
    yield f"Agent {removed.agent.agent_id} is removed."
    if removed.revoked_tokens:
        yield _revoked(removed.revoked_tokens)
    elif removed.agent.principal:
        yield f"It had no token of its own: with one of {removed.agent.principal} that is valid, it can connect as a new agent."


def _revoked(tokens: Sequence[str]) -> str:
    return f"Token{'s' if len(tokens) > 1 else ''} {', '.join(tokens)} revoked."
