"""`etfarm up`: keeps the embedded farm running until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.workflows import page
from etfarm.client.errors import EtfarmError, Interrupted

if TYPE_CHECKING:
    from etfarm.client.embedded.lease import Lease

POLL_S = 1.0
"""Seconds between two questions whether the farm's runner bundle is built."""


def main(argv: list[str]) -> int:
    """Run `etfarm up`."""
    return execute(up, argv, "up")


def up(
    web: Annotated[
        str, typer.Option("--web", metavar="HOST:PORT", help="Where browsers find the farm's page; port 0: the system chooses.")
    ] = page.LISTEN,
    no_web: Annotated[bool, typer.Option("--no-web", help="Serve no page.")] = False,
) -> int:
    """Keep the embedded farm of this user running until Ctrl-C; other commands use it meanwhile, and may --detach.

    It prints a link that opens the farm's page in a browser, which needs etfarm[web].

    If another `etfarm up` keeps it already, this one says so and ends with exit code 1.
    """
    from etfarm.client.embedded.lease import join
    from etfarm.wire.names import SERVER_VARIABLE

    async def stay() -> int:
        lease = await join(kind="up", on_status=lambda text: print(text, file=sys.stderr, flush=True))
        try:
            if lease.keeper_pid not in (None, os.getpid()):
                tell(f"etfarm: {_already_running(lease)}", to_stderr=True)
                return 1
            print(f"The embedded farm runs at {lease.address}; its data is in {lease.data}.")
            print("Your commands use it automatically. Elsewhere on this machine, set:")
            print(f"  export {SERVER_VARIABLE}={shlex.quote(lease.address)}")
            print("Ctrl-C ends it and its running jobs.", flush=True)
            reporting = asyncio.create_task(_report_bundle_error(lease.address), name="report of the runner bundle")
            try:
                async with nullcontext() if no_web else page.running(lease.address, web):
                    await lease.lost()
            finally:
                reporting.cancel()
                await asyncio.wait({reporting})
            return 0
        finally:
            if sys.stderr.isatty():
                print("Leaving.", file=sys.stderr, flush=True)
            await asyncio.shield(lease.leave())

    try:
        return run_async(stay)
    except Interrupted:
        return 0


async def _report_bundle_error(address: str) -> None:
    """Print why the farm has no native runner, once its bundle is built; an unanswered question does not end the farm."""
    from etfarm.client.aio import AsyncFarm

    try:
        async with AsyncFarm(address) as farm:
            info = await farm.info()
            while info.starting.startswith("building the runner bundle"):
                await asyncio.sleep(POLL_S)
                info = await farm.info()
    except EtfarmError as error:
        tell(f"warning: the state of the runner bundle is unknown: {error}", to_stderr=True)
        return
    if info.bundle_error is not None:
        print(f"warning: no native runner: {info.bundle_error}", file=sys.stderr, flush=True)


def _already_running(lease: Lease) -> str:
    """Return the sentence for an `etfarm up` that finds another one."""
    return (
        f"Another `etfarm up`, process {lease.keeper_pid}, keeps the embedded farm at {lease.address} running. "
        "Your commands use it automatically; Ctrl-C there, or `kill "
        f"{lease.keeper_pid}`, ends it."
    )
