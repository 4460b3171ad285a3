"""What is shown of a device's runner. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from etfarm.client.models import Device

_REMEDY: Final = "`etfarm bundle build` builds one, `etfarm bundle add` adds it"


def describe_runner(device: Device) -> str:
    """Return the runner of a device's programs, and its other runners; empty if an unusable device has not reported any."""
    if device.is_runner_coming:
        return "not known yet: the farm is building it"
    if not device.runner:
        return "" if device.problem is not None else f"none: {_REMEDY}"
    if device.runner == "python":
        return f"python, its own, as the farm has no bundle for it: {_REMEDY}"
    if device.runner in device.own_runners:
        return f"{device.runner}, its own"
    return f"{device.runner}, the farm's bundle" + (f"; {', '.join(device.own_runners)} of its own" if device.own_runners else "")
