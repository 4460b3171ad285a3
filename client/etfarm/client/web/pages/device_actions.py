"""Drain, undrain and label a device."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.models import Device
from etfarm.client.web.form_fields import Field, pairs_of, text_of
from etfarm.client.web.forms import Fields
from etfarm.client.web.pages._actions import Action, perform
from etfarm.client.web.templating import templates_of
from etfarm.client.web.visitors import farm


async def drain(request: Request) -> Response:
    """Ask for a reason, or place nothing new on the device."""
    client = await farm(request)
    device = await client.device(request.path_params["device_id"])
    action = Action(
        title=f"Drain {_name(device)}?",
        about="What it runs now continues. Nothing new is placed on it until somebody undrains it.",
        button="Drain", command=("etfarm", "devices", "drain", device.id), back=_address(request, device), is_dangerous=True,
        fields=(Field("reason", "Reason", flag="--reason", hint="People who wait for the device read it."),),
    )  # fmt: skip
    return await perform(request, action, lambda fields: client.drain_device(device.id, text_of(fields, "reason")))


async def undrain(request: Request) -> Response:
    """Ask, or let runs be placed on the device again."""
    client = await farm(request)
    device = await client.device(request.path_params["device_id"])
    drained = device.drain
    why = f" {drained.principal} drained it{f': {drained.reason}' if drained.reason else '.'}" if drained is not None else ""
    action = Action(
        title=f"Undrain {_name(device)}?", about=f"Runs are placed on it again.{why}", button="Undrain",
        command=("etfarm", "devices", "undrain", device.id), back=_address(request, device),
    )  # fmt: skip
    return await perform(request, action, lambda _: client.undrain_device(device.id))


async def label(request: Request) -> Response:
    """Ask for labels, or set and remove them."""
    client = await farm(request)
    device = await client.device(request.path_params["device_id"])
    known = tuple(
        Field("remove", f"Remove {key}={value}", value=key, flag="--remove", kind="checkbox")
        for key, value in sorted(device.labels.items())
    )
    hint = "One `key=value` in each line; selectors find it as `label.key=value`."
    action = Action(
        title=f"Labels of {_name(device)}",
        about="They take precedence over the labels that its agent reports, and stay when it connects again.",
        button="Change", command=("etfarm", "devices", "label", device.id), back=_address(request, device),
        fields=(Field("set", "Set", kind="lines", hint=hint), *known),
    )  # fmt: skip

    async def change(fields: Fields) -> Device:
        pairs = pairs_of(text_of(fields, "set"), "Set")
        removed = [str(key) for key in fields.getlist("remove") if key not in pairs]
        return await client.label_device(device.id, pairs, remove=removed)

    return await perform(request, action, change)


def _address(request: Request, device: Device) -> str:
    return templates_of(request).url_for("device", device_id=device.id)


def _name(device: Device) -> str:
    return device.name or device.id[:12]


ROUTES = (
    Route("/devices/{device_id}/drain", drain, name="drain_device", methods=["GET", "POST"]),
    Route("/devices/{device_id}/undrain", undrain, name="undrain_device", methods=["GET", "POST"]),
    Route("/devices/{device_id}/labels", label, name="label_device", methods=["GET", "POST"]),
)
