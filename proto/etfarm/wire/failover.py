"""A channel to one of several servers of a farm: when one is gone, the next call goes to the next one.

gRPC's own lists of addresses (`ipv4:a:1,b:2`) have no names and one TLS authority for all. A name with several addresses needs
none of this: gRPC tries all of them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from etfarm.wire.status import is_hopeless

_SETTLE_S: Final = 2.0
"""Time in which a server must accept a connection and report its health."""
_HEAD_START_S: Final = 0.25
"""Time after which the next server is asked, too: one whose process is stopped accepts connections and does not answer."""


class FailoverChannel(grpc.aio.Channel):
    """Channels to several servers as one. Calls go to one that answers, and stay there until one of them ends as UNAVAILABLE.

    Args:
        channels: a channel to each server, not connected yet; they are closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = list(channels)
        self._index = 0
        self._hopeless: set[int] = set()
        """The servers whose last call failed in a way that no wait can help."""
        self._ended: set[asyncio.Task[None]] = set()
        self._is_moving = False

    @property
    def is_hopeless(self) -> bool:
        """Whether the last call to each of the servers failed in a way that no wait can help."""
        return len(self._hopeless) == len(self._channels)

    def choose(self) -> int:
        """Return the index of the channel for the next call; move on if its server does not answer.

        If none answers, each server gets a call in turn, so that the error of each is seen.
        """
        for _ in self._channels:
            channel = self._channels[self._index]
            if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return self._index
            self._index = (self._index + 1) % len(self._channels)
        self._index = (self._index + 1) % len(self._channels)
        return self._index

    def follow(self, index: int, call: Any) -> None:
        """Let later calls go to another server if this one ended as UNAVAILABLE: its server may be unable to reach the leader."""
        task = asyncio.ensure_future(self._move_on(index, call))
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    async def _move_on(self, index: int, call: Any) -> None:
        with contextlib.suppress(grpc.aio.UsageError):  # this channel was closed meanwhile
            code = await call.code()
            if is_hopeless(code, await call.details()):
                self._hopeless.add(index)
            else:
                self._hopeless.discard(index)
            if code is not grpc.StatusCode.UNAVAILABLE or self._index != index or self._is_moving:
                return
            self._is_moving = True
            try:
                serving, _ = await self._find()
            finally:
                self._is_moving = False
            self._index = index if serving is None else serving

    async def settle(self) -> None:
        """Choose a server that reports itself as serving: a first call does not fail because another server is down.

        That is the one of the last call, or the next one in order. If none does, choose one that accepts a connection.
        """
        serving, reached = await self._find()
        self._index = next((index for index in (serving, reached) if index is not None), self._index)

    async def _find(self) -> tuple[int | None, int | None]:
        """Return a server that reports itself as serving, and one that accepts a connection, each the first to do so."""
        count, reached = len(self._channels), list[int]()

        async def ask(index: int) -> int | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    if await _is_reached(self._channels[index]):
                        reached.append(index)
                        if await _is_serving(self._channels[index]):
                            return index
            return None

        asking: list[asyncio.Task[int | None]] = []
        try:
            for step in range(count):
                asking.append(asyncio.create_task(ask((self._index + step) % count), name="health of a server"))
                await asyncio.wait({asking[-1]}, timeout=_HEAD_START_S)
                serving = [task.result() for task in asking if task.done() and task.result() is not None]
                if serving:
                    return serving[0], serving[0]
            for answer in asyncio.as_completed(asking):
                if (index := await answer) is not None:
                    return index, index
        finally:
            for task in asking:
                task.cancel()
        return None, next(iter(reached), None)

    async def __aenter__(self) -> FailoverChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for task in self._ended:
            task.cancel()
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channels[self.choose()].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channels[self._index].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _UnaryUnary(self, [channel.unary_unary(*arguments, **options) for channel in self._channels])

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _UnaryStream(self, [channel.unary_stream(*arguments, **options) for channel in self._channels])

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _StreamUnary(self, [channel.stream_unary(*arguments, **options) for channel in self._channels])

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _StreamStream(self, [channel.stream_stream(*arguments, **options) for channel in self._channels])


async def settle(channel: grpc.aio.Channel) -> None:
    """Let a channel to several servers find one that answers; a channel to one server does that with its first call."""
    if isinstance(channel, FailoverChannel):
        await channel.settle()


async def _is_reached(channel: grpc.aio.Channel) -> bool:
    """Wait for the outcome of a channel's attempt to connect, and return whether it is connected."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return False
        await channel.wait_for_state_change(state)
    return True


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    """Return whether a server reports itself as serving, by gRPC's health checks. One without health checks counts as serving."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # only for several servers

    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        health = await stub.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNAVAILABLE
    return bool(health.status == health_pb2.HealthCheckResponse.SERVING)


class _AnyServer:
    """A method of several servers."""

    def __init__(self, channel: FailoverChannel, of_servers: Sequence[Callable[..., Any]]) -> None:
        self._channel = channel
        self._of_servers = of_servers

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        index = self._channel.choose()
        call = self._of_servers[index](*arguments, **options)
        call.add_done_callback(partial(self._channel.follow, index))
        return call


class _UnaryUnary(_AnyServer, grpc.aio.UnaryUnaryMultiCallable[Any, Any]): ...


class _UnaryStream(_AnyServer, grpc.aio.UnaryStreamMultiCallable[Any, Any]): ...


class _StreamUnary(_AnyServer, grpc.aio.StreamUnaryMultiCallable[Any, Any]): ...


class _StreamStream(_AnyServer, grpc.aio.StreamStreamMultiCallable[Any, Any]): ...
