"""Errors that keep a phone from serving a farm; errors of the connection to it are in `adb.errors`."""

from __future__ import annotations

from etfarm.device_agents.adb import Phone, State
from etfarm.wire.errors import DeviceError, EtfarmError, Kind, error_for

_EXPLAINED = {
    State.UNAUTHORIZED: "has not allowed this machine to debug it",
    State.AUTHORIZING: "has not allowed this machine to debug it yet",
    State.OFFLINE: "is connected and does not answer adb",
    State.NO_PERMISSIONS: "is connected, and this user may not open its USB device",
}


def phone_not_ready(phone: Phone) -> EtfarmError:
    """Return the error of a phone that adb lists in a state in which no program can run."""
    what = _EXPLAINED.get(phone.state, f"is in adb's state {phone.state.value!r}")
    return error_for(
        "PHONE_NOT_READY",
        f"The phone {phone.serial} {what} ({phone.state.value}).",
        phone.remedy or "Start Android on it.",
        serial=phone.serial,
        state=phone.state.value,
    )


class PhoneListedTwice(DeviceError):
    """A phone that adb also lists by another serial, by which it is served."""

    reason = "PHONE_LISTED_TWICE"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, serial: str, device_id: str) -> None:
        self.device_id = device_id
        super().__init__(
            f"The phone {serial} is already served as {device_id}: it is connected twice.", serial=serial, device=device_id
        )


class PhoneRefused(DeviceError):
    """A phone whose shell cannot perform an operation that the agent needs."""

    reason = "PHONE_REFUSED"

    def __init__(self, serial: str, what: str, complaint: str) -> None:
        super().__init__(
            f"The phone {serial} cannot {what}: {complaint.strip() or 'no reason'}.",
            "Its shell user needs /data/local/tmp, with room for 100 MB, and the programs of Android 8 or later.",
            serial=serial,
            what=what,
            told=complaint.strip(),
        )


def own_runner_failed(serial: str, command: str, why: str) -> EtfarmError:
    """Return the error of a runner of --phone-runner that does not work on the phone."""
    return error_for(
        "PHONE_RUNNER_UNUSABLE",
        f"The runner {command} on the phone {serial} does not work: {why.rstrip('.')}.",
        "Put it there, executable, with `adb push`; without --phone-runner the farm's runner is used.",
        serial=serial,
        command=command,
        why=why,
    )


def phone_storage_damaged(serial: str, files: str) -> EtfarmError:
    """Return the error of a file on the phone that twice differed from what was written."""
    return error_for(
        "PHONE_STORAGE_DAMAGED",
        f"The phone {serial} loses what is written to it: {files}.",
        "Check its storage: `adb shell df /data` and `adb shell dmesg`.",
        serial=serial,
        files=files,
    )
