"""The errors that cross processes, with a fault, a reason for programs, and a message and a remedy for users.

The three faults are the types: `UserError` (the model, the program, the command), `DeviceError` (the board or phone, its
link, its agent) and `FarmError` (the server or this software). Each error has a `reason`, an UPPER_SNAKE word that programs may
rely on; `kind` decides the gRPC status at the server's edge. What is caught by its type is a class of one of them; every other
reason is a row of docs/reasons.toml, raised with `error_for`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final

from etfarm.wire.error_table import ROWS

DOMAIN = "etfarm"
"""ErrorInfo.domain of every etfarm error."""

AWAY_REASONS: Final = frozenset({"SERVER_UNREACHABLE", "SERVER_STOPPING", "SERVER_STOPPED", "NO_LEADER", "DATABASE_UNAVAILABLE"})
"""Reasons of errors that last until the server is back: a call that changes nothing may be repeated then."""


ANY_KEYS: Final = "*"
"""In a row of the table: the metadata is that of another error."""


class Fault(StrEnum):
    """The party that has to act on an error."""

    USER = "USER"
    DEVICE = "DEVICE"
    FARM = "FARM"


class Kind(StrEnum):
    """The kind of an error, named after its gRPC status code."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    DATA_LOSS = "DATA_LOSS"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    ABORTED = "ABORTED"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class EtfarmError(Exception):
    """An error that is shown to users of etfarm.

    Args:
        message: one sentence that states what is wrong, with the relevant values.
        remedy: one sentence that states what to do; empty if nothing can be done.
        stage: the stage that failed (`TORCH_EXPORT`, `LOAD`, ...), if any.
        metadata: the values of the message for programs, stored as strings.
    """

    fault: ClassVar[Fault] = Fault.FARM
    reason: str = "INTERNAL"
    kind: Kind = Kind.INTERNAL

    def __init__(self, message: str, remedy: str = "", *, stage: str = "", **metadata: object) -> None:
        # Some messages end with a library's text, which may lack a full stop.
        self.message = message if message.endswith((".", "!", "?", ":")) else f"{message}."
        super().__init__(f"{self.message} {remedy}" if remedy else self.message)
        self.remedy = remedy
        self.stage = stage
        self.is_repeated = False
        """Whether the server refuses a call that was made before, without an answer: it may have been carried out then."""
        self.metadata: dict[str, str] = {key: str(value) for key, value in metadata.items()}

    def prefix(self, subject: str) -> None:
        """Begin the message with its subject, as in `net: forward: the module is in train mode`."""
        self.message = f"{subject}: {self.message}"
        self.args = (f"{self.message} {self.remedy}" if self.remedy else self.message,)

    def advise(self, remedy: str) -> None:
        """Replace the remedy by one of the caller, who knows more about the circumstances."""
        self.remedy = remedy
        self.args = (f"{self.message} {remedy}",)


class UserError(EtfarmError):
    """An error that the user must fix in the model, the program, the inputs or the command."""

    fault = Fault.USER
    reason = "INVALID_ARGUMENT"
    kind = Kind.INVALID_ARGUMENT


class DeviceError(EtfarmError):
    """A failure of the device, its link or its agent; the cell may be placed again."""

    fault = Fault.DEVICE
    reason = "DEVICE_FAILED"
    kind = Kind.UNAVAILABLE


class FarmError(EtfarmError):
    """A failure of the server or of this software."""

    fault = Fault.FARM
    reason = "INTERNAL"
    kind = Kind.INTERNAL


FAULTS: dict[Fault, type[EtfarmError]] = {Fault.USER: UserError, Fault.DEVICE: DeviceError, Fault.FARM: FarmError}


def error_of(
    fault: Fault,
    reason: str,
    message: str,
    remedy: str = "",
    *,
    kind: Kind | None = None,
    stage: str = "",
    metadata: Mapping[str, str] | None = None,
) -> EtfarmError:
    """Return an error that another process described, with its reason."""
    error = FAULTS[fault](message, remedy, stage=stage)
    error.metadata.update(metadata or {})
    error.reason = reason
    if kind is not None:
        error.kind = kind
    return error


def error_for(reason: str, message: str, remedy: str = "", *, stage: str = "", **metadata: object) -> EtfarmError:
    """Return an error that has no class of its own, of the fault and the kind that docs/reasons.toml gives for its reason.

    Raises:
        KeyError: there is no such reason, or it does not have a key of the metadata.
    """
    row, _, keys = ROWS[reason].partition(": ")
    fault, kind = row.split()
    if keys != ANY_KEYS and (unknown := metadata.keys() - set(keys.split())):
        raise KeyError(f"{reason} has no {sorted(unknown)}")
    error = FAULTS[Fault(fault)](message, remedy, stage=stage, **metadata)
    error.reason, error.kind = reason, Kind(kind)
    return error
