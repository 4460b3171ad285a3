"""The choice of a device's runner: its own, the farm's bundle for its architecture, or ExecuTorch's Python binding."""

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
    """Kernels; empty if they are not known."""
    scope: str
    """The devices that have the same runner: an architecture, or a device's `own_scope`."""
    bundle: agent_pb2.RunnerBundle | None = None
    """None for a runner that the device has."""


def known_runner(bundles: Bundles, device: Device) -> Runner | None:
    """Return the runner that the device would use now; None while that is not decided, or if there is none."""
    if (own := _of_kind(device, "own")) is not None:
        return own
    if (bundle := bundles.get(device.arch)) is not None:
        return _of_bundle(bundle)
    return None if bundles.is_coming(device.arch) else _of_kind(device, "python")


async def demand_runner(bundles: Bundles, device: Device) -> Runner:
    """Return the runner that the device uses. Wait while a bundle for it is being built, which is better than the binding.

    Raises:
        BundleMissing: there is no runner.
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
    """Return a runner that the device has: `own`, which is preferred to any bundle, or `python`, which is the last choice."""
    own = next((runner for runner in device.own_runners if runner.kind == kind), None)
    return None if own is None else Runner(own.kind, own.backends, own.operators, own_scope(device.id))
