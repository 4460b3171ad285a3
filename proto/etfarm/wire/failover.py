"""A channel to one of several servers of a farm: when one is gone, the next call goes to the next one.

gRPC's own lists of addresses (`ipv4:a:1,b:2`) have no names and one TLS authority for all. A name with several addresses needs
none of this: gRPC tries all of them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

_CONNECT_S: Final = 2.0
"""Time that one server has to accept a connection before the next one is tried."""


class FailoverChannel(grpc.aio.Channel):
    """Channels to several servers as one. Calls go to one that answers, and stay there until it does not.

    Args:
        channels: a channel to each server, not connected yet; they are closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = list(channels)
        self._index = 0

    def choose(self) -> int:
        """Return the index of the channel for the next call; move on if its server does not answer."""
        for _ in self._channels:
            channel = self._channels[self._index]
            if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                break
            self._index = (self._index + 1) % len(self._channels)
        return self._index

    async def settle(self) -> None:
        """Wait until a server accepts a connection, or none does: a first call is not to fail for the first server's absence."""
        for index, channel in enumerate(self._channels):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    if await _is_reached(channel):
                        self._index = index
                        return

    async def __aenter__(self) -> FailoverChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channels[self.choose()].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channels[self._index].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _UnaryUnary(self.choose, [channel.unary_unary(*arguments, **options) for channel in self._channels])

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _UnaryStream(self.choose, [channel.unary_stream(*arguments, **options) for channel in self._channels])

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _StreamUnary(self.choose, [channel.stream_unary(*arguments, **options) for channel in self._channels])

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _StreamStream(self.choose, [channel.stream_stream(*arguments, **options) for channel in self._channels])


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


class _AnyServer:
    """A method of several servers."""

    def __init__(self, choose: Callable[[], int], of_servers: Sequence[Callable[..., Any]]) -> None:
        self._choose = choose
        self._of_servers = of_servers

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._of_servers[self._choose()](*arguments, **options)


class _UnaryUnary(_AnyServer, grpc.aio.UnaryUnaryMultiCallable[Any, Any]): ...


class _UnaryStream(_AnyServer, grpc.aio.UnaryStreamMultiCallable[Any, Any]): ...


class _StreamUnary(_AnyServer, grpc.aio.StreamUnaryMultiCallable[Any, Any]): ...


class _StreamStream(_AnyServer, grpc.aio.StreamStreamMultiCallable[Any, Any]): ...
