"""The state of a farm at one moment, for its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etfarm.server.artifacts.room import DiskSpace
from etfarm.server.state.engine import ConnectionCounts
from etfarm.server.workers.child_pool import PoolUse
from etfarm.v1 import common_pb2


@dataclass
class Snapshot:
    """State of the farm at one scrape."""

    cells: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Numbers of live cells by state and project."""
    live_jobs: Mapping[str, int] = field(default_factory=dict)
    """Numbers of live jobs by project."""
    devices: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Numbers of devices by state and health."""
    oldest_wait_s: float = 0.0
    """Age of the cell that has waited longest for a device."""
    pool: PoolUse | None = None
    """Use of the pool that compiles and analyzes."""
    disk: DiskSpace | None = None
    stored: tuple[int, int] | None = None
    """Number of stored artifacts, and their bytes."""
    connections: ConnectionCounts | None = None
    """The connections to PostgreSQL; None with SQLite."""
    downloaded: Mapping[str, int] = field(default_factory=dict)
    """Bytes that callers downloaded since the start of the server, by path: `server` or `s3`."""
    sessions: int = 0
    is_stopping: bool = False


def state_name(state: common_pb2.CellState.ValueType) -> str:
    """Return the name of a cell's state, such as RUNNING."""
    return common_pb2.CellState.Name(state).removeprefix("CELL_STATE_")
