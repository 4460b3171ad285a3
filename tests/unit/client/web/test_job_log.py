"""The log of a job that a page shows live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from etfarm.client.aio import AsyncFarm
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import LogLine
from etfarm.client.transport.decode import decoded
from etfarm.client.web.pages.job import LOG
from etfarm.v1 import job_pb2


class Ending(AsyncJob):
    """A job that ends, with a last line of its log, as soon as somebody has read the log."""

    def __init__(self) -> None:
        super().__init__(None, job_pb2.Job(id="j", state=job_pb2.JOB_STATE_RUNNING))  # type: ignore[arg-type]
        self.lines = [decoded(LogLine, job_pb2.LogLine(number=1, text="first"))]

    async def logs(self, *, cell: int | None = None, follow: bool = False) -> AsyncIterator[LogLine]:
        for line in list(self.lines):
            yield line
        if len(self.lines) == 1:
            self._job.state = job_pb2.JOB_STATE_SUCCEEDED
            self.lines.append(decoded(LogLine, job_pb2.LogLine(number=2, text="last")))


class Farm:
    def __init__(self, job: AsyncJob) -> None:
        self._job = job

    async def job(self, job_id: str) -> AsyncJob:
        return self._job


async def test_a_line_that_comes_with_the_end_while_a_page_opens_is_shown() -> None:
    farm = cast("AsyncFarm", Farm(Ending()))
    shown = {key: line.text for key, line in (await LOG.load(farm, "j")).items()}
    assert shown == {"1": "first"}
    async with asyncio.timeout(10):
        async for key, line in LOG.watch(farm, "j"):
            shown[key] = line.text
            if key == "2":
                break
    assert shown == {"1": "first", "2": "last"}
