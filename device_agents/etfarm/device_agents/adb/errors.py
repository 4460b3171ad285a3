"""Errors between an agent and a phone: no adb server, or a phone that is missing, silent, full or refuses a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from etfarm.device_agents.errors import DiskFull
from etfarm.wire.errors import DeviceError, EtfarmError, Kind, UserError, error_for

_START: Final = "Start it with `adb start-server`; where adb is not installed: `apt-get install adb` on Debian."
_REPLUG: Final = "Check the cable or the network, the phone's power and its USB debugging; `adb devices -l` shows what adb sees."
_RULES: Final = "Install Debian's android-sdk-platform-tools-common for its udev rules, then plug the phone in again."
_ALLOW: Final = "Unlock the phone and allow USB debugging for this machine in the dialog that it shows."
_REFUSALS: Final = (
    ("unauthorized", _ALLOW),
    ("failed to authenticate", _ALLOW),
    ("authorizing", _ALLOW),
    ("no permissions", _RULES),
    ("insufficient permissions", _RULES),
    ("offline", "Plug the phone in again, or `adb reconnect offline`."),
    ("connecting", "Wait a moment; then plug the phone in again."),
    ("more than one", "Disconnect one of the two: `adb devices -l` shows them."),
    (
        "failed to connect",
        "Check that the phone is on, in the same network, and listens: `adb tcpip 5555` over USB enables that.",
    ),
)


def remedy_of(text: str) -> str:
    """Return what to do about an adb refusal or phone state; empty if no remedy is known."""
    return next((remedy for word, remedy in _REFUSALS if word in text.lower()), "")


def adb_missing(why: str) -> EtfarmError:
    """Return the error of an adb program that is not installed or cannot start its server."""
    return error_for("ADB_MISSING", f"adb cannot be started: {why}", "Install it, on Debian with `apt-get install adb`.", why=why)


class AdbServerMissing(UserError):
    """An address at which no adb server answers: nothing or another program listens there, or the server was stopped."""

    reason = "ADB_SERVER_MISSING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"No adb server answers at {address}: {why}", _START, address=address, why=why)


class AdbRefused(DeviceError):
    """A FAIL reply of the adb server.

    `text` is the server's message, such as `device unauthorized`; `serial` is the phone's serial, or empty.
    """

    reason = "ADB_REFUSED"

    def __init__(self, serial: str, text: str) -> None:
        self.serial = serial
        self.text = text.strip()
        sentence = next(iter(self.text.splitlines()), "it gives no reason")
        about = f"the phone {serial}" if serial else "the adb server"
        super().__init__(f"adb refuses {about}: {sentence}", remedy_of(self.text), serial=serial, text=self.text)


class PhoneGone(DeviceError):
    """A phone that is missing or vanished during an operation; a shell cannot distinguish this from a stopped adb server."""

    reason = "PHONE_GONE"

    def __init__(self, serial: str, during: str) -> None:
        self.serial = serial
        super().__init__(f"The phone {serial} is gone ({during}).", _REPLUG, serial=serial, during=during)


class PhoneSilent(DeviceError):
    """A phone that sent nothing for too long, whatever state adb reports; this is how a dead link appears."""

    reason = "PHONE_SILENT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, serial: str, during: str, seconds: float) -> None:
        self.serial = serial
        super().__init__(
            f"The phone {serial} did not answer within {seconds:g} s ({during}).",
            _REPLUG,
            serial=serial,
            during=during,
            seconds=f"{seconds:g}",
        )


def phone_answer_too_long(serial: str, during: str, max_bytes: int) -> EtfarmError:
    """Return the error of a command's output or a file that is larger than the caller accepts."""
    return error_for(
        "PHONE_ANSWER_TOO_LONG",
        f"The phone {serial} sent more than {max_bytes} bytes ({during}).",
        serial=serial,
        during=during,
        max_bytes=max_bytes,
    )


class PhoneFileRefused(DeviceError):
    """A file that the phone refuses to read or write. `text` is the phone's message."""

    reason = "PHONE_FILE_REFUSED"

    def __init__(self, serial: str, remote: str, text: str, remedy: str = "") -> None:
        self.serial = serial
        self.text = text.strip()
        super().__init__(
            f"The phone {serial} refuses {remote}: {self.text}", remedy, serial=serial, remote=remote, text=self.text
        )


class PhoneFileMissing(PhoneFileRefused):
    """A file that does not exist on the phone."""

    reason = "PHONE_FILE_MISSING"
    kind = Kind.NOT_FOUND


class PhoneFull(DiskFull):
    """A phone without room for a file. `text` is the phone's message."""

    def __init__(self, serial: str, remote: str, text: str) -> None:
        self.serial = serial
        self.text = text.strip()
        super().__init__(
            f"The phone {serial} has no room for {remote}: {self.text}",
            f"Free some storage on the phone; `adb -s {serial} shell df -h /data` shows it.",
            serial=serial,
            remote=remote,
            text=self.text,
        )


_FILE_REMEDIES: Final = (
    ("Read-only file system", "Choose a folder that can be written to, such as one in /data/local/tmp."),
    ("Permission denied", "Choose a folder of the shell user, such as one in /data/local/tmp."),
    ("Not a directory", "Remove the file that stands where a folder is needed."),
)
_FULL: Final = ("No space left on device", "Disk quota exceeded", "Quota exceeded")


def file_refusal(serial: str, remote: str, text: str) -> PhoneFull | PhoneFileRefused:
    """Return the error for the message with which the phone ends a transfer; the message ends with a strerror(3) text."""
    if _has(text, _FULL):
        return PhoneFull(serial, remote, text)
    if _has(text, ["No such file or directory"]):
        return PhoneFileMissing(serial, remote, text)
    return PhoneFileRefused(serial, remote, text, next((remedy for words, remedy in _FILE_REMEDIES if words in text), ""))


def _has(text: str, words: Iterable[str]) -> bool:
    return any(word in text for word in words)
