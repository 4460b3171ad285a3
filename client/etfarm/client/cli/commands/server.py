"""`etfarm server`: the state of a farm's server, its settings and its metrics."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.errors import EtfarmError, Kind

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import ServerInfo, ServerStatus


def main(argv: list[str]) -> int:
    """Run `etfarm server`."""
    return execute(show, argv, "server")


def show(
    listing: Annotated[JsonListing, Key("server", is_list=False)],
    connection: Connection,
    all_: Annotated[
        bool,
        typer.Option(
            "--all", help="Also show options that have their default, and metrics of calls and of the server's process."
        ),
    ] = False,
) -> None:
    """Show the farm's server: version, state, disk and your role; for admins, its settings and metrics.

    Each setting is shown with the option, variable or line of a file that it comes from. Secrets are not shown, and of URLs only
    the host.
    """

    async def fetch(farm: AsyncFarm) -> tuple[str, ServerInfo, ServerStatus | None]:
        info = await farm.info()
        return farm.address, info, await _fetch_status(farm, info)

    address, info, status = connection.call(fetch)
    listing.record(_document(info, status))
    if not listing.is_on_stdout:
        _show(address, info, status, is_all=all_)


async def _fetch_status(farm: AsyncFarm, info: ServerInfo) -> ServerStatus | None:
    """Return the settings and metrics; None if the caller is not an admin, or the server does not report them."""
    if info.role.upper() != "ADMIN":
        return None
    try:
        return await farm.server_status()
    except EtfarmError as error:
        if error.kind is not Kind.UNIMPLEMENTED:
            raise
        return None


def _document(info: ServerInfo, status: ServerStatus | None) -> dict[str, Any]:
    return {
        **{field.name: getattr(info, field.name) for field in fields(info)},
        "settings": None if status is None else status.settings,
        "metrics": None if status is None else status.metrics,
    }


def _show(address: str, info: ServerInfo, status: ServerStatus | None, *, is_all: bool) -> None:
    from etfarm.client.admin.server_report import describe_metrics, describe_server
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    facts = describe_server(info, address)
    facts.append(("Devices", f"{info.devices_online} of {info.devices_known} online"))
    facts.append(("Live jobs", str(info.live_jobs)))
    facts.append(("Compile workers", "ready" if info.workers_ready else "starting"))
    if info.disk_free_bytes is not None:
        facts.append(
            ("Disk", f"{units.size(info.disk_free_bytes)} free{': full, new work is refused' if info.is_disk_full else ''}")
        )
    if info.starting:
        facts.append(("Starting", info.starting))
    if info.is_stopping:
        facts.append(("Stopping", "finishes running work and refuses new work"))
    if info.bundle_error is not None:
        facts.append(("Runner", str(info.bundle_error)))
    output.show(output.facts(facts))
    if status is None:
        tell("An admin also sees the settings and metrics.")
        return
    settings = [(each.name, each.value, each.source) for each in status.settings if is_all or each.source != "default"]
    if settings:
        tell("")
        output.show_table(("SETTING", "VALUE", "FROM"), settings, shrink=("VALUE", "FROM"))
    if not status.metrics:
        tell("This server collects no metrics. `etfarm serve` does with --metrics HOST:PORT or --web.")
        return
    measures = [each for each in describe_metrics(status.metrics) if is_all or (each.is_own and not each.is_of_calls)]
    rows = [(measure.name, labels or "-", value, measure.about) for measure in measures for labels, value in measure.rows]
    if rows:
        tell("")
        output.show_table(("METRIC", "OF", "VALUE", "ABOUT"), rows, right=("VALUE",), shrink=("ABOUT", "OF"))
