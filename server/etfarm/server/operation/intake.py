"""Admission of new work: none while the server stops, and none while its disk is full."""

from __future__ import annotations

from etfarm.server.artifacts.room import Room
from etfarm.wire.errors import error_for


class Intake:
    """The door for new jobs and sessions.

    Args:
        room: the space on the disk of the server's data.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self.is_stopping = False
        """Whether the server finishes what it has, and accepts nothing new."""

    def require_running(self) -> None:
        """Refuse new work of a server that stops.

        Raises:
            SERVER_STOPPING: the server is about to stop.
        """
        if self.is_stopping:
            raise error_for(
                "SERVER_STOPPING",
                "The server is about to stop and accepts no new work.",
                "Try again once it has started again; jobs are kept.",
            )

    def require_open(self) -> None:
        """Refuse new work that needs space on the disk.

        Raises:
            SERVER_STOPPING: the server is about to stop.
            DiskFull: the disk is full.
        """
        self.require_running()
        self._room.require_work()
