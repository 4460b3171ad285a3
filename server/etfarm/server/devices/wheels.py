"""Wheels of etfarm, to which agents are upgraded: their versions, and the one that the operator configured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.wheel_check import REMEDY, VERSION, NotAWheel, read_version
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.errors import BadAnswer
from etfarm.wire import digest as digests

_TASK: Final = "etfarm.server.devices.wheel_check:check"
_DEADLINE_S: Final = 60.0


@dataclass(frozen=True)
class AgentWheel:
    """The wheel of `etfarm serve --agent-wheel`, as it was when the server started."""

    path: Path
    version: str
    """Its version of etfarm."""
    digest: str

    @classmethod
    def read(cls, path: Path) -> AgentWheel:
        """Return the wheel in a file. Blocks.

        Raises:
            NotAWheel: there is no such file, or it is not a wheel of etfarm with an agent.
        """
        if not path.is_file():
            raise NotAWheel(f"There is no wheel {path}.", REMEDY)
        return cls(path, read_version(path), digests.of_file(path))

    async def put(self, store: Store, owner: str, holder: str) -> None:
        """Store the wheel as an upload of a principal, unless it is stored.

        Raises:
            NotAWheel: the file has changed since the server started.
            DiskFull: the store cannot write.
        """
        if await store.has(self.digest):
            return
        remedy = "Restart the server, or give the wheel with --wheel."
        try:
            data = await asyncio.to_thread(self.path.read_bytes)
        except OSError as error:
            raise NotAWheel(f"{self.path} cannot be read any more: {error.strerror}.", remedy) from None
        if await asyncio.to_thread(digests.of_bytes, data) != self.digest:
            raise NotAWheel(f"{self.path} has changed since the server started.", remedy)
        await store.put(data, owner, holder=holder)


async def version_in_child(workers: ChildPool, path: Path) -> str:
    """Return the version of etfarm that an uploaded wheel has, which a jailed child reads.

    Raises:
        NotAWheel: the file is not a wheel of etfarm with an agent.
        EtfarmError: as `ChildPool.run`.
    """
    async with await workers.run(_TASK, path, deadline_s=_DEADLINE_S, light=True, urgent=True) as finished:
        version = finished.result[:100].decode(errors="replace")
    if not VERSION.fullmatch(version):
        raise BadAnswer(f"The check of a wheel answered with {version!a}.")
    return version
