"""The forkserver as a process of the daemon."""

from __future__ import annotations

import atexit
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.isolation import Jail, JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.ordered_process import Ends, OrderedProcess
from etfarm.wire.sandbox import cgroups


class ForkserverProcess(OrderedProcess):
    """A running forkserver process.

    Args:
        folder: existing folder that contains the children's folders; children only see their own.
        preload: `module` to import or `module:function` to call before the forkserver serves.
        options: options of the children's jail.
    """

    def __init__(self, folder: Path, preload: Sequence[str], options: JailOptions) -> None:
        home = folder / "home"
        hidden = [str(path) for path in (folder, *options.hidden)]
        visibility = json.dumps({"hidden": hidden, "readable": [str(path) for path in options.readable]})
        super().__init__(
            "forkserver",
            "etfarm.server.workers.child.forkserver",
            [visibility, *preload],
            home,
            isolation.clean_environment(home),
        )

    def order(self, task: str, folder: Path, limits: Limits, jail: Jail) -> Ends:
        """Order a child, as `send_order`."""
        return self.send_order({"task": task, "folder": str(folder), "limits": asdict(limits), "jail": asdict(jail)})


@cache
def find_cgroup_place() -> cgroups.Place | None:
    """Return the cgroup in which this process can limit its children's trees, or None; cached for the process's lifetime."""
    place = cgroups.find_place()
    if place is not None:
        atexit.register(cgroups.leave, place)
    return place
