"""The stream of server-sent events: all topics that a page shows live, on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from etfarm.client.web.access import LIVE
from etfarm.client.web.live import Feed, FeedEnded
from etfarm.client.web.visitors import Visitor, Visitors, visitor_of

BEAT_S: Final = 15.0
"""Pause between two signs of life, by which a page notices a lost connection."""
MAX_TOPICS: Final = 8


async def live(request: Request) -> Response:
    """Send what changes in the topics `topic`, after the positions in `after` or Last-Event-ID."""
    visitor = visitor_of(request)
    if request.method == "HEAD":  # a page asks whether its session still exists
        return Response(status_code=204)
    visitors: Visitors = request.app.state.visitors
    names = list(dict.fromkeys(request.query_params.getlist("topic")))
    topics = [(request.app.state.topics.get(name.partition(":")[0]), name.partition(":")[2]) for name in names]
    # A name with a line break would end the event's line; positions are separated by spaces.
    is_plain = all(name.isprintable() and " " not in name for name in names)
    if not is_plain or not 0 < len(topics) <= MAX_TOPICS or any(topic is None for topic, _ in topics):
        return PlainTextResponse(f"`topic` must name 1 to {MAX_TOPICS} topics.\n", status_code=400)
    try:
        feeds = await asyncio.gather(*(visitor.account.feeds.open(topic, argument) for topic, argument in topics))
    except FeedEnded:
        return PlainTextResponse("Signed out.\n", status_code=401)
    after = request.headers.get("last-event-id") or request.query_params.get("after", "")
    # A buffering reverse proxy would hold the events back.
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(_events(visitors, visitor, feeds, after), media_type="text/event-stream", headers=headers)


async def _events(visitors: Visitors, visitor: Visitor, feeds: Sequence[Feed], after: str) -> AsyncIterator[bytes]:
    """Yield messages, each with the positions behind it in all feeds."""
    positions = {position.rpartition("@")[0]: position for position in after.split()}
    changed = asyncio.Event()
    visitor.on_sign_out.add(changed)
    try:
        with ExitStack() as listening:
            for feed in feeds:
                listening.enter_context(feed.listen(changed))
            errors = [message for feed in feeds if (message := feed.error_message()) is not None]
            yield b"".join((b"retry: 1000\nevent: beat\ndata: {}\n\n", *errors))
            while not visitors.is_expired(visitor):
                changed.clear()
                for feed in feeds:
                    messages = feed.messages(positions.get(feed.name, ""))
                    if messages:
                        positions[feed.name] = feed.position
                        identity = f"id: {' '.join(positions.values())}\n".encode()
                        yield b"".join((*messages[:-1], identity, messages[-1]))
                try:
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                except TimeoutError:
                    visitor.seen_s = max(visitor.seen_s, visitors.now_s())
                    yield b"event: beat\ndata: {}\n\n"
    except FeedEnded:
        return
    finally:
        visitor.on_sign_out.discard(changed)


ROUTES = (Route(LIVE, live, name="live", methods=["GET"]),)
