"""The artifacts that the farm stores for the visitor's projects; an artifact's own page with the jobs that use it; its bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etfarm.client.web.connections import LEAST_DOWNLOAD_BYTES, Place
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of
from etfarm.wire.errors import error_for

MAX_ARTIFACTS: Final = 500
MAX_JOBS: Final = 500
"""Number of the newest jobs whose artifacts the page names."""
MAX_USES: Final = 5
"""Number of uses that the page shows of an artifact."""
MAX_SEARCHED: Final = 2_000
"""Number of the newest artifacts and jobs that an artifact's own page searches."""
MAX_SUBMISSIONS: Final = 100
"""Number of the newest jobs whose submissions an artifact's page searches for its digest."""
MAX_WAITING: Final = 8
"""Number of downloads of one token that wait for others."""
WAIT_S: Final = 20.0
"""Seconds that a download waits for others at most."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


async def artifacts(request: Request) -> Response:
    """Show the newest artifacts."""
    client = await farm(request)
    known, uses = await asyncio.gather(client.artifacts.list(MAX_ARTIFACTS), client.artifacts.uses(MAX_JOBS))
    return render(
        request, "artifacts.html", title="Artifacts", command=f"etfarm artifacts list --limit {MAX_ARTIFACTS}", artifacts=known,
        uses=uses, max_uses=MAX_USES, max_jobs=MAX_JOBS, max_artifacts=MAX_ARTIFACTS,
    )  # fmt: skip


async def artifact(request: Request) -> Response:
    """Show an artifact by its digest, and all cells that have it or measured it."""
    digest = _digest(request)
    client = await farm(request)
    known, uses = await asyncio.gather(
        client.artifacts.list(MAX_SEARCHED), client.artifacts.uses_of(digest, MAX_SEARCHED, MAX_SUBMISSIONS)
    )
    stored = next((item for item in known if item.digest == digest), None)
    if stored is None and not uses:
        raise error_for(
            "ARTIFACT_NOT_FOUND",
            f"No artifact {digest[:12]} is among the newest {MAX_SEARCHED} of your projects.",
            "`etfarm artifacts list` shows all of them.", digest=digest,
        )  # fmt: skip
    return render(
        request, "artifact.html", title=f"Artifact {digest[:12]}", command=f"etfarm artifacts get {digest}", digest=digest,
        stored=stored, uses=uses, max_jobs=MAX_SEARCHED, max_submissions=MAX_SUBMISSIONS,
    )  # fmt: skip


async def content(request: Request) -> Response:
    """Send an artifact's bytes as a file that the browser saves and never opens."""
    digest = _digest(request)
    account, slots = visitor_of(request).account.digest, request.app.state.downloads
    client = await farm(request)
    await slots.acquire(account, WAIT_S)
    release = partial(slots.release, account)
    chunks = client.artifacts.read(digest)
    assert isinstance(chunks, AsyncGenerator)
    try:
        first = await anext(chunks, b"")  # errors of the farm become a page, as long as nothing was sent
    except BaseException:
        release()
        raise
    name = f"{digest[:12]}{_ending(first)}"
    headers = {"content-disposition": f'attachment; filename="{name}"', "content-encoding": "identity"}
    return _Download(first, chunks, request.app.state.options.max_download_bytes, headers, release)


class _Download(StreamingResponse):
    """An artifact's bytes, which keep a slot and a stream of the farm until the browser has them or has gone."""

    def __init__(
        self,
        first: bytes,
        chunks: AsyncGenerator[bytes, None],
        limit: int,
        headers: Mapping[str, str],
        release: Callable[[], None],
    ) -> None:
        super().__init__(_send(first, chunks, limit), media_type="application/octet-stream", headers=headers)
        self._chunks = chunks
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(place := scope["state"].get("connection"), Place):
            place.least_bytes = LEAST_DOWNLOAD_BYTES
        try:
            if scope["method"] == "HEAD":
                await Response(headers=self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            self._release()
            await self._chunks.aclose()


async def _send(first: bytes, chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """Yield the bytes; a file larger than `limit` ends as a broken download."""
    sent = len(first)
    yield first
    async for chunk in chunks:
        sent += len(chunk)
        if sent > limit:
            message = f"The artifact is larger than {limit} bytes, which the page sends at most."
            raise error_for("DOWNLOAD_TOO_LARGE", message, "Use `etfarm artifacts get`.", limit_bytes=limit)
        yield chunk


def _digest(request: Request) -> str:
    digest = str(request.path_params["digest"])
    if not _DIGEST.fullmatch(digest):
        raise HTTPException(404)
    return digest


def _ending(first: bytes) -> str:
    """Return the ending of a file's name by its first bytes: .pte, .pt2 or .bin."""
    if first[4:6] == b"ET":
        return ".pte"
    return ".zip" if first.startswith(b"PK\x03\x04") else ".bin"


ROUTES = (
    Route("/artifacts", artifacts, name="artifacts", methods=["GET"]),
    Route("/artifacts/{digest}", artifact, name="artifact", methods=["GET"]),
    Route("/artifacts/{digest}/content", content, name="artifact_content", methods=["GET"]),
)
