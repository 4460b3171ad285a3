"""When a server loads the compile toolchain: at its start, or with the first compilation."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support import models
from tests.support.farm import FarmProcess, descendants, wait_until

pytestmark = pytest.mark.slow(reason="a server loads the toolchain twice")

FORKSERVER = "etfarm.server.workers.child.forkserver"


def forkservers(farm: FarmProcess) -> list[int]:
    """Return the process ids of the server's forkservers that load the toolchain: the jail's examination has one without."""
    assert farm.server is not None
    result = []
    for pid in descendants(farm.server.pid):
        try:
            command = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        if FORKSERVER in command and any("prewarm" in part for part in command):
            result.append(pid)
    return result


@pytest.mark.parametrize("prewarm", [True, False])
def test_the_toolchain_is_loaded_at_start_or_by_the_first_compilation(tmp_path: Path, prewarm: bool) -> None:
    with FarmProcess(tmp_path / "farm", bundle=False, prewarm=prewarm, executes=True) as farm:
        farm.folder.mkdir()
        farm.start(agents=0)
        with farm.client() as client:
            if prewarm:
                assert len(forkservers(farm)) == 1
                assert wait_until(lambda: client.info().workers_ready)
            else:
                info = client.info()
                assert (info.workers_ready, info.starting) == (True, "")
                assert forkservers(farm) == []
            compiled = client.compile(models.save(models.conv, tmp_path / "conv.pt2")).result().report
            assert compiled.state == "SUCCEEDED"
            assert len(forkservers(farm)) == 1
