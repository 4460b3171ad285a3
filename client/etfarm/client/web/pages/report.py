"""The reports of a job, with the templates and scripts of the HTML report."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.formats import html
from etfarm.client.web.templating import render
from etfarm.client.web.turns import FairSlots
from etfarm.client.web.visitors import farm, visitor_of
from etfarm.wire.errors import error_for

MAX_REPORTS: Final = 32
"""Number of reports on one page; each has its samples and operators."""
MAX_COMPOSED: Final = 4
"""Number of pages that are composed at the same time, with all reports of a job in memory; 3 at most for one token."""
WAIT_S: Final = 25.0
"""Seconds that a page waits for others at most."""

_composing = FairSlots(MAX_COMPOSED, MAX_COMPOSED - 1, 32, "reports")


async def report(request: Request) -> Response:
    """Show the reports of a job, or those of the cells in `cell`."""
    handle = await (await farm(request)).job(request.path_params["job_id"])
    cells = request.query_params.getlist("cell")
    async with _composing.take(visitor_of(request).account.digest, WAIT_S):
        document = _choose(await handle.document(), cells)
        count = len(document["reports"])
        document["reports"] = document["reports"][:MAX_REPORTS]
        values = await asyncio.to_thread(html.page_values, document)
    values.pop("title")
    command = f"etfarm report show {handle.id}"
    title = f"Report of {handle.info.name or handle.id[:12]}"
    return render(
        request, "job_report.html", title=title, command=command, info=handle.info, scripts=html.SCRIPTS,
        left_out=count - len(document["reports"]), **values,
    )  # fmt: skip


def _choose(document: dict[str, Any], cells: list[str]) -> dict[str, Any]:
    """Return the document with the reports of these cells; all without any.

    Raises:
        REPORT_NOT_FOUND: no report is of one of them.
    """
    if not cells:
        return document
    reports = [report for report in document["reports"] if report["cell"] in cells]
    if not reports:
        raise error_for(
            "REPORT_NOT_FOUND", "There is no report of this cell.", "It has one when the cell has ended.", cells=cells[:10]
        )
    return {**document, "reports": reports}


ROUTES = (Route("/jobs/{job_id}/report", report, name="report", methods=["GET"]),)
