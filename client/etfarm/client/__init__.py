"""The client library: `Farm` and `AsyncFarm` submit models and return reports.

    from etfarm.client import Farm

    with Farm() as farm:
        print(farm.bench("demo:resnet8").result().report.latency.p50_ns)

Importing this package imports neither grpc nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.client import Farm, Job, LocalSession, Reservation, Session, TokenStream
    from etfarm.client.export import ModelSource
    from etfarm.client.fleet.reservation import AsyncReservation
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import CellChanged, JobChanged, LogLine, Progress
    from etfarm.client.reports import Comparison, JobResult, Report
    from etfarm.client.sessions.calls import Loop, Outputs
    from etfarm.client.sessions.local import AsyncLocalSession
    from etfarm.client.sessions.session import AsyncSession
    from etfarm.client.sessions.text import AsyncTokenStream, GeneratedTokens
    from etfarm.client.submit.generate import Generate
    from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, UserError

__all__ = [
    "AsyncFarm",
    "AsyncJob",
    "AsyncLocalSession",
    "AsyncReservation",
    "AsyncSession",
    "AsyncTokenStream",
    "CellChanged",
    "Comparison",
    "DeviceError",
    "EtfarmError",
    "Farm",
    "FarmError",
    "Generate",
    "GeneratedTokens",
    "Job",
    "JobChanged",
    "JobResult",
    "LocalSession",
    "LogLine",
    "Loop",
    "ModelSource",
    "Outputs",
    "Progress",
    "Report",
    "Reservation",
    "Session",
    "TokenStream",
    "UserError",
]

_HOMES = {
    "AsyncFarm": "etfarm.client.aio",
    "AsyncJob": "etfarm.client.jobs.job",
    "AsyncLocalSession": "etfarm.client.sessions.local",
    "AsyncReservation": "etfarm.client.fleet.reservation",
    "AsyncSession": "etfarm.client.sessions.session",
    "Comparison": "etfarm.client.reports",
    "Farm": "etfarm.client.client",
    "AsyncTokenStream": "etfarm.client.sessions.text",
    "GeneratedTokens": "etfarm.client.sessions.text",
    "TokenStream": "etfarm.client.client",
    "Generate": "etfarm.client.submit.generate",
    "Job": "etfarm.client.client",
    "JobResult": "etfarm.client.reports",
    "LocalSession": "etfarm.client.client",
    "Loop": "etfarm.client.sessions.calls",
    "ModelSource": "etfarm.client.export",
    "Outputs": "etfarm.client.sessions.calls",
    "Report": "etfarm.client.reports",
    "Reservation": "etfarm.client.client",
    "Session": "etfarm.client.client",
    "DeviceError": "etfarm.wire.errors",
    "EtfarmError": "etfarm.wire.errors",
    "FarmError": "etfarm.wire.errors",
    "UserError": "etfarm.wire.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "etfarm.client.models")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
