"""The adb server's list of phones, parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from etfarm.device_agents.adb.errors import remedy_of


class State(StrEnum):
    """The phone's state as the adb server reports it. Only phones in state DEVICE can run programs."""

    DEVICE = "device"
    OFFLINE = "offline"
    UNAUTHORIZED = "unauthorized"
    AUTHORIZING = "authorizing"
    CONNECTING = "connecting"
    NO_PERMISSIONS = "no permissions"
    DETACHED = "detached"
    RECOVERY = "recovery"
    RESCUE = "rescue"
    SIDELOAD = "sideload"
    BOOTLOADER = "bootloader"
    HOST = "host"
    UNKNOWN = "unknown"
    """A state that no known version of adb reports."""


@dataclass(frozen=True)
class Phone:
    """One line of the adb server's list."""

    serial: str
    """The phone's serial: its own over USB, `HOST:PORT` over TCP. It may contain spaces and colons."""
    state: State
    product: str = ""
    """Product name; like `model` and `device`, empty if adb does not report it or the phone is not in state DEVICE."""
    model: str = ""
    """Model name, in which adb replaces everything but letters and digits with `_`."""
    device: str = ""
    usb: str = ""
    """Path of the USB port that the phone is attached to; empty over TCP."""
    transport_id: int | None = None
    """adb's number of this connection; a changed number means that the phone was disconnected in between."""

    @property
    def remedy(self) -> str:
        """What a person must do so that the phone can be used; empty if it is usable or no remedy is known."""
        return "" if self.state is State.DEVICE else remedy_of(self.state)


_STATES: Final = "|".join(sorted((re.escape(state) for state in State), key=len, reverse=True))
# adb pads the serial to 22 columns and puts one space before the state. A serial may contain spaces and words that are states, so
# the state is searched for only after its columns. An explanation may follow `no permissions`; the keys come last.
_FORMS: Final = (
    re.compile(rf"(?P<serial>.{{22,}}?) (?P<state>{_STATES})(?P<rest>(?:[ ;(].*)?)"),
    re.compile(r"(?P<serial>\S.{21,}?) (?P<state>\S+)(?P<rest>.*)"),
    re.compile(r"(?P<serial>\S+)\s+(?P<state>\S+)(?P<rest>.*)"),
)
_KEY: Final = re.compile(r"(?:^|\s)(product|model|device|transport_id|usb):(\S*)")


def phones_of(text: str) -> tuple[Phone, ...]:
    """Return the phones that `host:devices-l` or `host:track-devices-l` lists; lines that do not describe a phone are skipped."""
    return tuple(phone for line in text.splitlines() if (phone := _phone_of(line)) is not None)


def _phone_of(line: str) -> Phone | None:
    match = next((match for form in _FORMS if (match := form.fullmatch(line.rstrip()))), None)
    if match is None:
        return None
    keys = dict(_KEY.findall(match["rest"]))
    number = keys.get("transport_id", "")
    return Phone(
        serial=match["serial"].strip(),
        state=State(match["state"]) if match["state"] in set(State) else State.UNKNOWN,
        product=keys.get("product", ""),
        model=keys.get("model", ""),
        device=keys.get("device", ""),
        usb=keys.get("usb", ""),
        transport_id=int(number) if number.isascii() and number.isdigit() else None,
    )
