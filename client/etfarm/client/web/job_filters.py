"""The conditions of a list of jobs, as a page's address has them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.datastructures import QueryParams

from etfarm.client.models import JobState
from etfarm.wire.errors import error_for

STATES: Final = tuple(state.value for state in JobState)
_PERIOD: Final = re.compile(r"(\d{1,6})\s*([mhdw])", re.ASCII)
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_CHARACTERS: Final = 200


@dataclass(frozen=True)
class JobFilters:
    """Conditions; empty ones do not filter."""

    name: str = ""
    owner: str = ""
    model: str = ""
    state: str = ""
    label: str = ""
    """KEY=VALUE."""
    since: str = ""
    """A duration before now such as `2d`, or an ISO time."""

    @classmethod
    def from_query(cls, query: QueryParams) -> JobFilters:
        """Return the conditions of an address."""
        return cls(**{key: query.get(key, "").strip()[:_MAX_CHARACTERS] for key in cls.__dataclass_fields__})

    @property
    def query(self) -> dict[str, str]:
        """The conditions that filter, as an address has them."""
        return {key: value for key, value in vars(self).items() if value}

    @property
    def command(self) -> str:
        """The command that lists the same jobs."""
        return " ".join(["etfarm jobs list", *self._options()])

    def _options(self) -> Iterator[str]:
        for key, value in self.query.items():
            yield f"--{key} {shlex.quote(value)}"

    def conditions(self, now: datetime) -> dict[str, Any]:
        """Return the arguments of `AsyncFarm.job_page`.

        Raises:
            BAD_OPTION: a condition cannot be read.
        """
        return {
            "name": self.name, "owner": self.owner, "model": self.model, "states": self._states(), "labels": self._labels(),
            "since": self._start(now),
        }  # fmt: skip

    def _states(self) -> list[str]:
        return [text.strip().upper() for text in self.state.split(",") if text.strip()]

    def _labels(self) -> dict[str, str]:
        if not self.label:
            return {}
        key, equals, value = self.label.partition("=")
        if not (key.strip() and equals):
            raise error_for(
                "BAD_OPTION", f"`label` must be KEY=VALUE, got {self.label!r}.", "Write for example team=vision.", option="label"
            )
        return {key.strip(): value.strip()}

    def _start(self, now: datetime) -> datetime | None:
        if not self.since:
            return None
        try:
            if (period := _PERIOD.fullmatch(self.since)) is not None:
                return now - timedelta(seconds=int(period[1]) * _SECONDS[period[2]])
            time = datetime.fromisoformat(self.since)
            return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            remedy = "Write for example 2d, 12h or 2026-06-01."
            raise error_for(
                "BAD_OPTION", f"`since` must be a duration or a time, got {self.since!r}.", remedy, option="since"
            ) from None
