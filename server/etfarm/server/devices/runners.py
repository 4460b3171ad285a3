"""Selection of a device's runner: its own, the farm's bundle for its architecture, or ExecuTorch's Python binding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.scheduling.waiting import own_scope
from etfarm.v1 import agent_pb2
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import EtfarmError


@dataclass(frozen=True)
class Runner:
    """A runner for a device."""

    kind: RunnerKind.ValueType
    backends: Sequence[str] = field(repr=False)
    operators: Sequence[str] = field(repr=False)
    """Kernels; empty if unknown."""
    scope: str
    """Scope of devices that share the runner: an architecture, or a device's `own_scope`."""
    bundle: agent_pb2.RunnerBundle | None = None
    """The bundle to send; None for a runner that is already on the device."""


def known_runner(bundles: Bundles, device: Device) -> Runner | None:
    """Return the runner that the device would use now; None while that is undecided, or if it has no runner."""
    if (runner := _of_kind(device, RunnerKind.RUNNER_KIND_OWN)) is not None:
        return runner
    if (bundle := bundles.get(device.arch)) is not None:
        return _of_bundle(bundle)
    return None if bundles.is_coming(device.arch) else _of_kind(device, RunnerKind.RUNNER_KIND_PYTHON)


def is_without_runner(bundles: Bundles, device: Device) -> bool:
    """Return whether no runner for the device exists or is being built."""
    return known_runner(bundles, device) is None and not bundles.is_coming(device.arch)


def require_runner(bundles: Bundles, devices: Sequence[Device]) -> None:
    """Raise an error if none of several devices has a runner.

    Raises:
        BUNDLE_MISSING: there is no runner.
        EtfarmError: building the server's own bundle failed.
    """
    if devices and all(is_without_runner(bundles, device) for device in devices):
        raise bundles.missing(devices[0].arch)


def known_backends(bundles: Bundles, device: Device) -> Sequence[str] | None:
    """Return the backends of the runner that the device would use now; None while that is undecided, or if it has no runner."""
    runner = known_runner(bundles, device)
    return None if runner is None else runner.backends


async def demand_runner(bundles: Bundles, device: Device) -> Runner:
    """Return the runner that the device uses, waiting for a bundle that is being built rather than using the Python binding.

    Raises:
        BUNDLE_MISSING: there is no runner.
        EtfarmError: building the bundle failed.
    """
    if (runner := _of_kind(device, RunnerKind.RUNNER_KIND_OWN)) is not None:
        return runner
    try:
        return _of_bundle(await bundles.demand(device.arch))
    except EtfarmError:
        if (runner := _of_kind(device, RunnerKind.RUNNER_KIND_PYTHON)) is None:
            raise
        return runner


def _of_bundle(bundle: agent_pb2.RunnerBundle) -> Runner:
    return Runner(RunnerKind.RUNNER_KIND_NATIVE, bundle.backends, bundle.operators, bundle.arch, bundle)


def _of_kind(device: Device, kind: RunnerKind.ValueType) -> Runner | None:
    """Return a runner on the device: OWN, which takes precedence over any bundle, or PYTHON, the last resort."""
    selected = next((runner for runner in device.own_runners if runner.kind == kind), None)
    return None if selected is None else Runner(selected.kind, selected.backends, selected.operators, own_scope(device.id))
