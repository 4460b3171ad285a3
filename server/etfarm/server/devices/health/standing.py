"""The rules of a device's health, as pure functions of its standing, of what happened, and of the time.

A fault adds its weight to the device's score, and the score halves with each half-life. At `suspect_at` the device is SUSPECT,
until the score is below `clear_at`; at `quarantine_at`, or when a health run fails, it is QUARANTINED, until `good_runs` health
runs in a row pass. A passed health run halves the score, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Final

from etfarm.server.state.cut import shorten
from etfarm.v1.device_pb2 import HealthRunTrigger, HealthState
from etfarm.wire.errors import error_for

UNKNOWN: Final = HealthState.HEALTH_STATE_UNKNOWN
GOOD: Final = HealthState.HEALTH_STATE_GOOD
SUSPECT: Final = HealthState.HEALTH_STATE_SUSPECT
QUARANTINED: Final = HealthState.HEALTH_STATE_QUARANTINED

ENROLMENT: Final = HealthRunTrigger.HEALTH_RUN_TRIGGER_ENROLMENT
PERIODIC: Final = HealthRunTrigger.HEALTH_RUN_TRIGGER_PERIODIC
AFTER_FAULT: Final = HealthRunTrigger.HEALTH_RUN_TRIGGER_FAULT
PROBE: Final = HealthRunTrigger.HEALTH_RUN_TRIGGER_PROBE
REQUEST: Final = HealthRunTrigger.HEALTH_RUN_TRIGGER_REQUEST

NOT_IDLE: Final = "DEVICE_NOT_IDLE"
"""Code of a median that is not compared: the device ran something right before, or somebody waited for it."""
UNSCHEDULED: Final = "UNSCHEDULED_RUN"
"""Code of a median that is not compared: another run counts already for this time, or the run was not to be measured."""

_MAX_TEXT: Final = 300
"""Maximum length of an error's message within a reason."""


@dataclass(frozen=True)
class HealthPolicy:
    """The numbers of the rules."""

    interval_s: float = 86_400.0
    """Interval of the health runs of an idle device. 0 disables these, the first one of a new device and those after faults; a
    quarantined device is still probed."""
    half_life_s: float = 21_600.0
    """Time after which a fault counts half. A fault of yesterday counts a sixteenth: what fails once a day is still usable."""
    suspect_at: float = 1.0
    """Score from which a device is SUSPECT: one fault that is not a lost connection."""
    quarantine_at: float = 2.5
    """Score from which a device is QUARANTINED: three faults within some hours, as many as a cell has attempts."""
    clear_at: float = 0.5
    """Score below which a SUSPECT device is GOOD again; lower than `suspect_at`, so that the state does not flap."""
    good_runs: int = 3
    """Number of health runs in a row that must pass before a quarantined device is used again."""
    probe_s: float = 30.0
    """Time until a quarantined device is probed. Doubles with each failure."""
    max_probe_s: float = 3_600.0
    """Maximum time between two probes."""

    @property
    def spacing_s(self) -> float:
        """Minimum time from a scheduled health run until a requested one may take the place of the next.

        Half of the interval; half a day where no runs are scheduled, so that a baseline never comes from one afternoon.
        """
        return (self.interval_s or HealthPolicy.interval_s) / 2

    def check(self) -> None:
        """Refuse values that make no sense together.

        Raises:
            BAD_HEALTH_POLICY: a number is out of its range.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name == "interval_s" else 1 if field.name == "good_runs" else 1e-3
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 31_536_000:
                raise error_for(
                    "BAD_HEALTH_POLICY", f"{field.name} must be {least:g} to 31,536,000, got {value!r}.", name=field.name
                )
        if not self.clear_at <= self.suspect_at <= self.quarantine_at:
            raise error_for(
                "BAD_HEALTH_POLICY",
                "clear_at must be at most suspect_at, and suspect_at at most quarantine_at, "
                f"got {self.clear_at:g}, {self.suspect_at:g} and {self.quarantine_at:g}.",
            )
        if not isinstance(self.good_runs, int):
            raise error_for("BAD_HEALTH_POLICY", f"good_runs must be a whole number, got {self.good_runs!r}.", name="good_runs")


def policy_of(values: Mapping[str, object]) -> HealthPolicy:
    """Return the policy with these values by name, and defaults for the others.

    Raises:
        BAD_HEALTH_POLICY: a name is unknown, or a value is out of its range.
    """
    known = [field.name for field in fields(HealthPolicy)]
    for name in values:
        if name not in known:
            raise error_for(
                "BAD_HEALTH_POLICY", f"There is no health setting {name!r}.", f"Settings: {', '.join(known)}.", name=name
            )
    policy = HealthPolicy(**values)  # type: ignore[arg-type]  # `check` refuses other types
    policy.check()
    return policy


@dataclass(frozen=True)
class Standing:
    """What the farm knows about one device's reliability."""

    since: datetime
    """Since when it has its state."""
    state: HealthState.ValueType = UNKNOWN
    reason: str = ""
    """Why it is not GOOD; empty if it is, or if nothing is known."""
    score: float = 0.0
    """The sum of its faults at `scored_at`."""
    scored_at: datetime | None = None
    faults: int = 0
    """Number of faults since it was last GOOD."""
    fault: str = ""
    """A clause about the last of them."""
    slower: str = ""
    """Why its pace makes it SUSPECT; empty if it does not."""
    good_runs: int = 0
    """Number of health runs in a row that passed since it was quarantined."""
    failed_runs: int = 0
    """Number of health runs in a row that failed."""
    last_run_at: datetime | None = None
    scheduled_at: datetime | None = None
    """When a health run last passed that was scheduled, or that took the place of a scheduled one."""
    probe_at: datetime | None = None
    """When a health run is due because of a fault or a quarantine."""
    cleared_at: datetime | None = None
    """When an admin last cleared it; earlier health runs are no baseline."""

    def score_at(self, at: datetime, policy: HealthPolicy) -> float:
        """Return the sum of its faults now."""
        if self.scored_at is None:
            return 0.0
        # The system's clock may have been set back.
        age_s = max(0.0, (at - self.scored_at).total_seconds())
        return float(self.score * 0.5 ** (age_s / policy.half_life_s))


def after_fault(standing: Standing, weight: float, text: str, at: datetime, policy: HealthPolicy) -> Standing:
    """Return the standing after a fault of the device.

    Args:
        weight: how much it counts, above 0.
        text: the error's message.
    """
    counted = replace(
        standing,
        score=standing.score_at(at, policy) + weight,
        scored_at=at,
        faults=standing.faults + 1,
        fault=f"the last at {_moment(at)}: {_clause(text)}",
        good_runs=0,
        probe_at=standing.probe_at or at,
    )
    return settled(counted, at, policy)


def why_uncounted(
    standing: Standing, trigger: HealthRunTrigger.ValueType, at: datetime, policy: HealthPolicy, *, was_idle: bool
) -> str | None:
    """Return why a health run's median is no part of the device's series, as a code; None if it is.

    A series can be trusted only if its runs were made under equal conditions and not all at once. Scheduled runs are: the device
    is idle, nobody wants it, and a day lies between two of them. A requested run counts only if all that is true of it as well.

    Args:
        was_idle: whether the device was idle before the run, and nobody wanted it until the run's end.
    """
    if trigger in (ENROLMENT, PERIODIC):
        return None
    if trigger != REQUEST:
        return UNSCHEDULED
    if not was_idle:
        return NOT_IDLE
    is_too_soon = standing.scheduled_at is not None and (at - standing.scheduled_at).total_seconds() < policy.spacing_s
    return UNSCHEDULED if is_too_soon else None


def after_passed(standing: Standing, slower: str, at: datetime, policy: HealthPolicy, *, is_scheduled: bool = True) -> Standing:
    """Return the standing after a health run that passed.

    Args:
        slower: why the device's pace makes it SUSPECT; empty if it does not.
        is_scheduled: whether the run was scheduled or takes the place of a scheduled one: the next is due after the interval.
    """
    score = standing.score_at(at, policy) / 2
    passed = replace(
        standing, score=score, scored_at=at, slower=slower, failed_runs=0, last_run_at=at, probe_at=None,
        scheduled_at=at if is_scheduled else standing.scheduled_at,
    )  # fmt: skip
    if standing.state != QUARANTINED:
        return settled(passed, at, policy)
    good_runs = standing.good_runs + 1
    if good_runs < policy.good_runs:
        return replace(passed, good_runs=good_runs, probe_at=at + timedelta(seconds=policy.probe_s))
    # The device has proven itself, whatever its score was.
    readmitted = replace(passed, state=GOOD, since=at, score=min(score, policy.clear_at / 2), good_runs=0)
    return settled(readmitted, at, policy)


def after_failed(standing: Standing, text: str, at: datetime, policy: HealthPolicy) -> Standing:
    """Return the standing after a health run that failed: QUARANTINED, and the next probe is due after a back-off.

    Args:
        text: what was wrong.
    """
    failed_runs = standing.failed_runs + 1
    pause_s = min(policy.probe_s * 2.0 ** min(failed_runs - 1, 40), policy.max_probe_s)
    return replace(
        standing,
        state=QUARANTINED,
        since=standing.since if standing.state == QUARANTINED else at,
        reason=f"its health run failed at {_moment(at)}: {_clause(text)}",
        good_runs=0,
        failed_runs=failed_runs,
        last_run_at=at,
        probe_at=at + timedelta(seconds=pause_s),
    )


def cleared(standing: Standing, at: datetime) -> Standing:
    """Return the standing after an admin cleared it."""
    state = GOOD if standing.last_run_at is not None else UNKNOWN
    since = standing.since if standing.state == state else at
    return Standing(since=since, state=state, last_run_at=standing.last_run_at, scheduled_at=standing.scheduled_at, cleared_at=at)


def settled(standing: Standing, at: datetime, policy: HealthPolicy) -> Standing:
    """Return the standing with the state that its score has at a time. A quarantine ends only in `after_passed` and `cleared`."""
    if standing.state == QUARANTINED:
        return standing
    score = standing.score_at(at, policy)
    faults = f"{standing.faults} device fault{'' if standing.faults == 1 else 's'}, {standing.fault}"
    if score >= policy.quarantine_at:
        probe_at = at + timedelta(seconds=policy.probe_s)
        return replace(standing, state=QUARANTINED, since=at, reason=faults, good_runs=0, probe_at=probe_at)
    is_at_fault = score >= (policy.clear_at if standing.faults and standing.state == SUSPECT else policy.suspect_at)
    if is_at_fault or standing.slower:
        reason = "; ".join(filter(None, [faults if is_at_fault else "", standing.slower]))
        return replace(standing, state=SUSPECT, since=standing.since if standing.state == SUSPECT else at, reason=reason)
    state = UNKNOWN if standing.last_run_at is None else GOOD
    since = standing.since if standing.state == state else at
    # Below `suspect_at`, faults still count for the next one.
    is_forgotten = standing.state == SUSPECT or score < policy.clear_at / 10
    kept = replace(standing, faults=0, fault="") if is_forgotten else standing
    return replace(kept, state=state, since=since, reason="")


def corrected(standing: Standing, at: datetime, policy: HealthPolicy) -> Standing:
    """Return the standing with the present for each time that lies ahead, as a clock that was ahead has left it.

    Otherwise its faults would not fade, and its next health run would not be due, until then.
    """
    probe_at = standing.probe_at
    if probe_at is not None and probe_at > at + timedelta(seconds=max(policy.probe_s, policy.max_probe_s)):
        probe_at = at
    return replace(
        standing,
        since=min(standing.since, at),
        scored_at=None if standing.scored_at is None else min(standing.scored_at, at),
        last_run_at=None if standing.last_run_at is None else min(standing.last_run_at, at),
        scheduled_at=None if standing.scheduled_at is None else min(standing.scheduled_at, at),
        probe_at=probe_at,
    )


def settles_at(standing: Standing, policy: HealthPolicy) -> datetime | None:
    """Return when a SUSPECT device's faults have decayed below `clear_at`; None if its state does not change with time."""
    if standing.state != SUSPECT or standing.scored_at is None or standing.score < policy.clear_at:
        return None
    # A little later, so that rounding cannot leave it at the threshold.
    halvings = math.log2(standing.score / policy.clear_at)
    return standing.scored_at + timedelta(seconds=halvings * policy.half_life_s + 1e-3)


def due(standing: Standing, policy: HealthPolicy) -> tuple[datetime, HealthRunTrigger.ValueType] | None:
    """Return when the device's next health run is due, and why; None if none is."""
    if standing.probe_at is not None and (standing.state == QUARANTINED or policy.interval_s):
        return standing.probe_at, PROBE if standing.state == QUARANTINED else AFTER_FAULT
    if not policy.interval_s:
        return None
    if standing.scheduled_at is None:
        # A requested run on a busy device, or one after a fault, may have been the first.
        return standing.since, ENROLMENT
    return standing.scheduled_at + timedelta(seconds=policy.interval_s), PERIODIC


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"


def _clause(text: str) -> str:
    """Return an error's message without its full stop, shortened."""
    return shorten(text.strip().removesuffix("."), _MAX_TEXT)
