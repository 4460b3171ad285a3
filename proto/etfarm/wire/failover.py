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

_CONNECT_S: Final = 2.0
"""Time that one server has to accept a connection before the next one is tried."""


class FailoverChannel(grpc.aio.Channel):
    """Channels to several servers as one. Calls go to one that answers, and stay there until one of them ends as UNAVAILABLE.

    Args:
        channels: a channel to each server, not connected yet; they are closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = list(channels)
        self._index = 0
        self._ending: set[asyncio.Task[None]] = set()

    def choose(self) -> int:
        """Return the index of the channel for the next call; move on if its server does not answer."""
        for _ in self._channels:
            channel = self._channels[self._index]
            if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                break
            self._index = (self._index + 1) % len(self._channels)
        return self._index

    def follow(self, index: int, call: Any) -> None:
        """Let the next call go to another server if this one ends as UNAVAILABLE: its server may not reach the one that leads."""
        task = asyncio.ensure_future(self._move_on(index, call))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _move_on(self, index: int, call: Any) -> None:
        if await call.code() is grpc.StatusCode.UNAVAILABLE and self._index == index:
            self._index = (index + 1) % len(self._channels)

    async def settle(self) -> None:
        """Wait until a server says that it answers calls: a first call is not to fail for the first server's absence.

        If none says so, choose the first that accepts a connection.
        """
        reached = None
        for index, channel in enumerate(self._channels):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    if not await _is_reached(channel):
                        continue
                    reached = index if reached is None else reached
                    if await _is_serving(channel):
                        self._index = index
                        return
        if reached is not None:
            self._index = reached

    async def __aenter__(self) -> FailoverChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for task in self._ending:
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
    """Return whether a server reports that it answers calls, by gRPC's health checks; one that has none may do so."""
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
