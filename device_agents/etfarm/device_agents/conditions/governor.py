"""The cpus' clock governors during a measurement: set if the agent may, and restored in any case.

The previous governors are written into the agent's data folder before they are changed, so that an agent that was killed restores
them at its next start. Several agents on one machine change a governor one at a time, or the last one would restore another one's
setting: an agent that changes a governor holds a lock on its file, which ends with the process in any case.
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
from etfarm.wire.errors import error_for

log = logging.getLogger(__name__)

KEPT_GOVERNORS: Final = "governors.json"
"""Name of the file in the agent's data folder."""
_AVAILABLE: Final = "scaling_available_governors"
_POLICIES: Final = "sys/devices/system/cpu/cpufreq"
_GOVERNOR_FILE: Final = re.compile(rf"/{_POLICIES}/policy\d+/scaling_governor\Z")
_NAME: Final = re.compile(r"[\w-]{1,32}\Z")


class Governors:
    """The cpufreq governors of this machine. Without any there is nothing to set or to report.

    Args:
        kept: the file that holds the previous governors while they are changed.
        wanted: the governor for measurements; None leaves all governors unchanged.
        root: the folder that contains /sys.
    """

    def __init__(self, kept: Path, wanted: str | None, root: Path = Path("/")) -> None:
        self._kept = kept
        self._wanted = wanted
        self._root = root

    def check(self, cpus: Collection[int] | None = None) -> None:
        """Check that any of these cpus (all of them if None) can have the wanted governor, as far as the kernel reports it.

        Raises:
            GOVERNOR_UNKNOWN: the kernel lists only others.
        """
        offered: set[str] = set()
        for policy in self._policies():
            with suppress(OSError, ValueError):  # the kernel does not list them
                if cpus is None or not _related_cpus(policy).isdisjoint(cpus):
                    offered.update((policy / _AVAILABLE).read_text().split())
        if self._wanted is not None and offered and self._wanted not in offered:
            raise error_for(
                "GOVERNOR_UNKNOWN",
                f"The kernel has no governor {self._wanted!r} here.",
                f"Give --governor one of {', '.join(sorted(offered))}, or keep.",
                governor=self._wanted,
            )

    def restore(self) -> None:
        """Restore what an earlier process left changed, if anything."""
        if kept := self._read_unrestored():
            with ExitStack() as locks:
                mine = {path: governor for path, governor in kept.items() if self._is_mine(self._root / path[1:], locks)}
                self._put_back(mine, {path: governor for path, governor in kept.items() if path not in mine})

    def _read_unrestored(self) -> dict[str, str]:
        """Return the governors that an earlier process did not restore, by file."""
        try:
            kept = json.loads(self._kept.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, governors stay as they are: %s", self._kept, error)
            return {}
        unrestored = {}
        for path, governor in kept.items() if isinstance(kept, dict) else ():
            # The agent itself wrote the file, but its content is validated since it is written to /sys as root.
            if _GOVERNOR_FILE.match(path) and isinstance(governor, str) and _NAME.match(governor):
                unrestored[path] = governor
            else:
                log.warning("%s has %r, which is not a governor of a cpu", self._kept, path)
        if not unrestored:
            self._kept.unlink(missing_ok=True)
        return unrestored

    @contextmanager
    def held(self, cpus: Collection[int] | None = None) -> Iterator[list[report_pb2.DeviceSetting]]:
        """Set the wanted governor for these cpus, all of them if None; yield the intended changes, applied or not."""
        settings: list[report_pb2.DeviceSetting] = []
        if self._wanted is None:
            yield settings
            return
        # Restore first, since another agent may have held these governors at the last restore.
        self.restore()
        previous, unrestored = dict[str, str](), self._read_unrestored()
        with ExitStack() as locks:
            try:
                for policy in self._policies():
                    if (setting := self._set(policy, cpus, previous, unrestored, locks)) is not None:
                        settings.append(setting)
                yield settings
            finally:
                if previous:
                    self._put_back(previous, unrestored)

    def _policies(self) -> list[Path]:
        try:
            return sorted((self._root / _POLICIES).glob("policy[0-9]*"))
        except OSError as error:
            log.warning("governors cannot be checked: %s", error)
            return []

    def _set(
        self, policy: Path, cpus: Collection[int] | None, previous: dict[str, str], unrestored: dict[str, str], locks: ExitStack
    ) -> report_pb2.DeviceSetting | None:
        """Set one policy and add its former governor to `previous`; return None if there is nothing to change.

        Args:
            policy: the policy's folder.
            cpus: cpus of the measurement; None for all.
            previous: receives the former governor, by file.
            unrestored: governors to be restored later in any case.
            locks: locks to hold until the former governor is restored.
        """
        assert self._wanted is not None  # `held` has checked this
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
        # An agent that may not change the governor must not lock it against others.
        if is_writable and not self._is_mine(file, locks):
            # Even if it is already the wanted one: it changes as soon as the other agent is done.
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
            # Save the former governor before the change, so that a killed process loses nothing.
            self._keep(unrestored | previous | {key: governor})
            previous[key] = governor
            file.write_text(self._wanted)
            setting.applied = file.read_text().strip() == self._wanted
            if not setting.applied:
                setting.why = "the kernel set another"
        except OSError as error:
            setting.why = error.strerror or str(error)
        return setting

    def _is_mine(self, file: Path, locks: ExitStack) -> bool:
        """Return whether no other agent holds this file's governor, and lock it until `locks` are released."""
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

    def _put_back(self, governors: Mapping[str, str], unrestored: Mapping[str, str]) -> None:
        """Restore the governors, and keep those in `unrestored` for later.

        Failures are logged and not retried: another program may have changed the setting since.
        """
        for path, governor in governors.items():
            try:
                (self._root / path[1:]).write_text(governor)
            except OSError as error:
                log.warning("the governor %s cannot be put back in %s: %s", governor, path, error)
        if unrestored:
            self._keep(unrestored)
        else:
            self._kept.unlink(missing_ok=True)


def _related_cpus(policy: Path) -> frozenset[int]:
    return parse_cpu_list((policy / "related_cpus").read_text().strip().replace(" ", ","))
