"""Selection of the devices that a data set is split over: equal ones, unless the caller allows others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from etfarm.client.datasets.dataset import Dataset, Options
from etfarm.client.datasets.samples import Sample
from etfarm.client.models import Device, DeviceState
from etfarm.client.sessions.open_calls import TextCallback
from etfarm.client.sessions.program import ServedModel, SharedModel
from etfarm.client.sessions.session import AsyncSession
from etfarm.client.submit.options import chosen_reservation, one_spelling
from etfarm.client.submit.recipes import only_recipe
from etfarm.wire import selectors
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.submit.preparation import Model

_HERE = (DeviceState.IDLE, DeviceState.BUSY)


def choose(devices: Sequence[Device], count: int | None, selector: str = "", *, mixed: bool = False) -> list[Device]:
    """Choose `count` matching devices of one arch and soc; idle ones first, emulated ones last.

    This is a pure function.

    Args:
        devices: the matching devices.
        count: number of devices; all connected ones when None.
        selector: their selector, for the error.
        mixed: devices may differ.

    Raises:
        TOO_FEW_DEVICES: fewer devices are connected.
        DEVICES_DIFFER: there are not `count` equal devices, or not all are equal.
    """
    here = sorted(
        (device for device in devices if device.state in _HERE),
        key=lambda device: (device.emulated, device.state is not DeviceState.IDLE, device.id),
    )
    which = f" that match {selector!r}" if selector else ""
    wanted = max(1, len(here)) if count is None else count
    if len(here) < wanted:
        drained = [device for device in devices if device.state is DeviceState.DRAINING]
        away = [device.name for device in devices if device.state not in _HERE and device not in drained]
        reasons = [f"{', '.join(away)} {'is' if len(away) == 1 else 'are'} known and cannot be used now"] if away else []
        reasons += [
            f"{device.name} is drained{f': {device.drain.reason}' if device.drain and device.drain.reason else ''}"
            for device in drained
        ]
        kind = "Connected devices that are not drained" if drained else "Connected devices"
        raise error_for(
            "TOO_FEW_DEVICES",
            f"{'; '.join([f'{kind}{which}: {len(here)}, but {wanted} are required', *reasons])}.",
            "Connect more, or ask for fewer.",
            selector=selector, wanted=wanted, known=len(here),
        )  # fmt: skip
    if mixed:
        return here[:wanted]
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in here:
        groups.setdefault((device.arch, device.soc), []).append(device)
    for group in groups.values():
        if len(group) >= wanted:
            return group[:wanted]
    kinds = "; ".join(f"{', '.join(d.name for d in group)}: {arch} {soc}".rstrip() for (arch, soc), group in groups.items())
    raise error_for(
        "DEVICES_DIFFER",
        f"No {wanted} of the connected devices{which} are equal: {kinds}.",
        "Select by arch or soc, or pass --mixed (mixed=True) if results need not be comparable.",
        selector=selector, wanted=wanted,
    )  # fmt: skip


class Lender(Protocol):
    """The part of a farm that data sets use, such as an `AsyncFarm`."""

    async def devices(self, selector: str = "") -> list[Device]:
        """Return the known devices that match."""

    @property
    def session(self) -> Callable[..., AsyncSession]:
        """The same as `AsyncFarm.session`."""


def dataset(
    farm: Lender,
    program: Model,
    samples: Iterable[Sample],
    device: str = "",
    *,
    devices: int | None = 1,
    labels: bool = False,
    options: Options,
) -> Dataset:
    """Create a data set on a farm's devices, without starting anything.

    Args:
        devices: number of devices that `device` selects; all connected ones when None.
        labels: keep values that are not inputs for a metric.

    Raises:
        UserError: `device` is not a selector, or `devices` is not a valid number. Other errors are raised by
            iterating the results.
    """
    selectors.parse(device)
    if devices is not None and devices < 1:
        raise error_for(
            "TOO_FEW_DEVICES", f"`devices` must be at least 1, got {devices}.", "Ask for one or more.", wanted=devices
        )
    reservation = chosen_reservation(options.get("reservation"))
    method = one_spelling("method", options.get("method"), "methods", options.get("methods"), "")
    recipe = only_recipe(options.get("recipe"), options.get("recipes"))
    model = SharedModel(
        ServedModel(
            program, recipe, options.get("example_inputs"), tuple(options.get("data", ()))
        )
    )  # fmt: skip

    async def chosen() -> list[tuple[str, str]]:
        if devices == 1:
            # Take the device that is free first.
            return [("", device)]
        usable = [item for item in await farm.devices(device) if reservation == (item.reservation.id if item.reservation else "")]
        matching = choose(usable, devices, device, mixed=options.get("mixed", False))
        return [(item.name, f"id={item.id}") for item in matching]

    def session(selector: str, on_wait: TextCallback) -> AsyncSession:
        return farm.session(
            model,
            selector,
            methods=[method] if method else (),
            threads=options.get("threads"),
            cores=options.get("cores", ""),
            priority=options.get("priority", 0),
            reservation=reservation,
            on_wait=on_wait,
            on_log=options.get("on_log"),
            on_upload=options.get("on_upload"),
            on_status=options.get("on_status"),
        )

    return Dataset(
        samples,
        chosen,
        session,
        model.close,
        method=method,
        timeout_s=options.get("timeout_s"),
        keep_going=options.get("keep_going", False),
        reset=options.get("reset", False),
        labels=labels,
        on_wait=options.get("on_wait"),
    )
