"""The known devices that a selector matches."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire.errors import error_for
from etfarm.wire.selectors import Selector, hint_label


def select_devices(selector: Selector, text: str, devices: Sequence[Device]) -> list[Device]:
    """Return the known devices that a selector matches, real ones first.

    Raises:
        NO_SUCH_DEVICE: no device matches; the message lists the known ones.
    """
    selected = [device for device in devices if selector.matches(device)]
    if selected:
        return sorted(selected, key=lambda device: (device.emulated, device.id))
    if not devices:
        raise error_for(
            "NO_SUCH_DEVICE",
            "No device has ever connected to this farm.",
            "Start `etfarm agent --server ADDRESS` on one.",
            known="",
        )
    known = "; ".join(describe(device) for device in devices[:10])
    remedy = f"{hint_label(selector, devices)}Known devices: {known}."
    raise error_for("NO_SUCH_DEVICE", f"No known device matches {text!r}.", remedy, selector=text, known=known)


def describe(device: Device) -> str:
    """Return a short description of a device."""
    state = DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
    emulated = ", emulated" if device.emulated else ""
    return f"{device.name} (id={device.id}, arch={device.arch}, soc={device.soc}, cores={device.cores}{emulated}, {state})"
