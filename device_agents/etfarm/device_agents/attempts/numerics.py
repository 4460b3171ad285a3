"""The numerics pass, one execution that records every operator's outputs."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from etfarm.device_agents.runners.protocol import Runner
from etfarm.wire.tensors import Value


@dataclass(frozen=True)
class Recorded:
    """The files and outputs of a numerics pass."""

    etdump: Path
    """Its events, which locate each value in `debug`."""
    debug: Path
    outputs: list[Value]

    def delete(self) -> None:
        """Delete the files, since the values of a large model take gigabytes."""
        self.etdump.unlink()
        self.debug.unlink()


async def record(runner: Runner, folder: Path) -> Recorded:
    """Execute the method once and record it; the files are in `folder`, or arrive there with `RemoteRunner.collect`.

    The values may fill half of the disk's free space, since other work needs some of it meanwhile.

    Args:
        runner: has the method loaded with `debug`, and its inputs set.
        folder: where to write the files.

    Raises:
        DEVICE_STORAGE_FAILED: the values exceed that limit, or the disk is full.
        As `Runner.debug`.
    """
    free = (await asyncio.to_thread(shutil.disk_usage, folder)).free
    done = await runner.debug(folder / "numerics.etdp", folder / "numerics.bin", max_bytes=free // 2)
    return Recorded(done.etdump, done.dump, await runner.outputs())
