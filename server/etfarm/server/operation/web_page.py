"""The farm's web page as a child process: the server starts the command `etfarm web` and imports nothing of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

from etfarm.server.config import Config
from etfarm.server.rpc.door.forwarded import PAGE_KEY
from etfarm.wire.channel import parse_address
from etfarm.wire.errors import FarmError, Kind

log = structlog.get_logger()

START_S: Final = 30.0
"""Seconds that the page may take to listen."""
STOP_S: Final = 10.0
RESTART_S: Final = 5.0
"""Pause before a page that has ended by itself is started again."""

_READY: Final = " is at "
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class PageNotStarted(FarmError):
    """Error of `etfarm serve --web` whose page does not start."""

    reason = "PAGE_FAILED"
    kind = Kind.UNAVAILABLE


@asynccontextmanager
async def running(config: Config, address: str) -> AsyncIterator[str | None]:
    """Run the page until the block ends, and yield its address; None if the configuration has no page.

    Args:
        address: where the server listens.

    Raises:
        PageNotStarted: the page ended before it listened; its stderr has the reason.
    """
    if config.web is None:
        yield None
        return
    command = arguments(config, address)
    process, url = await _start(command)
    keeping = asyncio.create_task(_keep(command, process), name="web page")
    try:
        yield url
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


def arguments(config: Config, address: str) -> list[str]:
    """Return the arguments of `etfarm` that serve the page of this server."""
    assert config.web is not None
    words = ["web", "--server", config.web_server or _reachable(address), "--listen", config.web.text]
    words += ["--exit-with-stdin", "--key-from-stdin"]
    if config.tls_cert is not None and config.tls_key is not None:
        words += ["--tls-ca", str(config.tls_cert)]
        if not config.web.is_local:
            words += ["--tls-cert", str(config.tls_cert), "--tls-key", str(config.tls_key)]
    if config.web_public_url:
        words += ["--public-url", config.web_public_url]
    for proxy in config.web_trusted_proxies:
        words += ["--trusted-proxy", proxy]
    return [*words, "--insecure"] if config.insecure else words


def _reachable(address: str) -> str:
    """Return an address at which this machine reaches a server that listens on all of its addresses."""
    host, colon, port = parse_address(address).text.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}{colon}{port}"


async def _start(command: list[str]) -> tuple[asyncio.subprocess.Process, str]:
    """Return the page's process and address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "etfarm.wire.command", *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    _send_key(process)
    try:
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode(errors="replace").strip()
    except TimeoutError:
        await _stop(process)
        raise PageNotStarted(
            f"The web page did not start within {START_S:g} s.", "See whether the machine is overloaded; --web can be left out."
        ) from None
    except BaseException:
        await _stop(process)
        raise
    if _READY not in line:
        await _stop(process)
        raise PageNotStarted("The web page did not start.", "Its message is above; leave --web out to serve without it.")
    return process, line.rpartition(_READY)[2]


def _send_key(process: asyncio.subprocess.Process) -> None:
    """Send the page the secret by which this server believes what address a visitor has; other processes never see a pipe."""
    assert process.stdin is not None
    process.stdin.write(f"{PAGE_KEY}\n".encode())


async def _keep(command: list[str], process: asyncio.subprocess.Process) -> None:
    """Start the page again whenever it ends, until cancelled."""
    try:
        while True:
            await process.wait()
            log.error("the web page ended and starts again", exit_code=process.returncode)
            await asyncio.sleep(RESTART_S)
            try:
                process, _ = await _start(command)
            except (PageNotStarted, OSError) as error:
                log.error("the web page does not start", error=str(error))
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the page: close its stdin, then kill it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
