"""What the adb server tells of the phones it knows: its list, read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from etfarm.device_agents.adb.errors import remedy_of


class State(StrEnum):
    """How a phone stands with the adb server, in adb's words. Only of DEVICE runs are possible."""

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
    """A word that no adb of ours had."""


@dataclass(frozen=True)
class Phone:
    """One line of the list."""

    serial: str
    """Its identity: of USB the phone's own, of TCP `HOST:PORT`. It may have spaces and colons."""
    state: State
    product: str = ""
    """As `model` and `device` empty where adb was not told, and of a phone that is not DEVICE."""
    model: str = ""
    """With `_` for what is no letter or digit, as adb has it."""
    device: str = ""
    usb: str = ""
    """The path of the port it hangs on; empty over TCP."""
    transport_id: int | None = None
    """adb's number of this connection: another one means that the phone was away in between."""

    @property
    def remedy(self) -> str:
        """What a person does so that the phone can be used; empty where it can be, or nobody knows."""
        return "" if self.state is State.DEVICE else remedy_of(self.state)


_STATES: Final = "|".join(sorted((re.escape(state) for state in State), key=len, reverse=True))
# adb pads the serial to 22 columns and puts one space before the state. A serial may hold spaces and words that are states,
# so no state is looked for within its columns. `no permissions` goes on with an explanation; then come the keys.
_FORMS: Final = (
    re.compile(rf"(?P<serial>.{{22,}}?) (?P<state>{_STATES})(?P<rest>(?:[ ;(].*)?)"),
    re.compile(r"(?P<serial>\S.{21,}?) (?P<state>\S+)(?P<rest>.*)"),
    re.compile(r"(?P<serial>\S+)\s+(?P<state>\S+)(?P<rest>.*)"),
)
_KEY: Final = re.compile(r"(?:^|\s)(product|model|device|transport_id|usb):(\S*)")


def phones_of(text: str) -> tuple[Phone, ...]:
    """The phones of what `host:devices-l` and `host:track-devices-l` answer; a line that is none is left out."""
    return tuple(phone for line in text.splitlines() if (phone := _phone_of(line)) is not None)


def _phone_of(line: str) -> Phone | None:
    found = next((found for form in _FORMS if (found := form.fullmatch(line.rstrip()))), None)
    if found is None:
        return None
    keys = dict(_KEY.findall(found["rest"]))
    number = keys.get("transport_id", "")
    return Phone(
        serial=found["serial"].strip(),
        state=State(found["state"]) if found["state"] in set(State) else State.UNKNOWN,
        product=keys.get("product", ""),
        model=keys.get("model", ""),
        device=keys.get("device", ""),
        usb=keys.get("usb", ""),
        transport_id=int(number) if number.isascii() and number.isdigit() else None,
    )
