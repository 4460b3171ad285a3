"""The farm's web page as a confined child process: the server starts the command `etfarm web` and imports nothing of it.

The server keeps the page's port and hands it over with the certificate and its key, so that the page needs no right to bind the
one and to read the others. It starts the page again when that has ended, and when the certificate was renewed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.config import Config
from etfarm.server.operation.page_confinement import PageConfinement
from etfarm.server.rpc.door.certificates import signature_of
from etfarm.server.workers.jail.measures import Measure
from etfarm.wire.channel import parse_address
from etfarm.wire.errors import FarmError, Kind, UserError
from etfarm.wire.retry_backoff import retry_backoff
from etfarm.wire.tls import BadTlsFile

log = structlog.get_logger()

START_S: Final = 30.0
"""Seconds that the page may take to listen."""
STOP_S: Final = 10.0
RESTART_S: Final = 5.0
"""Longest pause before a page that has ended by itself is started again; it doubles each time, up to `LONGEST_RESTART_S`."""
LONGEST_RESTART_S: Final = 60.0
STEADY_S: Final = 60.0
"""Seconds for which a page must have run for the pause to be short again."""
POLL_S: Final = 2.0
"""Interval at which the certificate's files are checked. A change applies after two equal checks."""

_READY: Final = " is at "
_BACKLOG: Final = 256
_PREFIX: Final = "etfarm-page-"
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_CERTIFICATES: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class PageNotStarted(FarmError):
    """Error of `etfarm serve --web` whose page does not start."""

    reason = "PAGE_FAILED"
    kind = Kind.UNAVAILABLE


class PageOverdue(PageNotStarted):
    """Error of a page that does not listen within the time limit."""


@asynccontextmanager
async def running(config: Config, address: str, page_key: str) -> AsyncIterator[str | None]:
    """Run the page until the block ends, and yield its address; None if the configuration has no page, and "" if it is late.

    Args:
        address: where the server listens.
        page_key: the secret by which this process believes what address a visitor has.

    Raises:
        PageNotStarted: its address cannot be used, or it ended before it answered; its stderr has the reason.
    """
    if config.web is None:
        yield None
        return
    page = WebPage(config, address, page_key)
    try:
        try:
            await page.start()
        except PageOverdue as error:  # a busy machine must not end the farm
            log.error("the web page does not answer yet; it is started again", error=str(error))
        keeping = asyncio.create_task(page.keep(), name="web page")
        try:
            yield page.url
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
    finally:
        await page.close()


class WebPage:
    """The page of one server: its port, its process, and its folder.

    Args:
        config: the server's configuration, which has a page.
        address: where the server listens.
        page_key: the secret by which the server believes what address a visitor has.
        measures: the measures of its confinement that the host allows, if they are known already.

    Raises:
        PageNotStarted: the page's address cannot be used.
    """

    def __init__(self, config: Config, address: str, page_key: str, measures: tuple[Measure, ...] | None = None) -> None:
        assert config.web is not None
        self._config = config
        self._page_key = page_key
        self._server = config.web_server or reachable(address)
        self._confinement = PageConfinement(config, self._server, measures)
        self._folder_record = config.data / "work" / "page-folder"
        self._listener = _listen(config.web.text)
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._paths = [path for path in (config.tls_cert, config.tls_key) if path is not None]
        self._served = self._signature()
        self.url = ""
        """The page's address, once it was started."""

    @property
    def pid(self) -> int | None:
        """The id of the page's process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the page, and wait until it answers.

        Raises:
            PageNotStarted: it ended before, or takes too long.
        """
        for measure in await self._confinement.measures():
            if not measure.active:
                log.warning("a measure of the web page's confinement is missing", measure=measure.name, why=measure.detail)
        await self._start()

    async def keep(self) -> None:
        """Start the page again whenever it ends or its certificate was renewed, until cancelled."""
        pauses, started_s = retry_backoff(RESTART_S, LONGEST_RESTART_S), time.monotonic()
        while True:
            pause_s = next(pauses)
            if self._process is not None:
                if await self._is_renewed(self._process):
                    log.info("the web page starts again with the renewed certificate")
                    await self._stop()
                    pauses, pause_s = retry_backoff(RESTART_S, LONGEST_RESTART_S), 0.0
                else:
                    lasted_s = time.monotonic() - started_s
                    if lasted_s >= STEADY_S:
                        pauses = retry_backoff(RESTART_S, LONGEST_RESTART_S)
                        pause_s = next(pauses)
                    log.error(
                        "the web page ended and starts again",
                        exit_code=self._process.returncode, lasted_s=round(lasted_s), pause_s=round(pause_s, 1),
                    )  # fmt: skip
                    await self._stop()
            await asyncio.sleep(pause_s)
            started_s = time.monotonic()
            try:
                await self._start()
            except (PageNotStarted, OSError, UserError) as error:
                log.error("the web page does not start", error=str(error))

    async def close(self) -> None:
        """End the page, and give up its port."""
        await self._stop()
        self._listener.close()

    async def _is_renewed(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until the process has ended, and return False; or until there is another certificate, and return True."""
        ended = asyncio.create_task(process.wait(), name="end of the web page")
        seen = self._served
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=POLL_S if self._paths else None)
                if done:
                    return False
                signature = await asyncio.to_thread(self._signature)
                if signature == seen != self._served and self._is_usable(signature):
                    return True
                seen = signature
        finally:
            ended.cancel()

    def _is_usable(self, signature: tuple[object, ...]) -> bool:
        """Return whether the certificate's files can be used; the page keeps its certificate otherwise."""
        self._served = signature
        try:
            self._config.identity()
        except BadTlsFile:
            return False  # the log has the reason from the server's own certificate
        return True

    def _signature(self) -> tuple[object, ...]:
        return tuple(map(signature_of, self._paths))

    async def _start(self) -> None:
        self._folder = self._make_folder()
        files: list[int] = []
        try:
            self._served = self._signature()
            process = await self._confinement.start(self._command(files), self._folder, (self._listener.fileno(), *files))
        finally:
            for file in files:
                os.close(file)
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{self._page_key}\n".encode())  # other processes never see a pipe
        try:
            async with asyncio.timeout(START_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
        except TimeoutError:
            await self._stop()
            raise PageOverdue(
                f"The web page did not start within {START_S:g} s.",
                "See whether the machine is overloaded; --web can be left out.",
            ) from None
        except BaseException:
            await self._stop()
            raise
        if _READY not in line:
            await self._stop()
            raise PageNotStarted("The web page did not start.", "Its message is above; leave --web out to serve without it.")
        self.url = line.rpartition(_READY)[2]

    def _command(self, files: list[int]) -> list[str]:
        """Return the command line, and add the descriptors that it names to `files`."""
        certificate = key = None
        if (identity := self._config.identity()) is not None:
            certificate = _pass_on("certificate", b"".join(_CERTIFICATES.findall(identity[0])), files)
            key = _pass_on("key", identity[1], files)
        words = arguments(self._config, self._server, self._listener.fileno(), certificate, key)
        return [sys.executable, "-P", "-m", "etfarm.wire.command", *words]

    def _make_folder(self) -> Path:
        """Return a new folder for the page, outside of the data folder, where its user can reach it."""
        # A server that was killed leaves its page's folder.
        if self._folder_record.exists() and (left := Path(self._folder_record.read_text())).name.startswith(_PREFIX):
            _delete(left)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._folder_record.parent.mkdir(parents=True, exist_ok=True)
        self._folder_record.write_text(str(folder))
        return folder

    async def _stop(self) -> None:
        """End the page: close its stdin, then kill it; and delete its folder."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._folder is not None:
            await asyncio.to_thread(_delete, self._folder)
            self._folder_record.unlink(missing_ok=True)
            self._folder = None


def arguments(config: Config, server: str, listener: int, certificate: str | None, key: str | None) -> list[str]:
    """Return the arguments of `etfarm` that serve the page of this server.

    Args:
        server: the server's address.
        listener: the page's descriptor of its socket.
        certificate, key: what the page opens to read them; None without TLS.
    """
    assert config.web is not None
    words = ["web", "--server", server, "--listen", config.web.text, "--listen-fd", str(listener)]
    words += ["--exit-with-stdin", "--key-from-stdin"]
    if certificate is not None and key is not None:
        words += ["--tls-ca", certificate]
        if not config.web.is_local:
            words += ["--tls-cert", certificate, "--tls-key", key]
    if config.web_public_url:
        words += ["--public-url", config.web_public_url]
    for proxy in config.web_trusted_proxies:
        words += ["--trusted-proxy", proxy]
    return [*words, "--insecure"] if config.insecure else words


def _pass_on(name: str, content: bytes, files: list[int]) -> str:
    """Add a descriptor of a file with this content to `files`, and return the path by which the page opens it."""
    files.append(_sealed(name, content))
    return f"/proc/self/fd/{files[-1]}"


def _listen(text: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; the system chooses port 0.

    Raises:
        PageNotStarted: the address cannot be used.
    """
    host, _, port = text.rpartition(":")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PageNotStarted(
            f"The web page did not start: it cannot listen on {text}: {error.strerror}.", "Choose another --web address.",
            address=text,
        ) from None  # fmt: skip
    return listener


def _sealed(name: str, content: bytes) -> int:
    """Return a descriptor of a read-only file in memory, for its owner alone."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(content)
        os.fchmod(file, 0o400)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _delete(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def reachable(address: str) -> str:
    """Return an address at which this machine reaches a server that listens on all of its addresses."""
    host, colon, port = parse_address(address).text.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}{colon}{port}"
