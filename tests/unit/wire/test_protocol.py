"""The version of the protocol that an agent and a server have in common."""

from __future__ import annotations

import pytest

from etfarm.v1 import agent_pb2
from etfarm.wire.protocol import common_version


def hello(newest: int, oldest: int | None = None) -> agent_pb2.Hello:
    return agent_pb2.Hello(protocol_version=newest, oldest_protocol_version=oldest)


@pytest.mark.parametrize(
    ("agent", "version"),
    [
        (hello(3, 2), 3),
        (hello(2), 2),  # the last release
        (hello(1), None),  # the one before
        (hello(4, 3), 3),  # the next release
        (hello(4, 2), 3),
        (hello(5, 4), None),
        (hello(4), None),  # one that speaks nothing else
        (hello(0), None),
        (hello(-1, -1), None),
        (hello(2, 3), None),  # no agent says that
    ],
)
def test_the_newest_common_version_is_chosen(agent: agent_pb2.Hello, version: int | None) -> None:
    assert common_version(agent, newest=3, oldest=2) == version
