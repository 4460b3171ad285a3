"""Command line: `etfarm artifacts`, what the store keeps: list, get, put, verify."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute, must_be_writable, run_async
from etfarm.client.cli.terminal import in_a_line

if TYPE_CHECKING:
    from etfarm.client.stubs import Stubs
    from etfarm.v1.artifact_pb2 import VerifyArtifactsProgress

T = TypeVar("T")

_ABOUT = "The models, programs, traces and outputs that the farm keeps for your projects."
Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="Its sha256, or the first characters.")]


def main(argv: list[str]) -> int:
    """Runs `etfarm artifacts`."""
    return execute({"list": list_, "get": get, "put": put, "verify": verify}, argv, "artifacts", _ABOUT, later=("collect",))


def list_(
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="So many, the newest.")] = 50,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """The artifacts of your projects, the newest first."""
    from etfarm.client import artifacts, units
    from etfarm.client.cli import output

    async def fetch(stubs: Stubs) -> list[tuple[str, ...]]:
        return [
            (
                row.artifact.digest[:12],
                units.size(row.artifact.size_bytes),
                row.project,
                row.owner,
                row.stored_at.ToDatetime().isoformat(" ", "seconds"),
            )
            async for row in artifacts.list_all(stubs, limit)
        ]

    rows = _connected(fetch, server, tls_ca)
    if not rows:
        print("No artifacts so far: `etfarm bench` and `etfarm compile` bring them.")
        return
    output.show_table(("DIGEST", "SIZE", "PROJECT", "OWNER", "STORED (UTC)"), rows, right=("SIZE",), shrink=("OWNER",))
    if len(rows) == limit:
        output.show(output.line(f"The newest {limit}; --limit shows more.", style="dim"))


def get(
    digest: Digest,
    file: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to put it.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Fetches an artifact, whole and verified."""
    from etfarm.client import artifacts, units

    must_be_writable(file)
    artifact = _connected(lambda stubs: artifacts.get(stubs, digest, file), server, tls_ca)
    print(f"{file}: {in_a_line(artifact.digest)}, {units.size(artifact.size_bytes)}")


def put(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to store.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Stores a file for your project; prints its digest."""
    from etfarm.client import artifacts
    from etfarm.client.cli.bench import must_be_file

    must_be_file(file)
    artifact, was_sent = _connected(lambda stubs: artifacts.put(stubs, file), server, tls_ca)
    print(artifact.digest if was_sent else f"{artifact.digest} (stored already)")


def verify(server: options.Server = None, tls_ca: options.TlsCa = None) -> int:
    """Reads every stored artifact again (admins). A damaged one leaves the store; the next upload of its bytes heals it.

    The exit code is 1 where any is damaged.
    """
    import sys

    from etfarm.client import artifacts, units

    def show(progress: VerifyArtifactsProgress) -> None:
        if sys.stderr.isatty():
            print(f"\r{progress.done} of {progress.total} ", end="", file=sys.stderr, flush=True)

    last, damaged = _connected(lambda stubs: artifacts.verify(stubs, show), server, tls_ca)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr, flush=True)
    for artifact in damaged:
        print(f"damaged: {in_a_line(artifact.digest)} ({units.size(artifact.size_bytes)})")
    print(f"{last.total} artifacts with {units.size(last.done_bytes)} were read, {len(damaged)} of them damaged.")
    return 1 if damaged else 0


def _connected(work: Callable[[Stubs], Awaitable[T]], server: str | None, tls_ca: str | None) -> T:
    from etfarm.client.connection import Connection

    async def run() -> T:
        connection = Connection(server, None, tls_ca, None)
        await connection.open()
        try:
            return await work(connection.stubs)
        finally:
            await connection.close()

    return run_async(run)
