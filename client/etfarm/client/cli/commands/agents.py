"""`etfarm agents`: agent identities, the principals that may use them, and their versions."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.errors import DONE, FAILED
from etfarm.wire.errors import EtfarmError, error_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import Agent

MAX_PARALLEL = 64
"""Maximum number of agents that are upgraded at the same time: each is a stream to the server."""

_STEPS = {
    "DRAINING": "drains its devices", "DOWNLOADING": "downloads the wheel", "INSTALLING": "installs it",
    "RESTARTING": "starts the new version", "DONE": "is done",
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run `etfarm agents`."""
    commands: dict[str, Command] = {"list": list_, "bind": bind, "remove": remove, "upgrade": upgrade}
    return execute(commands, argv, "agents", "List agents, bind them to tokens, upgrade and remove them. Admins only.")


def list_(listing: Annotated[JsonListing, Key("agents")], connection: Connection) -> None:
    """List the known agents with their principals and versions, and unbound identities that were refused."""
    from etfarm.client.cli.terminal import output

    agents = listing.record(connection.call(lambda farm: farm.agents()))
    if listing.is_on_stdout:
        return
    if not agents:
        print("No agent has connected yet: run `etfarm agent` on a device.")
        return
    rows = [
        (
            agent.agent_id,
            agent.principal or (f"not bound; {agent.refused_principal} was refused" if agent.refused_principal else "not bound"),
            "connected" if agent.connected else "retired" if agent.retired else "offline",
            f"{agent.version or '-'}{' (only upgrades)' if agent.outdated else ''}",
            ", ".join(agent.device_ids) or "-",
        )
        for agent in agents
    ]
    output.show_table(("AGENT", "PRINCIPAL", "STATE", "VERSION", "DEVICES"), rows, shrink=("DEVICES",))


def bind(
    connection: Connection,
    agent_id: Annotated[str, typer.Argument(metavar="AGENT", help="The agent identity, as `etfarm agents list` shows it.")],
    principal: Annotated[str, typer.Argument(metavar="NAME", help="Principal whose token may connect as the agent from now on.")],
) -> None:
    """Bind an agent identity to a principal, and end a connection that uses another principal's token.

    A retired agent is admitted again. If its token was its alone, that stays revoked, and the agent needs a one-time token.
    """
    agent = connection.call(lambda farm: farm.bind_agent(agent_id, principal))
    tell(f"Agent {agent.agent_id} belongs to {agent.principal}.")
    if agent.retired:
        tell(
            "It was retired, and is admitted again. A token that was its alone stays revoked: if it is refused, start it with "
            f"the ETFARM_TOKEN of `etfarm tokens create {agent.principal} --agent`."
        )


def remove(
    connection: Connection,
    agent: Annotated[str, typer.Argument(metavar="ID|NAME", help="The agent's id, or the principal that has this agent only.")],
) -> None:
    """Remove an agent without devices: revoke its token, end its connection, and forget its identity."""
    from etfarm.client.cli.views.devices import describe_removal

    for line in describe_removal(connection.call(lambda farm: farm.remove_agent(agent))):
        tell(line)


def upgrade(
    outcome: Outcome,
    listing: Annotated[JsonListing, Key("agents")],
    connection: Connection,
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help="The agents of the devices that match.")] = "",
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel",
            metavar="FILE",
            help="The wheel of etfarm: pip wheel --no-deps . (default: the server's own, `serve --agent-wheel`).",
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All connected agents.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the first agent.")] = False,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=MAX_PARALLEL, help="How many agents at the same time.")
    ] = 1,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Upgrade the others, too, after one that fails.")] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            metavar="S",
            min=0,
            max=86_400,
            callback=options.finite,
            help="How long the runs of an agent's devices may take.",
        ),
    ] = 3600.0,
    limit: Annotated[
        float,
        typer.Option(
            "--connect-timeout",
            metavar="S",
            min=5,
            max=3600,
            callback=options.finite,
            help="How long a new version may take to connect before the former one runs again.",
        ),
    ] = 60.0,
) -> int:
    """Upgrade agents to a wheel, one after the other: drain their devices, install, restart. Stop after one that fails.

    Agents take upgrades if they were started with --allow-upgrade; others are listed and left out. An agent whose new version
    does not connect in time runs its former version again. Exits with 1 if an agent was not upgraded.
    """
    if bool(selector) == all_:
        raise error_for("USAGE", "Give a SELECTOR, or --all.", "For example: etfarm agents upgrade label.rack=3 --wheel FILE.")
    if wheel is not None and not wheel.is_file():
        raise error_for("USAGE", f"There is no file {wheel}.", "Build the wheel with `pip wheel --no-deps .`.", path=wheel)

    async def upgrade_chosen(farm: AsyncFarm) -> int:
        chosen = await _choose(farm, selector)
        name, digest = await _wheel_of(farm, wheel)
        willing = [agent for agent in chosen if agent.allows_upgrade]
        for agent in chosen:
            if not agent.allows_upgrade:
                why = "was started without --allow-upgrade" if agent.connected else "is offline"
                tell(f"Agent {_name(agent)} {why}; it is left out.", to_stderr=True)
        if willing and not yes:
            text = f"Upgrade {len(willing)} of {len(chosen)} agents to {name} (sha256 {digest})?"
            await asyncio.to_thread(typer.confirm, text, abort=True, err=True)
        carry_out = partial(_upgrade, farm, digest=digest, drain_s=drain, limit_s=limit)
        failed, untried = await upgrade_all(willing, carry_out, parallel, keep_going=keep_going)
        for what, agents in (("not upgraded", failed), ("not tried, since one failed", untried)):
            if agents:
                names = ", ".join(map(_name, agents))
                tell(f"{len(agents)} agent{'s' if len(agents) > 1 else ''} {what}: {names}.", to_stderr=True)
        code = FAILED if failed or untried or len(willing) < len(chosen) else DONE
        known = {agent.agent_id: agent for agent in await farm.agents()}
        after = listing.record([known[agent.agent_id] for agent in chosen if agent.agent_id in known])
        counts = Counter(agent.version or "an unknown version" for agent in after)
        summary = ", ".join(f"{count} x etfarm {version}" for version, count in sorted(counts.items()))
        tell(f"Versions now: {summary}.", to_stderr=listing.is_on_stdout)
        return code

    return connection.call(upgrade_chosen, outcome)


async def _choose(farm: AsyncFarm, selector: str) -> list[Agent]:
    """Return the connected agents of the devices that match; all connected agents without a selector.

    Raises:
        USAGE: no agent matches.
    """
    wanted = {device.id for device in await farm.devices(selector)} if selector else None
    agents = [agent for agent in await farm.agents() if wanted is None or wanted.intersection(agent.device_ids)]
    chosen = [agent for agent in agents if agent.connected or selector]
    if not chosen:
        raise error_for(
            "USAGE",
            f"No agent serves a device that matches {selector!r}." if selector else "No agent is connected.",
            "`etfarm agents list` shows them.",
        )
    return chosen


async def _wheel_of(farm: AsyncFarm, path: Path | None) -> tuple[str, str]:
    """Return what the wheel is called, and its digest; it is uploaded, or the server's own.

    Raises:
        USAGE: no wheel is given, and the server has none.
    """
    if path is not None:
        return path.name, await farm.upload_wheel(path)
    wheel = (await farm.info()).agent_wheel
    if wheel is None:
        raise error_for(
            "USAGE",
            "This server has no wheel for its agents, so --wheel FILE is required.",
            "Build one with `pip wheel --no-deps .` in a checkout of the new version; `etfarm serve --agent-wheel FILE` makes it "
            "the default.",
        )
    return f"etfarm {wheel.version}, the server's wheel", wheel.digest


async def upgrade_all(
    agents: Sequence[Agent], carry_out: Callable[[Agent], Awaitable[bool]], parallel: int, *, keep_going: bool
) -> tuple[list[Agent], list[Agent]]:
    """Upgrade agents, several at a time; return those that failed, and those that were not tried.

    Args:
        carry_out: upgrades one agent, and returns whether it runs the new version.
        parallel: maximum number of agents at the same time.
        keep_going: whether to go on after one that fails. Upgrades that have begun end in any case.
    """
    waiting = deque(agents)
    failed: list[Agent] = []

    async def work() -> None:
        while waiting and (keep_going or not failed):
            agent = waiting.popleft()
            if not await carry_out(agent):
                failed.append(agent)

    async with asyncio.TaskGroup() as workers:
        for number in range(min(parallel, len(agents))):
            workers.create_task(work(), name=f"upgrades-{number}")
    return failed, list(waiting)


async def _upgrade(farm: AsyncFarm, agent: Agent, *, digest: str, drain_s: float, limit_s: float) -> bool:
    """Upgrade one agent and print its steps; return whether it runs the new version."""
    try:
        async for step in farm.upgrade_agent(agent.agent_id, digest, drain_s=drain_s, time_limit_s=limit_s):
            if step.phase == "DONE":
                tell(f"{_name(agent)}: etfarm {step.former_version or '?'} -> {step.version}", to_stderr=True)
            else:
                waits = f": waiting for {step.message}" if step.message else ""
                tell(f"{_name(agent)}: {_STEPS.get(step.phase, step.phase)}{waits}", to_stderr=True)
    except EtfarmError as error:
        tell(f"etfarm: {error}", to_stderr=True)
        return False
    return True


def _name(agent: Agent) -> str:
    return f"{agent.host} ({agent.agent_id[:8]})" if agent.host else agent.agent_id
