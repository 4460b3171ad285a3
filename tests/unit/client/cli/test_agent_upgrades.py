"""Upgrades of several agents: how many at a time, and what happens after one that fails."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.client.cli.commands.agents import upgrade_all
from etfarm.client.models import Agent

AGENTS = [
    Agent(agent_id=f"agent-{number}", principal="rack", connected=True, device_ids=(), refused_principal="")
    for number in range(5)
]


class Rack:
    """Agents whose upgrades end when the test says so."""

    def __init__(self, *broken: int) -> None:
        self.broken = {AGENTS[number].agent_id for number in broken}
        self.begun: list[str] = []
        self.running = 0
        self.most = 0

    async def upgrade(self, agent: Agent) -> bool:
        self.begun.append(agent.agent_id)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        return agent.agent_id not in self.broken


@pytest.mark.parametrize("parallel", [1, 2, 5, 64])
async def test_as_many_agents_are_upgraded_at_a_time_as_the_bound_says(parallel: int) -> None:
    rack = Rack()
    assert await upgrade_all(AGENTS, rack.upgrade, parallel, keep_going=False) == ([], [])
    assert (rack.begun, rack.most) == ([agent.agent_id for agent in AGENTS], min(parallel, 5))


async def test_none_is_begun_after_one_that_fails() -> None:
    rack = Rack(1)
    assert await upgrade_all(AGENTS, rack.upgrade, 1, keep_going=False) == ([AGENTS[1]], AGENTS[2:])
    assert rack.begun == ["agent-0", "agent-1"]


async def test_upgrades_that_have_begun_end_beside_one_that_fails() -> None:
    rack = Rack(0)
    failed, untried = await upgrade_all(AGENTS, rack.upgrade, 2, keep_going=False)
    assert (failed, untried, rack.begun, rack.running) == ([AGENTS[0]], AGENTS[2:], ["agent-0", "agent-1"], 0)


async def test_the_others_are_upgraded_if_that_is_wished() -> None:
    rack = Rack(0, 3)
    assert await upgrade_all(AGENTS, rack.upgrade, 2, keep_going=True) == ([AGENTS[0], AGENTS[3]], [])
    assert len(rack.begun) == 5
