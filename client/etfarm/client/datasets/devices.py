"""Step 1, client: the devices that a data set is split over. Equal ones, unless somebody says that they need not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from etfarm.client.datasets.dataset import Dataset, Options
from etfarm.client.datasets.samples import Sample
from etfarm.client.errors import Kind, UserError
from etfarm.client.models import Device, DeviceState
from etfarm.client.sessions.program import ServedModel, SharedModel
from etfarm.client.sessions.session import AsyncSession, Told
from etfarm.client.submit.recipes import DEFAULT_RECIPE
from etfarm.wire import selectors

if TYPE_CHECKING:
    from etfarm.client.submit.preparation import Model

_HERE = (DeviceState.IDLE, DeviceState.BUSY)


class TooFewDevices(UserError):
    """Fewer devices match than are wanted."""

    reason = "TOO_FEW_DEVICES"
    kind = Kind.FAILED_PRECONDITION


class DevicesDiffer(UserError):
    """Results of devices that differ are not comparable."""

    reason = "DEVICES_DIFFER"
    kind = Kind.FAILED_PRECONDITION


def choose(devices: Sequence[Device], count: int | None, selector: str = "", *, mixed: bool = False) -> list[Device]:
    """`count` of the devices that match, all of one arch and soc; idle ones first, emulated ones last. A pure function.

    Args:
        devices: that match.
        count: all that are connected when None.
        selector: what they match, for the sentence.
        mixed: they may differ.

    Raises:
        TooFewDevices: fewer are connected.
        DevicesDiffer: no `count` of them, or not all, are equal.
    """
    here = sorted(
        (device for device in devices if device.state in _HERE),
        key=lambda device: (device.emulated, device.state is not DeviceState.IDLE, device.id),
    )
    which = f" that match {selector!r}" if selector else ""
    wanted = max(1, len(here)) if count is None else count
    if len(here) < wanted:
        away = [device.name for device in devices if device.state not in _HERE]
        missing = f"; {', '.join(away)} {'is' if len(away) == 1 else 'are'} known and cannot be used now" if away else ""
        raise TooFewDevices(
            f"Connected devices{which}: {len(here)}, and {wanted} are wanted{missing}.",
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
    raise DevicesDiffer(
        f"No {wanted} of the connected devices{which} are equal: {kinds}.",
        "Select by arch or soc, or say --mixed (mixed=True) where results need not be comparable.",
        selector=selector, wanted=wanted,
    )  # fmt: skip


class Lender(Protocol):
    """What is asked of a farm here; AsyncFarm is one."""

    async def devices(self, selector: str = "") -> list[Device]:
        """The known devices that match."""

    @property
    def session(self) -> Callable[..., AsyncSession]:
        """As AsyncFarm.session."""


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
    """A data set on a farm's devices, where nothing has begun yet.

    Args:
        devices: how many of those that `device` selects; all that are connected when None.
        labels: what is no input is kept for a metric.

    Raises:
        UserError: `device` is no selector, or `devices` no number of them. All else where its results are asked for.
    """
    selectors.parse(device)
    if devices is not None and devices < 1:
        raise TooFewDevices(f"A data set on {devices} devices is none.", "Ask for one or more.", wanted=devices)
    method = options.get("method", "")
    model = SharedModel(
        ServedModel(
            program, options.get("recipe", DEFAULT_RECIPE), options.get("example_inputs"), tuple(options.get("data", ()))
        )
    )  # fmt: skip

    async def chosen() -> list[tuple[str, str]]:
        if devices == 1:
            # Whichever is free first.
            return [("", device)]
        found = choose(await farm.devices(device), devices, device, mixed=options.get("mixed", False))
        return [(one.name, f"id={one.id}") for one in found]

    def session(selector: str, on_wait: Told) -> AsyncSession:
        return farm.session(
            model,
            selector,
            methods=[method] if method else (),
            threads=options.get("threads"),
            cores=options.get("cores", ""),
            priority=options.get("priority", 0),
            on_wait=on_wait,
            on_log=options.get("on_log"),
            on_upload=options.get("on_upload"),
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
