"""`etfarm agents`: agent identities and the principals that may use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.terminal.capabilities import tell

if TYPE_CHECKING:
    from etfarm.client.models import Agent


def main(argv: list[str]) -> int:
    """Run `etfarm agents`."""
    return execute({"list": list_, "bind": bind}, argv, "agents", "Lists agent identities and binds them to tokens. Admins only.")


def list_(
    context: typer.Context,
    json: options.ListJson = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """List the known agent identities with their principals, and those that were refused because they are not bound."""
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal import output

    listing = JsonListing(context.obj, json, "agents")

    async def fetch() -> list[Agent]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.agents()

    agents = listing.record(run_async(fetch))
    if listing.is_on_stdout:
        return
    if not agents:
        print("No agent has connected yet: run `etfarm agent` on a device.")
        return
    rows = [
        (
            agent.agent_id,
            agent.principal or (f"not bound; {agent.refused_principal} was refused" if agent.refused_principal else "not bound"),
            "connected" if agent.connected else "offline",
            ", ".join(agent.device_ids) or "-",
        )
        for agent in agents
    ]
    output.show_table(("AGENT", "PRINCIPAL", "STATE", "DEVICES"), rows, shrink=("DEVICES",))


def bind(
    agent_id: Annotated[str, typer.Argument(metavar="AGENT", help="The agent identity, as `etfarm agents list` shows it.")],
    principal: Annotated[str, typer.Argument(metavar="NAME", help="Principal whose token may connect as the agent from now on.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Bind an agent identity to a principal, and end a connection that uses another principal's token."""
    from etfarm.client.aio import AsyncFarm

    async def change() -> Agent:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.bind_agent(agent_id, principal)

    agent = run_async(change)
    tell(f"Agent {agent.agent_id} belongs to {agent.principal}.")
