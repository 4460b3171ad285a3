"""`etfarm agents list`: what it shows of a server's agents."""

from __future__ import annotations

import pytest

from etfarm.client.cli.commands import agents
from etfarm.v1 import agent_pb2, agent_pb2_grpc
from tests.support.fake_servers import ReadyFarm, serving_in_threads


class Agents(agent_pb2_grpc.AgentServiceServicer, ReadyFarm):
    """The server's end: an agent of before 0.3.0 and one of today."""

    def ListAgents(self, request: object, context: object) -> agent_pb2.ListAgentsResponse:
        known = agent_pb2.Agent(principal="rack", connected=True, allows_upgrade=True)
        listed = agent_pb2.ListAgentsResponse(agents=[known, known])
        listed.agents[0].agent_id, listed.agents[0].version, listed.agents[0].outdated = "first", "0.2.0", True
        listed.agents[1].agent_id, listed.agents[1].version = "second", "0.3.0"
        return listed


def test_an_agent_that_can_only_be_upgraded_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_in_threads(Agents()) as address:
        monkeypatch.setenv("ETFARM_SERVER", address)
        assert agents.main(["list"]) == 0
    _, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first == "first rack connected 0.2.0 (only upgrades) -"
    assert second == "second rack connected 0.3.0 -"
