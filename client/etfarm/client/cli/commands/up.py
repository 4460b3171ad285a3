"""`etfarm up`: keeps the embedded farm running until Ctrl-C."""

from __future__ import annotations

import asyncio
import shlex
import sys

from etfarm.client.cli.app import execute
from etfarm.client.cli.event_loop import run_async
from etfarm.client.errors import Interrupted


def main(argv: list[str]) -> int:
    """Run `etfarm up`."""
    return execute(up, argv, "up")


def up() -> int:
    """Keep the embedded farm of this user running until Ctrl-C; other commands use it meanwhile, and may --detach."""
    from etfarm.client.embedded.lease import join
    from etfarm.wire.names import SERVER_VARIABLE

    async def stay() -> None:
        lease = await join(kind="up", on_status=lambda text: print(text, file=sys.stderr, flush=True))
        try:
            print(f"The embedded farm runs at {lease.address}; its data is in {lease.data}.")
            print("Your commands use it automatically. Elsewhere on this machine, set:")
            print(f"  export {SERVER_VARIABLE}={shlex.quote(lease.address)}")
            print("Ctrl-C ends it and its running jobs.", flush=True)
            await lease.lost()
        finally:
            if sys.stderr.isatty():
                print("Leaving.", file=sys.stderr, flush=True)
            await asyncio.shield(lease.leave())

    try:
        run_async(stay)
    except Interrupted:
        return 0
    return 0
