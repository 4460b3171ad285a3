"""What the forkserver pays once for all children: one-off costs, and nothing on a second thread, or its children could hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.compile.lower import xnnpack_patterns
from etfarm.server.workers.pool import Workers

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_patterns_are_built_before_a_child_is_forked_and_no_thread_is_left(workers: Workers) -> None:
    async with await workers.run("tests.support.warm_tasks:look", None, deadline_s=60) as finished:
        contents = json.loads(finished.result)
    assert contents == {"torch_threads": 2, "patterns": [xnnpack_patterns.__name__] * 2, "shares_origins": True}
    # From outside: a child sees no process but its own.
    assert len(list(Path(f"/proc/{workers.forkserver_pid}/task").iterdir())) == 1


async def test_a_graph_is_compiled_when_it_is_called_or_its_code_is_read(workers: Workers) -> None:
    async with await workers.run("tests.support.warm_tasks:use_a_graph", None, deadline_s=60) as finished:
        seen = json.loads(finished.result)
    assert seen == {
        "compiled_at_first": False, "called": [0.0, -1.0, -1.0], "kept": True,
        "parameters": ["input"], "of_class": ["self", "input"], "code": ["return relu", "return input_1"], "text": True,
        "pickled": -1.0, "copied": -1.0,
    }  # fmt: skip
