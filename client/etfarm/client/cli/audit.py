"""Step 10, command line: `etfarm audit`, who did what."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import STDOUT, execute, run_async

if TYPE_CHECKING:
    from etfarm.client.access import AuditEntry


def main(argv: list[str]) -> int:
    """Runs `etfarm audit`."""
    return execute(audit, argv, "audit")


def audit(
    principal: Annotated[str, typer.Option("--principal", metavar="NAME", help="Only what this principal did.")] = "",
    action: Annotated[str, typer.Option("--action", metavar="RPC", help="Only this, such as JobService.Submit.")] = "",
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, max=1_000_000, help="At most so many entries. [100]")] = 100,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write them as JSON there; - is stdout.")] = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Who changed what and who was refused, newest first. Admins only."""
    from rich.text import Text

    from etfarm.client.access import open_access
    from etfarm.client.cli import output

    async def fetch() -> list[AuditEntry]:
        async with open_access(server, tls_ca=tls_ca) as access:
            return await access.audit(principal=principal, action=action, most=most)

    found = run_async(fetch)
    if json is not None:
        _write(json, found)
        if json == STDOUT:
            return
    if not found:
        print("The audit log has no such entry.")
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
        for entry in found
    ]
    heads = ("#", "TIME", "NAME", "ROLE", "FROM", "ACTION", "SUBJECT", "OUTCOME", "DETAIL")
    output.show_table(heads, rows, right=("#",), shrink=("DETAIL", "SUBJECT", "NAME"))


def _write(file: str, entries: list[AuditEntry]) -> None:
    import json
    from pathlib import Path

    from etfarm.client.cli.app import must_be_writable, write_whole
    from etfarm.client.cli.terminal import put

    documents = [
        {name: value.isoformat() if isinstance(value, datetime) else value for name, value in vars(entry).items()}
        for entry in entries
    ]
    text = json.dumps(documents, indent=2) + "\n"
    if file == STDOUT:
        put(text)
    else:
        must_be_writable(Path(file))
        write_whole(Path(file), text.encode())
