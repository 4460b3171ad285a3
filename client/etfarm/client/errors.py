"""The errors that the library raises, and their exit codes on the command line."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etfarm.wire.errors import (
    AWAY_REASONS,
    DeviceError,
    EtfarmError,
    FarmError,
    Fault,
    Kind,
    UserError,
    error_for,
)

if TYPE_CHECKING:
    import grpc

__all__ = [
    "DeviceError",
    "EmbeddedFarmFailed",
    "EtfarmError",
    "FarmError",
    "Fault",
    "Interrupted",
    "JobFailed",
    "Kind",
    "OutputUnwritable",
    "SeveralReports",
    "UserError",
    "exit_code",
    "from_rpc_error",
]

DONE, FAILED, USAGE, GATE, UNREACHABLE, INCONCLUSIVE = 0, 1, 2, 3, 4, 5
"""Exit codes: done; the job or a cell failed; wrong usage; a gate failed; no server answers; the measurement decides nothing."""

_MODEL_REASONS = frozenset(
    {
        "FACTORY_FAILED",
        "FACTORY_RETURNED_SOMETHING_ELSE",
        "BAD_MODEL_SOURCE",
        "EXAMPLE_INPUTS_NOT_A_TUPLE",
        "DYNAMIC_SHAPES_FORM",
        "INTERRUPTED",
        "CANCELLED",
        "NOTHING_TO_COMPARE",
    }
)
"""User errors without a stage that concern the model rather than the command."""

_UNREACHABLE_REASONS = AWAY_REASONS | {"EMBEDDED_FARM_FAILED"}


class JobFailed(EtfarmError):
    """Error of a job with several cells, some of which failed; each report has its cell's error."""

    reason = "JOB_FAILED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, job: str, failed: Sequence[str], cells: int) -> None:
        super().__init__(
            f"{len(failed)} of the {cells} cells of job {job} failed: {', '.join(failed[:4])}"
            f"{', ...' if len(failed) > 4 else ''}.",
            "Each report has its error.",
            job=job,
            failed=",".join(failed),
        )


class SeveralReports(UserError):
    """Error of `.report` on a job with no report or several."""

    reason = "SEVERAL_REPORTS"

    def __init__(self, job: str, count: int) -> None:
        super().__init__(f"Job {job} has {count} reports, not one.", "Use .reports.", job=job, reports=count)


class EmbeddedFarmFailed(FarmError):
    """Error of an embedded farm that did not start or that ended unexpectedly."""

    reason = "EMBEDDED_FARM_FAILED"
    kind = Kind.UNAVAILABLE


def extra_missing(what: str, extra: str, missing: str, *, why: str = "", instead: str = "", **metadata: str) -> EtfarmError:
    """Return the error of a command that needs a library which is not installed here, or not in a form that can be used.

    Args:
        why: what is wrong with the library that is installed; empty if there is none.
    """
    return error_for(
        "EXTRA_MISSING",
        f"{what} needs etfarm[{extra}] ({why or f'{missing} is not installed'}).",
        f"Run pip install 'etfarm[{extra}]'{instead}.",
        extra=extra,
        missing=missing,
        **metadata,
    )


class OutputUnwritable(UserError):
    """Error of a file that a command cannot write."""

    reason = "OUTPUT_FILE_UNWRITABLE"


class Interrupted(UserError):
    """Error of a command that the user interrupted before its job was done."""

    reason = "INTERRUPTED"
    kind = Kind.CANCELLED
    signal_number: int = signal.SIGINT


def exit_code(error: EtfarmError) -> int:
    """Return the exit code of a command that ends with `error`.

    A user error with a stage concerns the model; without a stage it concerns the command.
    """
    if error.reason in _UNREACHABLE_REASONS:
        return UNREACHABLE
    if error.fault is Fault.USER and not error.stage and error.reason not in _MODEL_REASONS:
        return USAGE
    return FAILED


def from_rpc_error(error: grpc.aio.AioRpcError, *, server: str) -> EtfarmError:
    """Convert the error of a failed call; every gRPC status becomes an exception here."""
    from etfarm.wire import status

    return status.from_rpc_error(error, server=server)
