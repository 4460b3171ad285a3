"""Removals whose answer was lost: the repeated call finds nothing, and counts as done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from etfarm.client import AsyncFarm
from etfarm.client.cli.views.devices import describe_removal, describe_retirement
from etfarm.v1 import agent_pb2, agent_pb2_grpc, device_pb2, device_pb2_grpc
from etfarm.wire.errors import EtfarmError, Fault, Kind, error_of
from etfarm.wire.status import to_status
from tests.support.fake_servers import ReadyFarm, serving


class Removing(device_pb2_grpc.DeviceServiceServicer, agent_pb2_grpc.AgentServiceServicer, ReadyFarm):
    """A server that removes at the first call, whose answer is lost `lost` times."""

    def __init__(self, lost: int) -> None:
        self.lost = lost

    async def _remove(self, context: Any, reason: str) -> None:
        self.lost -= 1
        if self.lost >= 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        await context.abort_with_status(to_status(error_of(Fault.USER, reason, "It is not there.", kind=Kind.NOT_FOUND)))

    async def Retire(self, request: object, context: Any) -> device_pb2.RetireDeviceResponse:  # type: ignore[override]
        await self._remove(context, "DEVICE_NOT_FOUND")
        return device_pb2.RetireDeviceResponse()

    async def RemoveAgent(self, request: object, context: Any) -> agent_pb2.RemoveAgentResponse:  # type: ignore[override]
        await self._remove(context, "AGENT_NOT_FOUND")
        return agent_pb2.RemoveAgentResponse()


@pytest.fixture
async def farm(lost: int) -> AsyncIterator[AsyncFarm]:
    async with serving(Removing(lost)) as address, AsyncFarm(address) as connected:
        yield connected


@pytest.mark.parametrize("lost", [1])
async def test_a_device_that_the_first_call_has_retired_is_retired(farm: AsyncFarm) -> None:
    retired = await farm.retire_device("pi")
    assert list(describe_retirement(retired)) == [
        "Device pi (pi) is retired; its reports stay.",
        "The server's first answer was lost: `etfarm agents list` shows whether its agent is refused.",
    ]


@pytest.mark.parametrize("lost", [1])
async def test_an_agent_that_the_first_call_has_removed_is_removed(farm: AsyncFarm) -> None:
    assert list(describe_removal(await farm.remove_agent("rack"))) == ["Agent rack is removed."]


@pytest.mark.parametrize("lost", [0])
async def test_what_a_first_call_does_not_find_is_an_error(farm: AsyncFarm) -> None:
    for removal in (farm.retire_device("pi"), farm.remove_agent("rack")):
        with pytest.raises(EtfarmError, match="It is not there"):
            await removal
