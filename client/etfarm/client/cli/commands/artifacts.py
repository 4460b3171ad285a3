"""`etfarm artifacts`: list, fetch, store, delete and verify artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.files import require_writable
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import in_a_line, tell

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs
    from etfarm.v1.artifact_pb2 import VerifyArtifactsProgress

T = TypeVar("T")

_ABOUT = "List, fetch, store, delete and verify the models, programs, traces and outputs that the farm keeps for your projects."
Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="The artifact's sha256, or its first characters.")]


def main(argv: list[str]) -> int:
    """Run `etfarm artifacts`."""
    commands: dict[str, Command] = {
        "list": list_, "get": get, "put": put, "delete": delete, "collect": collect, "verify": verify
    }  # fmt: skip
    return execute(commands, argv, "artifacts", _ABOUT)


def list_(
    listing: Annotated[JsonListing, Key("artifacts")],
    connection: Connection,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many to list at most.")] = 50,
) -> None:
    """List the artifacts of your projects, newest first."""
    from etfarm.client.admin import artifacts
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.models import Artifact
    from etfarm.client.transport.decode import decoded

    async def fetch(stubs: Stubs) -> list[Artifact]:
        return [decoded(Artifact, row) async for row in artifacts.list_all(stubs, limit)]

    known = listing.record(connection.call_stubs(fetch))
    if listing.is_on_stdout:
        return
    rows = [
        (
            item.digest[:12],
            units.size(item.size_bytes),
            item.project,
            item.owner,
            item.created_at.replace(tzinfo=None).isoformat(" ", "seconds"),
        )
        for item in known
    ]
    if not rows:
        print("No artifacts yet: `etfarm bench`, `etfarm compile` and `etfarm artifacts put` store some.")
        return
    output.show_table(("DIGEST", "SIZE", "PROJECT", "OWNER", "STORED (UTC)"), rows, right=("SIZE",), shrink=("OWNER",))
    if len(rows) == limit:
        output.show(output.line(f"The newest {limit}; --limit shows more.", style="dim"))


def get(
    connection: Connection,
    digest: Digest,
    file: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.")],
) -> None:
    """Download an artifact and verify its sha256."""
    from etfarm.client.admin import artifacts
    from etfarm.client.formats import units

    require_writable(file)
    artifact = connection.call_stubs(lambda stubs: artifacts.get(stubs, digest, file))
    print(f"{file}: {in_a_line(artifact.digest)}, {units.size(artifact.size_bytes)}")


def put(connection: Connection, file: Annotated[Path, typer.Argument(metavar="FILE", help="File to store.")]) -> None:
    """Store a file for your project and print its digest."""
    from etfarm.client.admin import artifacts
    from etfarm.client.cli.arguments import require_file

    require_file(file)
    artifact, was_sent = connection.call_stubs(lambda stubs: artifacts.put(stubs, file))
    print(artifact.digest if was_sent else f"{artifact.digest} (stored already)")


def delete(
    connection: Connection,
    digest: Annotated[list[str], typer.Argument(metavar="DIGEST", help="The artifacts' sha256, or their first characters.")],
    force: Annotated[bool, typer.Option("--force", help="Delete artifacts that were used within the last hour, too.")] = False,
) -> None:
    """Delete artifacts that nothing refers to. Admins only."""
    from etfarm.client.admin import artifacts
    from etfarm.v1.artifact_pb2 import DeleteArtifactRequest

    async def remove(stubs: Stubs) -> None:
        for each in digest:
            whole = (await artifacts.find(stubs, each)).digest
            await stubs.artifacts.Delete(DeleteArtifactRequest(digest=whole, force=force))
            tell(f"Deleted {whole}.")

    connection.call_stubs(remove)


def collect(
    listing: Annotated[JsonListing, Key("collected", is_list=False)],
    connection: Connection,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="SIZE", help="Keep the most recently used up to this size, such as 200GiB.")
    ] = None,
    dry_run: options.DryRun = False,
) -> None:
    """Delete artifacts that nothing refers to and nobody used within the last hour, least recently used first. Admins only.

    Jobs, reports, tags, cached compilations, sessions and uploads refer to artifacts.
    """
    from etfarm.client.formats import units

    keep_bytes = None if keep is None else options.size_of("--keep", keep)

    done = listing.record(connection.call(lambda farm: farm.collect(keep_bytes, dry_run=dry_run)))
    if listing.is_on_stdout:
        return
    verb = "Would delete" if dry_run else "Deleted"
    tell(f"{verb} {units.count(done.count, 'artifact')} ({units.size(done.size_bytes)}); {units.size(done.kept_bytes)} remain.")
    if done.released_bytes:
        what = "would no longer count" if dry_run else "no longer count"
        tell(f"{units.size(done.released_bytes)} {what} against projects that do not need them; other projects do.")


def verify(connection: Connection) -> int:
    """Verify every stored artifact. A damaged one leaves the store; the next upload of its bytes restores it. Admins only.

    It also verifies the values in the database, and names those with damage. The exit code is 1 if anything is damaged.
    """
    import sys

    from etfarm.client.admin import artifacts
    from etfarm.client.formats import units

    def show(progress: VerifyArtifactsProgress) -> None:
        if sys.stderr.isatty():
            print(f"\r{progress.done} of {progress.total} ", end="", file=sys.stderr, flush=True)

    last, damaged, values = connection.call_stubs(lambda stubs: artifacts.verify(stubs, show))
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr, flush=True)
    for artifact in damaged:
        print(f"damaged: {in_a_line(artifact.digest)} ({units.size(artifact.size_bytes)})")
    for value in values:
        print(f"damaged in the database: {in_a_line(value)}")
    print(f"Verified {last.total} artifacts ({units.size(last.done_bytes)}); {len(damaged) + len(values)} damaged.")
    return 1 if damaged or values else 0
