"""Connections that send nothing, or too slowly, do not keep their place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from etfarm.client.web import connections, forms, server
from etfarm.client.web.options import WebOptions

SOON_S = 0.3


@asynccontextmanager
async def page() -> AsyncIterator[int]:
    """Serve the page of a farm that does not exist, and yield its port."""
    listener = server.listen("127.0.0.1", 0)
    ready, stop = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        server.serve(WebOptions("127.0.0.1:1"), listener, on_ready=lambda visitors: ready.set(), stop=stop)
    )
    await ready.wait()
    try:
        yield int(listener.getsockname()[1])
    finally:
        stop.set()
        await serving


async def send(port: int, data: bytes) -> bytes:
    """Send bytes, and return all that the page sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(20.0):
            return await reader.read()
    finally:
        writer.close()


HEAD = b"HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SLOW_FORM = b"POST /sign-in " + HEAD + b"Origin: http://127.0.0.1\r\nContent-Length: 99\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", b""),
        (b"GET /sign-in HTTP/1.1\r\nHost: 127", b""),
        (b"GET /healthz " + HEAD + b"\r\n", b"200"),
        (b"GET /healthz " + HEAD + b"\r\nGET /heal", b"200"),
        (b"POST /healthz " + HEAD + b"Content-Length: 99\r\n\r\nx", b"403"),
        (SLOW_FORM + b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken=", b"408"),
    ],
    ids=["silent", "half a head", "after an answer", "half a head after an answer", "half a refused body", "half a form"],
)
async def test_a_slow_connection_ends(monkeypatch: pytest.MonkeyPatch, data: bytes, status: bytes) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", SOON_S)
    monkeypatch.setattr(forms, "FORM_S", SOON_S)
    async with page() as port:
        answer = await send(port, data)
    assert answer[9:12] == status
    assert answer.count(b"HTTP/1.1") == (1 if status else 0)


async def test_a_slow_answer_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", SOON_S)
    monkeypatch.setattr(forms, "FORM_S", 4 * SOON_S)
    async with page() as port:
        answer = await send(port, SLOW_FORM + b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken=")
    assert answer[9:12] == b"408", "a request in progress has a deadline of its own"
