"""The page's application: `create_app` composes the routes, the visitors and what holds for every request."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etfarm.client.errors import EtfarmError, FarmError, Kind, UserError
from etfarm.client.web.access import AccessCheck, Arrivals
from etfarm.client.web.forms import FormCheck
from etfarm.client.web.live import Topic
from etfarm.client.web.options import WebOptions
from etfarm.client.web.pages import PAGES
from etfarm.client.web.pages.artifacts import MAX_WAITING
from etfarm.client.web.security import BodyLimits, BodyTooLarge, ResponseHeaders, TrustedHosts
from etfarm.client.web.templating import STATIC_FOLDERS, Templates, render_error
from etfarm.client.web.turns import FairSlots
from etfarm.client.web.uploads import Uploads
from etfarm.client.web.visitors import Visitor, Visitors
from etfarm.wire.errors import error_for

__all__ = ["BUNDLES", "StaticFiles", "WebOptions", "create_app"]

log = logging.getLogger(__name__)

MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
"""The endings of files that are sent, with their types; the folders also have templates and licences."""

BUNDLES: Final[Mapping[str, tuple[str, ...]]] = {
    "page.css": ("templates/theme.css", "app.css"),
    "page.js": ("app.js", "keys.js", "live.js"),
}
"""What every page needs, as one file of each kind: a request costs more than these files."""


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    """The content as gzip."""
    media_type: str


class StaticFiles:
    """The files of some folders by path. Their addresses have the files' digest, so that browsers may keep them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read all files.

        Args:
            folders: the first one with a path has the file.
        """
        contents = {name: content for folder in reversed(folders) for name, content in _read(folder)}
        for name, parts in BUNDLES.items():
            contents[name] = b"".join(_as_part(part, contents.pop(part)) for part in parts)
        self._files = {
            name: StaticFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[PurePosixPath(name).suffix])
            for name, content in contents.items()
        }
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {len(file.content)} ".encode() + file.content)
        self.version = digest.hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a file.

        Raises:
            HTTPException: there is none.
        """
        path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        file = self._files.get(path)
        if file is None or scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "Accept-Encoding"}
        content = file.content
        if "gzip" in Headers(scope=scope).get("accept-encoding", ""):
            content = file.compressed
            headers["content-encoding"] = "gzip"
        await Response(content, headers=headers, media_type=file.media_type)(scope, receive, send)


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _as_part(name: str, content: bytes) -> bytes:
    """Return a file as a part of a bundle: a script is a block, whose names the other scripts do not see."""
    return b"{\n%b\n}\n" % content if name.endswith(".js") else content


def create_app(options: WebOptions) -> Starlette:
    """Return the application for a farm; it connects to the farm when the first visitor signs in."""
    files = StaticFiles(STATIC_FOLDERS)
    app = Starlette(
        routes=[*(route for page in PAGES for route in page.ROUTES), Mount("/static/{version}", files)],
        exception_handlers={EtfarmError: _on_error, HTTPException: _on_http_error},
        lifespan=_lifespan,
    )
    templates = Templates(app, options, files.version)
    visitors = Visitors(options, templates.fragment)
    topics: dict[str, Topic] = {topic.name: topic for page in PAGES for topic in getattr(page, "TOPICS", ())}
    app.state.downloads = FairSlots(options.max_downloads, options.max_downloads_of_account, MAX_WAITING, "downloads")
    app.state.uploads = Uploads(options.max_upload_bytes, options.max_uploads_bytes)
    app.state.options, app.state.templates, app.state.visitors, app.state.topics = options, templates, visitors, topics
    app.user_middleware = [
        Middleware(_RootPath, root_path=options.root_path),
        Middleware(ResponseHeaders, options=options),
        Middleware(Arrivals, options=options, visitors=visitors),
        Middleware(TrustedHosts, options=options),
        Middleware(GZipMiddleware, minimum_size=1_000, compresslevel=5),
        Middleware(BodyLimits, options=options),
        Middleware(FormCheck, options=options, tokens=visitors.csrf, cookie_name=visitors.cookie_name),
        Middleware(AccessCheck, options=options, visitors=visitors),
        Middleware(_Failures, timeout_s=options.request_timeout_s),
    ]
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    visitors: Visitors = app.state.visitors
    uploads: Uploads = app.state.uploads
    sweeping = {
        asyncio.create_task(visitors.sweep(), name="sweep of visitors"),
        asyncio.create_task(uploads.sweep(), name="sweep of uploads"),
    }
    try:
        yield
    finally:
        for task in sweeping:
            task.cancel()
        await asyncio.wait(sweeping)
        uploads.close()
        await visitors.close()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtfarmError)
    visitor = request.scope.get("state", {}).get("visitor")
    if error.kind is Kind.UNAUTHENTICATED and isinstance(visitor, Visitor):  # the next page is the sign-in
        request.app.state.visitors.refuse(visitor.account.digest)
    return render_error(request, error)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return render_error(request, error_for("PAGE_NOT_FOUND", "There is no such page.", "Use the navigation or the search."))
    return render_error(request, UserError(str(error.detail)), status=error.status_code)


class _RootPath:
    """Gives every request the full path, whether or not a reverse proxy has removed the beginning."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._root_path:
            path = scope["path"]
            if path != self._root_path and not path.startswith(f"{self._root_path}/"):
                path = f"{self._root_path}{path}"
            scope = {**scope, "root_path": self._root_path, "path": path}
        await self._app(scope, receive, send)


class _Failures:
    """Answers with a page of the error where the farm takes too long, or where the page itself has a defect."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            deadline.reschedule(None)  # event streams stay open, and a download takes its time
            await send(message)

        request = Request(scope)
        try:
            # A submission exports and uploads.
            async with asyncio.timeout(self._timeout_s if request.method == "GET" else None) as deadline:
                await self._app(scope, receive, send_noting)
            return
        except TimeoutError:
            error: EtfarmError = error_for(
                "PAGE_TIMED_OUT",
                f"The farm did not answer within {self._timeout_s:g} s.",
                "Reload the page; if it stays, see whether the server runs.",
            )
        except BodyTooLarge:
            raise
        except Exception as bug:
            log.exception("a page failed")
            error = FarmError(f"The page failed with {type(bug).__name__}.", "This is a defect of etfarm: please report it.")
        if not has_started:
            await render_error(request, error)(scope, receive, send)
