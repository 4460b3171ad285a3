"""The file of `etfarm serve --health`: the numbers of the rules, and the commands that power-cycle hung devices."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from etfarm.server.devices.health.power import PowerRule, rules_of
from etfarm.server.devices.health.standing import HealthPolicy, policy_of
from etfarm.wire.errors import error_for


@dataclass(frozen=True)
class HealthSettings:
    """The operator's settings for the health of devices."""

    policy: HealthPolicy = field(default_factory=HealthPolicy)
    power: tuple[PowerRule, ...] = ()


def read_settings(path: Path | None, interval_s: float | None = None) -> HealthSettings:
    """Return the settings of a TOML file, with defaults for what it lacks.

    Args:
        path: the file; None for the defaults.
        interval_s: replaces the file's `interval_s`.

    Raises:
        BAD_HEALTH_POLICY: the file cannot be read, a name is unknown, or a value is out of its range.
    """
    try:
        values = {} if path is None else tomllib.loads(path.read_text())
    except OSError as error:
        raise error_for("BAD_HEALTH_POLICY", f"{path} cannot be read: {error.strerror}.", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise error_for("BAD_HEALTH_POLICY", f"{path} is not valid TOML: {error}.", path=path) from None
    power = rules_of(values.pop("power", []))
    policy = policy_of(values)
    return HealthSettings(policy if interval_s is None else replace(policy, interval_s=interval_s), power)
