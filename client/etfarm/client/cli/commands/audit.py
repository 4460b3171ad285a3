"""`etfarm audit`: changes and refused calls, with their principals."""

from __future__ import annotations

from typing import Annotated

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key


def main(argv: list[str]) -> int:
    """Run `etfarm audit`."""
    return execute(audit, argv, "audit")


def audit(
    listing: Annotated[JsonListing, Key("audit")],
    connection: Connection,
    principal: Annotated[str, typer.Option("--principal", metavar="NAME", help="Only what this principal did.")] = "",
    action: Annotated[str, typer.Option("--action", metavar="RPC", help="Only this rpc, such as JobService.Submit.")] = "",
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=1, max=1_000_000, help="How many entries to list at most.")
    ] = 100,
) -> None:
    """List who changed what, and who was refused, newest first. Admins only."""
    from rich.text import Text

    from etfarm.client.admin.access import AccessControl
    from etfarm.client.cli.terminal import output

    entries = listing.record(
        connection.call_stubs(lambda stubs: AccessControl(stubs).audit(principal=principal, action=action, most=most))
    )
    if listing.is_on_stdout:
        return
    if not entries:
        print("No entry of the audit log matches.")
        return
    rows = [
        (
            str(entry.number),
            entry.at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            entry.principal or "-",
            entry.role or "-",
            entry.peer,
            entry.action,
            entry.subject or "-",
            Text(entry.outcome, style="" if entry.outcome == "OK" else "yellow"),
            entry.detail,
        )
        for entry in entries
    ]
    heads = ("#", "TIME", "NAME", "ROLE", "FROM", "ACTION", "SUBJECT", "OUTCOME", "DETAIL")
    output.show_table(heads, rows, right=("#",), shrink=("DETAIL", "SUBJECT", "NAME"))
