"""The choice of the id under which an agent serves its machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.errors import FolderUnusable
from etfarm.wire.errors import EtfarmError

log = logging.getLogger(__name__)

DEVICE_SERVED: Final = "DEVICE_SERVED"
"""The reason with which a server refuses a device that another live agent serves."""


class DeviceChoice:
    """The id of the device, which the data folder keeps from the first connection on.

    A new folder takes the machine's id, under which a reinstalled agent has its history again. If another live agent serves that,
    on this machine or on one with a copy of its disk, the folder takes an id of its own.

    Args:
        folder: the data folder.
        ids: the ids that the agent may have on this machine, the preferred one first.
    """

    def __init__(self, folder: DataFolder, ids: Sequence[str]) -> None:
        self._folder = folder
        self._kept = folder.device_id()
        if self._kept and self._kept not in ids:
            log.warning("the data folder has moved here from the machine of device %s; this one is another device", self._kept)
            self._kept = ""
        self.id = self._kept or ids[0]
        """The id to announce."""
        self._others = [] if self._kept else [each for each in ids if each != self.id]

    def give_way(self, refusal: EtfarmError) -> bool:
        """Take the next id if a server refused this one because a live agent serves it; return False if there is none."""
        if refusal.reason != DEVICE_SERVED or not self._others:
            return False
        log.warning("%s This agent has a new data folder, and serves its machine as device %s.", refusal.message, self._others[0])
        self.id = self._others.pop(0)
        return True

    def keep(self) -> None:
        """Keep the id from now on, since a server has accepted it. On a full disk it is kept for this process."""
        self._others = []
        if self._kept == self.id:
            return
        self._kept = self.id
        try:
            self._folder.keep_device_id(self.id)
        except FolderUnusable as error:
            log.warning("%s", error.message)
