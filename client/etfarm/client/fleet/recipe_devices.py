"""Which connected devices run a recipe's programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etfarm.client.models import Device, RecipeInfo


@dataclass(frozen=True)
class FarmRecipe(RecipeInfo):
    """A recipe, and where its programs can run."""

    devices: tuple[str, ...] | None
    """Names of the connected devices whose runner has the recipe's backend; None for a plug-in's, whose backend is unknown."""


def devices_for(recipe: RecipeInfo, devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Return the names of the connected devices that have the backend of a recipe; None if the backend is unknown."""
    from etfarm.client.models import DeviceState
    from etfarm.wire.recipes import runtime_backend

    backend = runtime_backend(recipe.name)
    if backend is None:
        return None
    away = (DeviceState.OFFLINE, DeviceState.UNUSABLE, DeviceState.DRAINING)
    here = [device for device in devices if device.state not in away and device.runner]
    return tuple(device.name for device in here if not backend or backend in device.backends)


def describe_missing_device(row: FarmRecipe) -> str:
    """Return what a device would need, if none has it; empty if one has it, or if that is unknown."""
    from etfarm.wire.recipes import RECIPES, runtime_backend

    if row.devices is None or row.devices:
        return ""
    backend = runtime_backend(row.name)
    if not backend:
        return "no connected device has a runner"
    known = RECIPES.get(row.name)
    return f"no connected device has {backend}{f': needs {known.runs_on}' if known and known.runs_on else ''}"
