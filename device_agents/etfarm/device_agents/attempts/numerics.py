"""Step 7: the numerics pass: one execution that records what every operator gave."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from etfarm.device_agents.runners.protocol import Runner
from etfarm.wire.tensors import Value


@dataclass(frozen=True)
class Recorded:
    """What the pass gave."""

    etdump: Path
    """Its events, which say where in `debug` each value lies."""
    debug: Path
    outputs: list[Value]

    def delete(self) -> None:
        """Makes room for what follows: the values of a large model take gigabytes."""
        self.etdump.unlink()
        self.debug.unlink()


async def record(runner: Runner, folder: Path) -> Recorded:
    """One execution of the method, which is loaded with `debug`, its inputs set; the files are in `folder`, or come there by
    `RemoteRunner.collect`.

    Half of what the disk has free may be filled: others need some of it meanwhile.

    Raises:
        DeviceStorageFailed: the values take more than that, or the disk is full.
        As `Runner.debug`.
    """
    free = (await asyncio.to_thread(shutil.disk_usage, folder)).free
    done = await runner.debug(folder / "numerics.etdp", folder / "numerics.bin", max_bytes=free // 2)
    return Recorded(done.etdump, done.dump, await runner.outputs())
