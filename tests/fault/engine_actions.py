"""What else happens in a random schedule of a large farm: faults of its engines, and of a second server."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

from tests.fault.actions import Action, action
from tests.fault.engines import Engines
from tests.fault.shaken_farm import World

ENGINE_ACTIONS: Final[dict[Action, int]] = {}
"""The actions with their odds."""


def _engines(world: World) -> Engines:
    assert world.engines is not None
    return world.engines


@action(2, ENGINE_ACTIONS)
async def restart_postgres(world: World) -> str:
    """End PostgreSQL in order or by a crash, and start it again."""
    how = world.draws.choice([signal.SIGINT, signal.SIGQUIT])
    await asyncio.to_thread(_engines(world).postgres.stop, how)
    await asyncio.sleep(away_s := world.draws.uniform(0.0, 1.5))
    await asyncio.to_thread(_engines(world).postgres.start)
    return f"{how.name} of PostgreSQL, away for {away_s:.1f} s"


@action(3, ENGINE_ACTIONS)
async def break_bucket(world: World) -> str:
    """Let the bucket answer 503, cut connections, or stand still for a while."""
    bucket, how = _engines(world).bucket, world.draws.choice(["503", "cut", "stall"])
    methods = world.draws.choice([["GET", "HEAD"], ["PUT", "POST"], ["GET", "HEAD", "PUT", "POST", "DELETE"]])
    if how == "stall":
        bucket.stall()
    for method in methods if how != "stall" else []:
        (bucket.answer_503 if how == "503" else bucket.cut)(method)
    await asyncio.sleep(broken_s := world.draws.uniform(0.2, 2.0))
    bucket.heal()
    return f"{how} of the bucket for {broken_s:.1f} s"


@action(3, ENGINE_ACTIONS)
async def kill_second_server(world: World) -> str:
    """Kill the second server, and start it again."""
    world.note_processes()
    assert world.second is not None
    world.second.kill9()
    await asyncio.sleep(away_s := world.draws.uniform(0.0, 1.0))
    await asyncio.to_thread(world.second.restart)
    return f"kill -9 of the second server, away for {away_s:.1f} s"


@action(2, ENGINE_ACTIONS)
async def freeze_a_server(world: World) -> str:
    """Freeze one of the servers for so long that it loses the lead."""
    assert world.second is not None
    farm = world.draws.choice([world.farm, world.second])
    assert farm.server is not None
    farm.server.signal(signal.SIGSTOP)
    await asyncio.sleep(frozen_s := world.draws.uniform(3.0, 5.0))
    farm.server.signal(signal.SIGCONT)
    return f"SIGSTOP of {farm.address} for {frozen_s:.1f} s"
