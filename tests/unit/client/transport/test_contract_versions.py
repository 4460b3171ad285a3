"""The versions of the contract that a client and a server have in common."""

from __future__ import annotations

import pytest

from etfarm.client.transport.connection import require_common_version
from etfarm.v1.farm_pb2 import ServerInfo
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from tests.support.golden import Golden


@pytest.mark.parametrize("info", [
    ServerInfo(version="0.3.0", protocol_version=PROTOCOL_VERSION, oldest_protocol_version=PROTOCOL_VERSION),
    ServerInfo(version="0.4.0", protocol_version=PROTOCOL_VERSION + 1, oldest_protocol_version=PROTOCOL_VERSION),
])  # fmt: skip
def test_a_server_that_serves_the_clients_version_is_used(info: ServerInfo) -> None:
    require_common_version(info, server="farm:7000")


@pytest.mark.remedy("SERVER_TOO_OLD", "CLIENT_TOO_OLD")
@pytest.mark.parametrize(("info", "reason"), [
    (ServerInfo(version="0.1.0"), "SERVER_TOO_OLD"),  # names no version of the contract
    (ServerInfo(version="0.2.0", protocol_version=3, oldest_protocol_version=2), "SERVER_TOO_OLD"),
    (ServerInfo(version="9.0", protocol_version=9, oldest_protocol_version=8), "CLIENT_TOO_OLD"),
])  # fmt: skip
def test_others_are_refused_with_what_to_install(golden: Golden, info: ServerInfo, reason: str) -> None:
    with golden.refuses(reason):
        require_common_version(info, server="farm:7000")
    same = ServerInfo(version="0.3.0", protocol_version=PROTOCOL_VERSION, oldest_protocol_version=OLDEST_PROTOCOL_VERSION)
    require_common_version(same, server="farm:7000")
