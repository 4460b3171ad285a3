"""The cpus' clock governors during a measurement: set if the agent may, and restored in any case.

The previous governors are written into the agent's data folder before they are changed, so that an agent that was killed restores
them at its next start. Several agents on one machine change a governor one at a time, or the last one would restore what another
one had set: an agent that changes a governor holds a lock on its file, which ends with the process in any case.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from etfarm.device_agents.device.inventory import format_cpu_list, parse_cpu_list
from etfarm.v1 import report_pb2
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.errors import UserError

log = logging.getLogger(__name__)

KEPT_GOVERNORS: Final = "governors.json"
"""In the agent's data folder."""
_AVAILABLE: Final = "scaling_available_governors"
_POLICIES: Final = "sys/devices/system/cpu/cpufreq"
_GOVERNOR_FILE: Final = re.compile(rf"/{_POLICIES}/policy\d+/scaling_governor\Z")
_NAME: Final = re.compile(r"[\w-]{1,32}\Z")


class GovernorUnknown(UserError):
    """The kernel has no governor of the name."""

    reason = "GOVERNOR_UNKNOWN"


class Governors:
    """Sets cpufreq governors. A machine without any has nothing to set, and nothing is told of it.

    Args:
        kept: the file that holds what was found while it is changed.
        wanted: the governor for measurements; None leaves them all as they are.
        root: where /sys is.
    """

    def __init__(self, kept: Path, wanted: str | None, root: Path = Path("/")) -> None:
        self._kept = kept
        self._wanted = wanted
        self._root = root

    def check(self, cpus: Collection[int] | None = None) -> None:
        """Whether any of these cpus, all of them when None, can have the wanted governor, as far as the kernel says.

        Raises:
            GovernorUnknown: the kernel lists others only.
        """
        offered: set[str] = set()
        for policy in self._policies():
            with suppress(OSError, ValueError):  # it does not say
                if cpus is None or not _related_cpus(policy).isdisjoint(cpus):
                    offered.update((policy / _AVAILABLE).read_text().split())
        if self._wanted is not None and offered and self._wanted not in offered:
            raise GovernorUnknown(
                f"The kernel has no governor {self._wanted!r} here.",
                f"Give --governor one of {', '.join(sorted(offered))}, or keep.",
                governor=self._wanted,
            )

    def restore(self) -> None:
        """Puts back what an earlier process left changed; nothing where there is nothing to put back."""
        if kept := self._left():
            with ExitStack() as locks:
                mine = {path: governor for path, governor in kept.items() if self._is_mine(self._root / path[1:], locks)}
                self._put_back(mine, {path: governor for path, governor in kept.items() if path not in mine})

    def _left(self) -> dict[str, str]:
        """What an earlier process found and did not put back: governors by file."""
        try:
            kept = json.loads(self._kept.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, governors stay as they are: %s", self._kept, error)
            return {}
        left = {}
        for path, governor in kept.items() if isinstance(kept, dict) else ():
            # The file is ours, yet what is written as root into /sys is looked at twice.
            if _GOVERNOR_FILE.match(path) and isinstance(governor, str) and _NAME.match(governor):
                left[path] = governor
            else:
                log.warning("%s has %r, which is no governor of a cpu", self._kept, path)
        if not left:
            self._kept.unlink(missing_ok=True)
        return left

    @contextmanager
    def held(self, cpus: Collection[int] | None = None) -> Iterator[list[report_pb2.DeviceSetting]]:
        """The wanted governor for these cpus, all of them when None. Gives what was to be changed, whether or not it was."""
        settings: list[report_pb2.DeviceSetting] = []
        if self._wanted is None:
            yield settings
            return
        # What another agent had when this one last looked.
        self.restore()
        previous, left = dict[str, str](), self._left()
        with ExitStack() as locks:
            try:
                for policy in self._policies():
                    if (setting := self._set(policy, cpus, previous, left, locks)) is not None:
                        settings.append(setting)
                yield settings
            finally:
                if previous:
                    self._put_back(previous, left)

    def _policies(self) -> list[Path]:
        try:
            return sorted((self._root / _POLICIES).glob("policy[0-9]*"))
        except OSError as error:
            log.warning("governors cannot be looked at: %s", error)
            return []

    def _set(
        self, policy: Path, cpus: Collection[int] | None, previous: dict[str, str], left: dict[str, str], locks: ExitStack
    ) -> report_pb2.DeviceSetting | None:
        """Sets one policy, and adds what it had to `found`; None where there is nothing to change.

        Args:
            left: what is to be put back later anyway.
            locks: until what was found is put back.
        """
        assert self._wanted is not None  # `held` looked
        file = policy / "scaling_governor"
        try:
            of_cpus = _related_cpus(policy)
            governor = file.read_text().strip()
        except (OSError, ValueError):
            return None
        if cpus is not None and of_cpus.isdisjoint(cpus):
            return None
        setting = report_pb2.DeviceSetting(
            name="governor", cpus=format_cpu_list(of_cpus), found=governor, wanted=self._wanted
        )  # fmt: skip
        is_writable = os.access(file, os.W_OK)
        # Who may not change it must not hold it against others.
        if is_writable and not self._is_mine(file, locks):
            # Also where it is the wanted one: it will be another as soon as that agent is done.
            setting.why = "another agent of this machine has set it for a measurement of its own"
            return setting
        if governor == self._wanted:
            return None
        available = policy / _AVAILABLE
        try:
            if available.exists() and self._wanted not in available.read_text().split():
                setting.why = f"the kernel has no governor {self._wanted} here"
                return setting
            if not is_writable:
                setting.why = "the agent may not write it"
                return setting
            key = f"/{file.relative_to(self._root)}"
            # First what was found, then the change: a process that is killed in between has lost nothing.
            self._keep(left | previous | {key: governor})
            previous[key] = governor
            file.write_text(self._wanted)
            setting.applied = file.read_text().strip() == self._wanted
            if not setting.applied:
                setting.why = "the kernel took another"
        except OSError as error:
            setting.why = error.strerror or str(error)
        return setting

    def _is_mine(self, file: Path, locks: ExitStack) -> bool:
        """Whether no other agent has the governor of this file; then none gets it before `locks` are let go."""
        try:
            opened = locks.enter_context(file.open())
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("%s cannot be locked: %s", file, error)
        return True

    def _keep(self, governors: Mapping[str, str]) -> None:
        write_atomically(self._kept, json.dumps(dict(governors)).encode(), durable=True)

    def _put_back(self, governors: Mapping[str, str], left: Mapping[str, str]) -> None:
        """Writes them back, and keeps what is left for later. What fails is logged and not tried again: others may have set
        something since."""
        for path, governor in governors.items():
            try:
                (self._root / path[1:]).write_text(governor)
            except OSError as error:
                log.warning("the governor %s cannot be put back in %s: %s", governor, path, error)
        if left:
            self._keep(left)
        else:
            self._kept.unlink(missing_ok=True)


def _related_cpus(policy: Path) -> frozenset[int]:
    return parse_cpu_list((policy / "related_cpus").read_text().strip().replace(" ", ","))
