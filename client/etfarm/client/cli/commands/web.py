"""`etfarm web`: the farm's web page."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.errors import EtfarmError, Interrupted, Kind, extra_missing
from etfarm.wire.authority import host_of
from etfarm.wire.channel import Access, Address, parse_address, parse_addresses
from etfarm.wire.errors import error_for
from etfarm.wire.names import SERVER_VARIABLE
from etfarm.wire.owner import at_end_of_stdin, line_of_stdin
from etfarm.wire.private import close_umask
from etfarm.wire.tls import read_identity

if TYPE_CHECKING:
    from etfarm.client.web.options import Network
    from etfarm.client.web.visitors import Visitors

LISTEN: Final = "127.0.0.1:0"
MEMORY_BYTES: Final = 2 << 30
"""Private memory of the page. It has 100 MiB without visitors; large reports of several visitors at a time take hundreds."""


def main(argv: list[str]) -> int:
    """Run `etfarm web`."""
    return execute(web, argv, "web")


def web(
    connection: Connection,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where browsers connect to; port 0: the system chooses.")
    ] = LISTEN,
    public_url: Annotated[
        str,
        typer.Option(
            "--public-url", metavar="URL", help="The page's address behind a reverse proxy, as https://farm.example/etfarm."
        ),
    ] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A host name that browsers may use for the page; repeatable."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address or network of a reverse proxy whose X-Forwarded-For names each visitor's address; repeatable.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM certificate chain, for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM key of the certificate.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen for other machines without TLS: tokens cross the network in clear text.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print a link that signs one browser in with this command's own token.")
    ] = False,
    listen_fd: Annotated[
        int | None, typer.Option("--listen-fd", help="Descriptor of a socket that listens on --listen already.", hidden=True)
    ] = None,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", help="End when stdin ends.")] = False,
    key_from_stdin: Annotated[bool, typer.Option("--key-from-stdin", hidden=True)] = False,
) -> int:
    """Serve the farm's web page until Ctrl-C: what is free, who holds what and since when, live in a browser.

    Visitors sign in with their own tokens of the farm, and may do there what they may do in a terminal. Without --server and
    ETFARM_SERVER it is the page of your own farm, which runs meanwhile.
    """
    address = _checked(listen, tls_cert, tls_key, is_public_https=public_url.startswith("https://"), insecure=insecure)
    try:
        from etfarm.client.web import server as page
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("etfarm"):
            raise
        raise extra_missing("`etfarm web`", "web", error.name or "a library") from None
    from etfarm.client.web.options import LOOPBACK_HOSTS, WebOptions

    close_umask()  # files of visitors
    proxies = tuple(_network(text) for text in trusted_proxy or ())
    hosts = LOOPBACK_HOSTS | {host_of(address.text)} | {_host(name) for name in allow_host or ()}
    key = line_of_stdin() if key_from_stdin else ""
    host, _, port = address.text.rpartition(":")
    scheme = "https" if tls_cert is not None else "http"

    async def run() -> int:
        stop = asyncio.Event()
        if exit_with_stdin:
            at_end_of_stdin(stop.set)
        async with AsyncExitStack() as stack:
            # A server that starts its page may not lead the farm, nor find who leads, at that moment.
            known = connection.server if key else None
            farm_address, is_own = (known, False) if known else await _find_farm(stack, connection)
            listener = page.listen(host.strip("[]"), int(port)) if listen_fd is None else page.adopt(listen_fd)
            if not is_own:  # a farm of this command inherits its limits
                _limit_memory()
            web_options = WebOptions(
                farm_address, Path(connection.tls_ca) if connection.tls_ca else None, public_url=public_url, allowed_hosts=hosts,
                is_https=tls_cert is not None, trusted_proxies=proxies, forwarded_key=key,
            )  # fmt: skip
            url = public_url.rstrip("/") or f"{scheme}://{host}:{listener.getsockname()[1]}"
            # The embedded farm's token, or ETFARM_TOKEN: that of whoever runs this command.
            token = Access.of(farm_address, connection.tls_ca).token

            def tell_address(visitors: Visitors) -> None:
                print(f"etfarm web: the page of {farm_address} is at {url}/", flush=True)
                if link or is_own:
                    code = visitors.create_code(token)
                    print(f"etfarm web: sign in once within 15 minutes: {url}/enter?code={code}", flush=True)

            await page.serve(web_options, listener, on_ready=tell_address, stop=stop, certificate=tls_cert, key=tls_key)
        return 0

    try:
        return run_async(run)
    except Interrupted:
        return 0


def _limit_memory() -> None:
    """Let this process fail, rather than the machine, when it needs too much memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, hard))


async def _find_farm(stack: AsyncExitStack, connection: Connection) -> tuple[str, bool]:
    """Return the address of the farm, and whether it is the user's own, which runs until the stack ends."""
    from etfarm.client.aio import AsyncFarm

    address = connection.server or os.environ.get(SERVER_VARIABLE)
    if not address:
        farm = await stack.enter_async_context(AsyncFarm(on_status=lambda text: tell(text, to_stderr=True)))
        return farm.address, True
    parse_addresses(address)
    try:
        async with AsyncFarm(address, tls_ca=connection.tls_ca):
            pass
    except EtfarmError as error:
        # Visitors bring tokens of their own, and the server may start later.
        if error.kind not in (Kind.UNAUTHENTICATED, Kind.UNAVAILABLE):
            raise
        if error.kind is Kind.UNAVAILABLE:
            tell(f"warning: {error}", to_stderr=True)
    return address, False


def _checked(listen: str, tls_cert: Path | None, tls_key: Path | None, *, is_public_https: bool, insecure: bool) -> Address:
    """Return the address to listen on.

    Raises:
        USAGE: it would be open to other machines without TLS, or options contradict each other.
    """
    address = parse_address(listen)
    if address.text.startswith("unix:"):
        raise error_for(
            "USAGE", "--listen must be HOST:PORT, got a unix socket.", "Browsers connect to a port, for example 127.0.0.1:8080."
        )
    if (tls_cert is None) != (tls_key is None):
        raise error_for("USAGE", "--tls-cert and --tls-key need each other.", "Give both, or neither.")
    for option, file in (("--tls-cert", tls_cert), ("--tls-key", tls_key)):
        if file is not None and not file.is_file():
            raise error_for("USAGE", f"There is no file {file}, which {option} names.", "Check the path.")
    if tls_cert is not None and tls_key is not None:
        read_identity(tls_cert, tls_key)
    if not address.is_local and tls_cert is None and not is_public_https and not insecure:
        raise error_for(
            "USAGE",
            f"{listen} is open to other machines, and without TLS tokens would cross the network in clear text.",
            "Give --tls-cert and --tls-key, or --public-url https://... behind a reverse proxy, or --insecure.",
        )
    return address


def _host(name: str) -> str:
    """Return a host that browsers may use.

    Raises:
        USAGE: it is not one.
    """
    host = host_of(name)
    if not host:
        raise error_for(
            "USAGE", f"--allow-host must be a host name, got {name[:80]!r}.", "Give the name alone, for example farm.example."
        )
    return host


def _network(text: str) -> Network:
    """Return the network of a reverse proxy.

    Raises:
        USAGE: it is not one.
    """
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise error_for(
            "USAGE",
            f"--trusted-proxy must be an IP address or a network, got {text[:80]!r}.",
            "Give for example 127.0.0.1 or 10.0.0.0/24.",
        ) from None
