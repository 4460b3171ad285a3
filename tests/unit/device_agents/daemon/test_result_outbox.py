"""The result outbox: an acknowledged result leaves no file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from etfarm.device_agents.daemon.result_outbox import ResultOutbox
from etfarm.v1 import agent_pb2


async def test_a_result_that_is_acknowledged_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    outbox = ResultOutbox(tmp_path)
    # Large enough that it is being written when the acknowledgement comes.
    writing = asyncio.create_task(outbox.put(agent_pb2.RunResult(attempt_id="a", device_id="x" * (64 << 20))))
    await asyncio.sleep(0)
    assert "a" in outbox
    outbox.drop("a")
    await writing
    assert not list(tmp_path.iterdir()) and not outbox.waiting
