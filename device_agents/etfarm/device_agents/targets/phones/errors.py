"""Errors that keep a phone from serving a farm; errors of the connection to it are in `adb.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.device_agents.adb import Phone, State
from etfarm.wire.errors import DeviceError, Kind

_EXPLAINED = {
    State.UNAUTHORIZED: "has not allowed this machine to debug it",
    State.AUTHORIZING: "has not allowed this machine to debug it yet",
    State.OFFLINE: "is connected and does not answer adb",
    State.NO_PERMISSIONS: "is connected, and this user may not open its USB device",
}


class PhoneNotReady(DeviceError):
    """A phone that adb lists in a state in which no program can run."""

    reason = "PHONE_NOT_READY"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, phone: Phone) -> None:
        what = _EXPLAINED.get(phone.state, f"is in adb's state {phone.state.value!r}")
        super().__init__(
            f"The phone {phone.serial} {what} ({phone.state.value}).",
            phone.remedy or "Start Android on it.",
            serial=phone.serial,
            state=phone.state.value,
        )


class PhoneUnsupported(DeviceError):
    """A phone for whose programs there is no runner bundle."""

    reason = "PHONE_UNSUPPORTED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, serial: str, arch: str) -> None:
        super().__init__(
            f"The phone {serial} runs {arch or 'unknown'} programs only, and runners are for 64-bit Arm (aarch64).",
            "Use a phone whose Android has 64 bits: `adb shell getprop ro.product.cpu.abilist` names arm64-v8a there.",
            serial=serial,
            arch=arch,
        )


class PhoneTooOld(DeviceError):
    """A phone whose adbd cannot report a command's exit code."""

    reason = "PHONE_TOO_OLD"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, serial: str) -> None:
        super().__init__(
            f"The phone {serial} is too old: its adb does not report exit codes (shell_v2).",
            "Use one with Android 8 or later.",
            serial=serial,
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


class PhoneTaken(DeviceError):
    """A phone that another agent serves."""

    reason = "PHONE_TAKEN"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, serial: str, owner: str) -> None:
        super().__init__(
            f"The phone {serial} is served by another agent ({owner or 'unknown'}).",
            "Stop that one, or leave the phone to it; two at once would disturb each other's measurements.",
            serial=serial,
            owner=owner,
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


class OwnRunnerFailed(DeviceError):
    """A runner of --phone-runner that does not work on the phone."""

    reason = "PHONE_RUNNER_UNUSABLE"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, serial: str, command: str, why: str) -> None:
        super().__init__(
            f"The runner {command} on the phone {serial} does not work: {why.rstrip('.')}.",
            "Put it there, executable, with `adb push`; without --phone-runner the farm's runner is used.",
            serial=serial,
            command=command,
            why=why,
        )


class PhoneStorageDamaged(DeviceError):
    """A file on the phone that twice differed from what was written."""

    reason = "PHONE_STORAGE_DAMAGED"
    kind = Kind.DATA_LOSS

    def __init__(self, serial: str, files: str) -> None:
        super().__init__(
            f"The phone {serial} loses what is written to it: {files}.",
            "Check its storage: `adb shell df /data` and `adb shell dmesg`.",
            serial=serial,
            files=files,
        )


class RunnerNotConfined(DeviceError):
    """An unconfined runner on a phone whose agent requires confined runners."""

    reason = "RUNNER_NOT_CONFINED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, active: Sequence[str]) -> None:
        super().__init__(
            f"The runner on the phone must be confined by seccomp, but is confined by {', '.join(active) or 'nothing'} only.",
            "Build a new bundle with `etfarm bundle build`, or start the agent without --require-jail.",
            active=",".join(active),
        )
