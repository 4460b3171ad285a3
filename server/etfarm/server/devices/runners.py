"""What a device runs programs with: one that was put on it, the farm's bundle for its architecture, or else its binding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.schedule import own_scope
from etfarm.v1 import agent_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import EtfarmError


@dataclass(frozen=True)
class Runner:
    """A runner for a device."""

    kind: str
    """`own`, `native` or `python`."""
    backends: Sequence[str] = field(repr=False)
    operators: Sequence[str] = field(repr=False)
    """Empty: not known."""
    scope: str
    """What has the same runner: an architecture, or for a device's own its `own_scope`."""
    bundle: agent_pb2.RunnerBundle | None = None
    """None for one of the device's own."""


def known_runner(bundles: Bundles, device: Device) -> Runner | None:
    """What the device would be given now; None while that is not decided, or there is none."""
    if (own := _of_kind(device, "own")) is not None:
        return own
    if (bundle := bundles.get(device.arch)) is not None:
        return _of_bundle(bundle)
    return None if bundles.is_coming(device.arch) else _of_kind(device, "python")


async def demand_runner(bundles: Bundles, device: Device) -> Runner:
    """What the device is given. Waits while a bundle for it is being built, which is better than a runner of its own.

    Raises:
        BundleMissing: there is none at all.
        EtfarmError: building the bundle failed, as the build says.
    """
    if (own := _of_kind(device, "own")) is not None:
        return own
    try:
        return _of_bundle(await bundles.demand(device.arch))
    except EtfarmError:
        if (own := _of_kind(device, "python")) is None:
            raise
        return own


def _of_bundle(bundle: agent_pb2.RunnerBundle) -> Runner:
    return Runner("native", bundle.backends, bundle.operators, bundle.arch, bundle)


def _of_kind(device: Device, kind: str) -> Runner | None:
    """A runner that the device has: `own`, which goes before any bundle, or `python`, which comes after."""
    own = next((runner for runner in device.own_runners if runner.kind == kind), None)
    return None if own is None else Runner(own.kind, own.backends, own.operators, own_scope(device.id))
