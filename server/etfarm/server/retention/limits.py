"""The limits of what a server keeps, as `etfarm serve --keep` sets them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from etfarm.wire.durations import SIZE_SHIFTS, read_size
from etfarm.wire.errors import error_for

DAY_S: Final = 24 * 3600.0
MIN_AUDIT_DAYS: Final = 30
"""Age below which the database refuses to delete entries of the audit log."""

FOREVER: Final = "forever"
_AGE: Final = re.compile(r"(\d{1,6})([hdw])\Z", re.ASCII)
_SECONDS: Final[Mapping[str, float]] = {"w": 7 * DAY_S, "d": DAY_S, "h": 3600.0}
_MAX_AGE_S: Final = 36_500 * DAY_S


@dataclass(frozen=True)
class Limit:
    """What is kept of one kind: all of it if both are None."""

    age_s: float | None = None
    """Maximum age in seconds; of artifacts and cached results, since their last use."""
    size_bytes: int | None = None
    """Maximum total size; the oldest go first."""

    def __str__(self) -> str:
        parts = []
        if self.age_s is not None:
            unit, seconds = next((unit, each) for unit, each in _SECONDS.items() if self.age_s % each == 0)
            parts.append(f"{self.age_s / seconds:.0f}{unit}")
        if self.size_bytes is not None:
            unit = next(unit for unit, shift in SIZE_SHIFTS.items() if self.size_bytes % (1 << shift) == 0)
            parts.append(f"{self.size_bytes >> SIZE_SHIFTS[unit]}{unit}")
        return ",".join(parts) or FOREVER


@dataclass(frozen=True)
class Limits:
    """The limits of a server. By default, only what can be computed again, and the output of old runs, are deleted."""

    jobs: Limit = Limit()
    """Finished jobs without tags, with their reports, events and logs. A size counts all jobs."""
    logs: Limit = Limit(age_s=90 * DAY_S, size_bytes=4 << 30)
    """What compilers and runners of finished jobs printed; the jobs stay. A job's log has up to 32 MiB, and is rarely read after
    some days."""
    cache: Limit = Limit(age_s=90 * DAY_S)
    """Results of compilations and analyses that were not used for so long and that no job names, with the files that only they
    refer to. They are computed again."""
    artifacts: Limit = Limit()
    """Files that nothing refers to: uploads that no job named, and files of deleted jobs."""
    audit: Limit = Limit()
    """Entries of the audit log, which is kept for at least 30 days."""

    @property
    def has_ages(self) -> bool:
        """Whether something is kept for an age."""
        return any(getattr(self, field.name).age_s is not None for field in fields(self))

    def without_ages(self) -> Limits:
        """Return the same limits of sizes, and none of ages."""
        return Limits(**{field.name: replace(getattr(self, field.name), age_s=None) for field in fields(self)})

    @classmethod
    def of(cls, settings: Iterable[str], base: Limits | None = None) -> Limits:
        """Return limits, changed by settings of the form NAME=AGE, NAME=SIZE, NAME=AGE,SIZE or NAME=forever.

        Args:
            base: the limits to change; the defaults if None.

        Raises:
            BAD_RETENTION: a setting has an unknown name or an invalid limit.
        """
        limits = base or cls()
        names = [field.name for field in fields(cls)]
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in names:
                raise error_for(
                    "BAD_RETENTION",
                    f"{setting[:80]!r} does not set what is kept.",
                    f"Give NAME=LIMIT with one of {', '.join(names)}.",
                )
            limits = replace(limits, **{name: _limit(name, value)})
        return limits


def _limit(name: str, text: str) -> Limit:
    if text == FOREVER:
        return Limit()
    age_s: float | None = None
    size_bytes: int | None = None
    for part in text.split(","):
        if age_s is None and (age := _AGE.match(part)):
            age_s = int(age[1]) * _SECONDS[age[2]]
        elif size_bytes is None and (size := read_size(part)) is not None:
            size_bytes = size
        else:
            raise error_for(
                "BAD_RETENTION",
                f"`{name}` must be kept for an age, up to a size or forever, got {text[:80]!r}.",
                "Write 90d (h, d or w), 200GiB (MiB, GiB or TiB), both as 90d,200GiB, or forever.",
            )
    if age_s is not None and not 3600.0 <= age_s <= _MAX_AGE_S:
        raise error_for(
            "BAD_RETENTION", f"`{name}` must be kept for an hour to 100 years, got {text[:80]!r}.", "Write 1h or more."
        )
    if name == "audit" and (size_bytes is not None or (age_s is not None and age_s < MIN_AUDIT_DAYS * DAY_S)):
        raise error_for(
            "BAD_RETENTION",
            f"`audit` must be kept for an age of at least {MIN_AUDIT_DAYS} days, got {text[:80]!r}.",
            f"Write audit={MIN_AUDIT_DAYS}d or more.",
        )
    return Limit(age_s, size_bytes)
