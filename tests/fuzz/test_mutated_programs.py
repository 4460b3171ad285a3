"""Damaged programs that pass the server's checks, on a real agent: it never dies, and the device is back at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import mutated_programs

pytestmark = pytest.mark.slow(reason="runs mutated programs on a real runner")

COUNT = 24
SEED = 20261122


async def test_a_damaged_program_neither_crashes_the_agent_nor_blocks_the_device(tmp_path: Path) -> None:
    async with mutated_programs.agent(tmp_path) as (server, connection, process):
        figures = await mutated_programs.run(COUNT, SEED, tmp_path, server, connection)
        assert process.returncode is None
    assert figures.run == COUNT
    # The median alone: a machine that does other things holds up a few.
    assert sorted(figures.back_s)[len(figures.back_s) // 2] < mutated_programs.BACK_S, str(figures)
    assert sum(count for reason, count in figures.reasons.items() if reason) > COUNT // 4, "too few were damaged enough"
    assert "Traceback" not in (tmp_path / "agent.log").read_text()
