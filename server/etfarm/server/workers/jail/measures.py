"""The measures that isolate a child from its host, with the implementation or the reason why they are not active."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Final

from etfarm.wire.errors import EtfarmError, error_for

NETWORK: Final = "network"
USER: Final = "user"
MOUNTS: Final = "mounts"
PROCESSES: Final = "processes"
PRIVILEGES: Final = "privileges"
SECCOMP: Final = "seccomp"
MEMORY: Final = "memory"
PROCESS_LIMIT: Final = "process limit"

NAMES: Final = (NETWORK, USER, MOUNTS, PROCESSES, PRIVILEGES, SECCOMP, MEMORY, PROCESS_LIMIT)
"""Names of all measures, in the order of reports."""

_MAX_TEXT: Final = 500


@dataclass(frozen=True)
class Measure:
    """A measure of a child's jail, and whether it is active."""

    name: str
    """The measure's name, from `NAMES`."""
    active: bool
    detail: str
    """The implementation of the measure, or the reason why the host does not allow it."""


@dataclass(frozen=True)
class JailReport:
    """The measures of a child's jail, as reported by a real child."""

    measures: tuple[Measure, ...]

    @property
    def missing(self) -> tuple[Measure, ...]:
        """The measures that are not active."""
        return tuple(measure for measure in self.measures if not measure.active)

    def to_json(self) -> bytes:
        """Return the report as the JSON that the child sends to the daemon."""
        return json.dumps([asdict(measure) for measure in self.measures]).encode()

    @classmethod
    def of_nothing(cls, name: str, why: str) -> JailReport:
        """Return the report of a child that could not be jailed because one measure failed."""
        return cls(tuple(Measure(each, False, why if each == name else f"not tried without {name}") for each in NAMES))

    @classmethod
    def from_json(cls, data: bytes) -> JailReport:
        """Return the report that `to_json` wrote. Measures that it does not contain count as missing."""
        rows = {str(row["name"]): row for row in json.loads(data)}
        unreported = {"active": False, "detail": "not reported"}
        return cls(
            tuple(
                Measure(name, rows.get(name, unreported)["active"] is True, str(rows.get(name, unreported)["detail"])[:_MAX_TEXT])
                for name in NAMES
            )
        )


def jail_incomplete(missing: Sequence[Measure]) -> EtfarmError:
    """Return the error that the host does not allow measures that the server requires."""
    names = ", ".join(measure.name for measure in missing)
    why = "; ".join(f"{measure.name}: {measure.detail}" for measure in missing)
    return error_for(
        "JAIL_INCOMPLETE",
        f"This host does not allow the whole jail of compile processes. Missing: {why}.",
        "Run the server as root or where unprivileged user namespaces are allowed, on Linux 5.12 or newer; `etfarm serve "
        "--check` lists every measure. With --no-require-jail the server starts without the missing ones.",
        measures=names,
    )  # fmt: skip


@dataclass
class Progress:
    """The measures taken so far in a child."""

    measures: dict[str, Measure] = field(default_factory=dict)

    def add(self, name: str, detail: str) -> None:
        """Record an active measure."""
        self.measures[name] = Measure(name, True, detail)

    def fail(self, name: str, why: str) -> None:
        """Record a measure that the host does not allow."""
        self.measures[name] = Measure(name, False, why)

    @contextmanager
    def attempt(self, name: str, detail: str) -> Iterator[None]:
        """Take a measure; an OSError inside records that the host does not allow it."""
        try:
            yield
        except OSError as error:
            self.fail(name, str(error))
        else:
            self.add(name, detail)

    def report(self) -> JailReport:
        """Return all measures in order; those not taken are missing."""
        absent = "not taken"
        return JailReport(tuple(self.measures.get(name, Measure(name, False, absent)) for name in NAMES))
