"""Steps 1 and 10, client: `Farm`, AsyncFarm for programs that do not know asyncio; its loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from etfarm.client import transfers
from etfarm.client.aio import AsyncFarm, NotConnected
from etfarm.client.jobs import AsyncJob
from etfarm.client.models import Bundle, Device, Event, JobInfo, JobResult, JobState, LogLine, RecipeInfo, ServerInfo
from etfarm.client.submission import DEFAULT_RECIPE, Inputs, Model
from etfarm.wire.tensors import Value

Answer = TypeVar("Answer")

CLEAN_UP_S = 2.0
"""How long Ctrl-C waits for what it cancelled."""


class _Loop:
    """An event loop in a daemon thread, for the life of one Farm."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etfarm client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """The coroutine's answer. Ctrl-C here cancels it there, and gives it a moment to clean up."""
        ended = threading.Event()

        async def noted() -> Answer:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(noted(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(CLEAN_UP_S)
            raise

    def each(self, items: AsyncIterator[Answer]) -> Iterator[Answer]:
        """The items of an async generator, as they come."""

        async def following() -> tuple[bool, Answer | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(following())
                if not more:
                    return
                yield item  # type: ignore[misc]
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                self.run(close())

    def stop(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Job:
    """A job on the farm; AsyncJob without `await`. It goes on whether or not anybody watches."""

    def __init__(self, loop: _Loop, job: AsyncJob) -> None:
        """Made by Farm."""
        self._loop = loop
        self._job = job

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.state})"

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def state(self) -> JobState:
        """The job's state as it was last heard of."""
        return self._job.state

    @property
    def info(self) -> JobInfo:
        """The job as it was last heard of, with its cells."""
        return self._job.info

    def refresh(self) -> JobInfo:
        """As AsyncJob.refresh."""
        return self._loop.run(self._job.refresh())

    def watch(self, after: int = 0) -> Iterator[Event]:
        """As AsyncJob.watch."""
        return self._loop.each(self._job.watch(after))

    def wait(self) -> JobState:
        """As AsyncJob.wait."""
        return self._loop.run(self._job.wait())

    def result(self) -> JobResult:
        """As AsyncJob.result."""
        return self._loop.run(self._job.result())

    def cancel(self) -> JobState:
        """As AsyncJob.cancel."""
        return self._loop.run(self._job.cancel())

    def logs(self, *, cell: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        """As AsyncJob.logs."""
        return self._loop.each(self._job.logs(cell=cell, follow=follow))

    def outputs(self, cell: int = 0) -> list[Value]:
        """As AsyncJob.outputs."""
        return self._loop.run(self._job.outputs(cell))

    def save_program(self, path: Path, cell: int = 0) -> None:
        """As AsyncJob.save_program."""
        self._loop.run(self._job.save_program(path, cell))

    def save_etrecord(self, path: Path, cell: int = 0) -> None:
        """As AsyncJob.save_etrecord."""
        self._loop.run(self._job.save_etrecord(path, cell))


class Farm:
    """A farm to submit jobs to; AsyncFarm without `await`. Use it with `with`.

        with Farm() as farm:
            job = farm.bench("demo:resnet8", recipes=["xnnpack_fp32"])
            print(job.result().report.latency.p50_ns)

    One Farm may be used by several threads.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """As AsyncFarm."""
        self._farm = AsyncFarm(address, token=token, tls_ca=tls_ca, on_status=on_status)
        self._loop: _Loop | None = None

    def __enter__(self) -> Self:
        """Connects.

        Raises:
            EtfarmError: as AsyncFarm.
        """
        self._loop = _Loop()
        try:
            self._loop.run(self._farm.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the farm; an embedded one that nobody else uses is gone afterwards."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._farm.close())
            finally:
                loop.stop()

    @property
    def address(self) -> str:
        """The server's address."""
        return self._farm.address

    def bench(
        self,
        model: Model | Sequence[Model],
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        devices: str | Sequence[str] = ("",),
        *,
        all_devices: bool = False,
        example_inputs: tuple[Any, ...] | None = None,
        inputs: Inputs | None = None,
        methods: Sequence[str] = (),
        threads: Sequence[int] = (),
        cores: str = "",
        iterations: int | None = None,
        warmup: int | None = None,
        min_time_s: float | None = None,
        profile: bool = True,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        no_cache: bool = False,
        on_upload: transfers.Moved | None = None,
    ) -> Job:
        """As AsyncFarm.bench."""
        return self._job(
            self._farm.bench(
                model,
                recipes,
                devices,
                all_devices=all_devices,
                example_inputs=example_inputs,
                inputs=inputs,
                methods=methods,
                threads=threads,
                cores=cores,
                iterations=iterations,
                warmup=warmup,
                min_time_s=min_time_s,
                profile=profile,
                name=name,
                labels=labels,
                timeout_s=timeout_s,
                priority=priority,
                no_cache=no_cache,
                on_upload=on_upload,
            )
        )

    def compile(
        self,
        model: Model | Sequence[Model],
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        *,
        example_inputs: tuple[Any, ...] | None = None,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        no_cache: bool = False,
        stop_after: str = "",
        on_upload: transfers.Moved | None = None,
    ) -> Job:
        """As AsyncFarm.compile."""
        return self._job(
            self._farm.compile(
                model,
                recipes,
                example_inputs=example_inputs,
                name=name,
                labels=labels,
                no_cache=no_cache,
                stop_after=stop_after,
                on_upload=on_upload,
            )
        )

    def run(
        self,
        model: Model,
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        device: str = "",
        *,
        example_inputs: tuple[Any, ...] | None = None,
        inputs: Inputs | None = None,
        methods: Sequence[str] = (),
        threads: int | None = None,
        name: str = "",
        timeout_s: float | None = None,
        on_upload: transfers.Moved | None = None,
    ) -> Job:
        """As AsyncFarm.run."""
        return self._job(
            self._farm.run(
                model,
                recipes,
                device,
                example_inputs=example_inputs,
                inputs=inputs,
                methods=methods,
                threads=threads,
                name=name,
                timeout_s=timeout_s,
                on_upload=on_upload,
            )
        )

    def jobs(self, limit: int = 50) -> list[JobInfo]:
        """As AsyncFarm.jobs."""
        return self._open.run(self._farm.jobs(limit))

    def job(self, job_id: str) -> Job:
        """As AsyncFarm.job."""
        return self._job(self._farm.job(job_id))

    def devices(self, selector: str = "") -> list[Device]:
        """As AsyncFarm.devices."""
        return self._open.run(self._farm.devices(selector))

    def device(self, device_id: str) -> Device:
        """As AsyncFarm.device."""
        return self._open.run(self._farm.device(device_id))

    def recipes(self) -> list[RecipeInfo]:
        """As AsyncFarm.recipes."""
        return self._open.run(self._farm.recipes())

    def bundles(self) -> list[Bundle]:
        """As AsyncFarm.bundles."""
        return self._open.run(self._farm.bundles())

    def add_bundle(self, path: Path) -> Bundle:
        """As AsyncFarm.add_bundle."""
        return self._open.run(self._farm.add_bundle(path))

    def info(self) -> ServerInfo:
        """As AsyncFarm.info."""
        return self._open.run(self._farm.info())

    @property
    def _open(self) -> _Loop:
        if self._loop is None:
            raise NotConnected("The farm is not connected.", "Use it inside of `with Farm(...) as farm:`.")
        return self._loop

    def _job(self, submitting: Coroutine[Any, Any, AsyncJob]) -> Job:
        try:
            loop = self._open
        except NotConnected:
            submitting.close()  # it was never started, and Python would say so
            raise
        return Job(loop, loop.run(submitting))
