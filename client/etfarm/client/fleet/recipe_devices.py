"""Which connected devices run a recipe's programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etfarm.client.models import RecipeInfo

if TYPE_CHECKING:
    from etfarm.client.models import Device


@dataclass(frozen=True, kw_only=True)
class FarmRecipe(RecipeInfo):
    """A recipe, and where its programs can run."""

    devices: tuple[str, ...] | None
    """Names of the connected devices whose runner has the recipe's backend; None for a plug-in's, whose backend is unknown."""
    undecided: tuple[str, ...] = ()
    """Names of the connected devices whose runner is still being built, so that its backends are not known yet."""


def locate(recipe: RecipeInfo, devices: Sequence[Device]) -> FarmRecipe:
    """Return a recipe with the connected devices that run its programs."""
    from etfarm.client.models import DeviceState
    from etfarm.wire.recipes import runtime_backend

    backend = runtime_backend(recipe.name)
    if backend is None:
        return FarmRecipe(**vars(recipe), devices=None)
    away = (DeviceState.OFFLINE, DeviceState.UNUSABLE, DeviceState.DRAINING)
    here = [device for device in devices if device.state not in away]
    return FarmRecipe(
        **vars(recipe),
        devices=tuple(device.name for device in here if device.runner and (not backend or backend in device.backends)),
        undecided=tuple(device.name for device in here if device.is_runner_coming),
    )


def describe_missing_device(row: FarmRecipe) -> str:
    """Return what a device would need, or what is still unknown, if no device has it; empty if one has it or that is unknown."""
    from etfarm.wire.recipes import RECIPES, runtime_backend

    if row.devices is None or row.devices:
        return ""
    if row.undecided:
        return f"the runner of {row.undecided[0]} is still being built"
    backend = runtime_backend(row.name)
    if not backend:
        return "no connected device has a runner"
    known = RECIPES.get(row.name)
    return f"no connected device has {backend}{f': needs {known.runs_on}' if known and known.runs_on else ''}"
