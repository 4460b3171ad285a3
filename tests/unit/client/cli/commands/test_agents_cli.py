"""`etfarm agents list`: what it shows of a server's agents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from etfarm.client.cli.commands import agents
from etfarm.v1 import agent_pb2, agent_pb2_grpc, farm_pb2, farm_pb2_grpc
from etfarm.wire.names import PROTOCOL_VERSION


class Agents(agent_pb2_grpc.AgentServiceServicer, farm_pb2_grpc.FarmServiceServicer):
    """The server's end: an agent of before 0.3.0 and one of today."""

    def GetServerInfo(self, request: farm_pb2.GetServerInfoRequest, context: grpc.ServicerContext) -> farm_pb2.ServerInfo:
        return farm_pb2.ServerInfo(workers_ready=True, protocol_version=PROTOCOL_VERSION)

    def ListAgents(self, request: agent_pb2.ListAgentsRequest, context: grpc.ServicerContext) -> agent_pb2.ListAgentsResponse:
        known = agent_pb2.Agent(principal="rack", connected=True, allows_upgrade=True)
        listed = agent_pb2.ListAgentsResponse(agents=[known, known])
        listed.agents[0].agent_id, listed.agents[0].version, listed.agents[0].outdated = "first", "0.2.0", True
        listed.agents[1].agent_id, listed.agents[1].version = "second", "0.3.0"
        return listed


def test_an_agent_that_can_only_be_upgraded_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Agents(), server)
    farm_pb2_grpc.add_FarmServiceServicer_to_server(Agents(), server)
    monkeypatch.setenv("ETFARM_SERVER", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        assert agents.main(["list"]) == 0
    finally:
        server.stop(None)
    _, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first == "first rack connected 0.2.0 (only upgrades) -"
    assert second == "second rack connected 0.3.0 -"
