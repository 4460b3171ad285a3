"""`etfarm retention`: deletion of what the farm no longer keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import tell


def main(argv: list[str]) -> int:
    """Run `etfarm retention`."""
    return execute(retention, argv, "retention")


def retention(
    listing: Annotated[JsonListing, Key("retention")],
    connection: Connection,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="NAME=LIMIT",
            help="A limit in place of the server's: NAME is jobs, logs, cache, artifacts or audit, LIMIT an age (90d), a size "
            "(200GiB), both (90d,200GiB) or forever; repeatable.",
        ),
    ] = None,
    dry_run: options.DryRun = False,
) -> None:
    """Delete what the server's limits no longer keep, which the server does every hour by itself. Admins only.

    Live and tagged jobs stay, as does everything that a job, a report, a session or an upload needs.
    """  # fmt: skip
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    results = listing.record(connection.call(lambda farm: farm.apply_retention(keep or (), dry_run=dry_run)))
    if listing.is_on_stdout:
        return
    rows = [(row.name, row.limit, f"{row.count:,}", units.size(row.size_bytes)) for row in results]
    output.show_table(("WHAT", "KEPT", "WOULD GO" if dry_run else "DELETED", "SIZE"), rows, right=("WOULD GO", "DELETED", "SIZE"))
    for row in results:
        if row.kept_count and row.kept_bytes is not None:
            what = "job that is live or tagged counts" if row.kept_count == 1 else "jobs that are live or tagged count"
            tell(f"{row.name}: {row.kept_count:,} {what} for the limit ({units.size(row.kept_bytes)}) and are never deleted.")
    if dry_run:
        tell("Nothing was deleted. Without --dry-run, the files of deleted jobs become deletable, too.")
