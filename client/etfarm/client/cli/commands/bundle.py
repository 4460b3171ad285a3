"""`etfarm bundle add` and `list`: the runners that the farm sends to devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import tell

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import Bundle


def add(argv: list[str]) -> int:
    """Run `etfarm bundle add`."""
    return execute(add_, argv, "bundle add")


def list_(argv: list[str]) -> int:
    """Run `etfarm bundle list`."""
    return execute(list_bundles, argv, "bundle list")


def add_(
    connection: Connection,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `etfarm bundle build -o FILE` wrote.")],
) -> None:
    """Upload a runner bundle; devices of its architecture get it from now on."""
    from etfarm.client.cli.arguments import require_file

    require_file(file)

    async def send(farm: AsyncFarm) -> tuple[Bundle, list[Bundle]]:
        return await farm.add_bundle(file), await farm.bundles()

    added, used = connection.call(send)
    _show([added])
    if added not in used:
        first = next(bundle for bundle in used if bundle.arch == added.arch)
        tell(
            f"It is stored but not used: the one of ExecuTorch {first.executorch}, which the farm lowers with, takes precedence."
        )


def list_bundles(listing: Annotated[JsonListing, Key("bundles")], connection: Connection) -> None:
    """List the runner bundles of the farm, newest first: for each architecture the one that is used."""
    bundles = listing.record(connection.call(lambda farm: farm.bundles()))
    if listing.is_on_stdout:
        return
    if not bundles:
        print("There are no runner bundles yet: `etfarm serve` builds its own, `etfarm bundle add FILE` adds others.")
        return
    _show(bundles)


def _show(bundles: list[Bundle]) -> None:
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    rows = [
        (
            bundle.arch,
            bundle.executorch,
            ", ".join(bundle.backends),
            str(len(bundle.operators)),
            units.size(bundle.size_bytes),
            bundle.digest[:12],
        )
        for bundle in bundles
    ]
    heads = ("ARCH", "EXECUTORCH", "BACKENDS", "OPERATORS", "SIZE", "DIGEST")
    output.show_table(heads, rows, right=("OPERATORS", "SIZE"), shrink=("BACKENDS",))
