"""`Farm`, the synchronous `AsyncFarm`; its event loop runs in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from etfarm.client.aio import AsyncFarm
from etfarm.client.datasets.dataset import Options, Result
from etfarm.client.jobs.comparison import Compared, Comparison
from etfarm.client.jobs.history import HistoryEntry
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import (
    Agent,
    Bundle,
    Device,
    Event,
    JobInfo,
    JobResult,
    JobState,
    LogLine,
    Project,
    RecipeInfo,
    ServerInfo,
)
from etfarm.client.sessions.calls import Outputs
from etfarm.client.sessions.session import Session, TextCallback
from etfarm.client.submit.bench_options import BenchOptions, takes_keywords_of
from etfarm.client.submit.calibration import Calibration
from etfarm.client.submit.inputs import Inputs
from etfarm.client.submit.preparation import ExampleInputs, Model
from etfarm.client.submit.recipes import DEFAULT_RECIPE
from etfarm.client.transport import transfers
from etfarm.client.transport.connection import NotConnected
from etfarm.client.transport.thread_loop import Loop
from etfarm.wire.recipes import Recipe
from etfarm.wire.tensors import Value


class Job:
    """A job on the farm; `AsyncJob` without `await`.

    It continues whether or not a client watches it.
    """

    def __init__(self, loop: Loop, job: AsyncJob) -> None:
        """Wrap an `AsyncJob`; `Farm` creates instances."""
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
        """The job's state as last read from the server."""
        return self._job.state

    @property
    def info(self) -> JobInfo:
        """The job and its cells as last read from the server."""
        return self._job.info

    def refresh(self) -> JobInfo:
        """See `AsyncJob.refresh`."""
        return self._loop.run(self._job.refresh())

    def watch(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncJob.watch`."""
        return self._loop.each(self._job.watch(after))

    def wait(self) -> JobState:
        """See `AsyncJob.wait`."""
        return self._loop.run(self._job.wait())

    def result(self) -> JobResult:
        """See `AsyncJob.result`."""
        return self._loop.run(self._job.result())

    def cancel(self) -> JobState:
        """See `AsyncJob.cancel`."""
        return self._loop.run(self._job.cancel())

    def logs(self, *, cell: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        """See `AsyncJob.logs`."""
        return self._loop.each(self._job.logs(cell=cell, follow=follow))

    def outputs(self, cell: int = 0) -> list[Value]:
        """See `AsyncJob.outputs`."""
        return self._loop.run(self._job.outputs(cell))

    def save_program(self, path: Path, cell: int = 0) -> list[Path]:
        """See `AsyncJob.save_program`."""
        return self._loop.run(self._job.save_program(path, cell))

    def save_exported_programs(self, path: Path, cell: int = 0) -> list[Path]:
        """See `AsyncJob.save_exported_programs`."""
        return self._loop.run(self._job.save_exported_programs(path, cell))

    def save_stage_files(self, folder: Path, cell: int = 0) -> list[Path]:
        """See `AsyncJob.save_stage_files`."""
        return self._loop.run(self._job.save_stage_files(folder, cell))

    def save_etrecord(self, path: Path, cell: int = 0) -> None:
        """See `AsyncJob.save_etrecord`."""
        self._loop.run(self._job.save_etrecord(path, cell))

    def save_raw_files(self, folder: Path, cell: int = 0) -> list[Path]:
        """See `AsyncJob.save_raw_files`."""
        return self._loop.run(self._job.save_raw_files(folder, cell))


class Farm:
    """A farm to submit jobs to; `AsyncFarm` without `await`.

    Use it with `with`.

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
        project: str | None = None,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """See `AsyncFarm`."""
        self._farm = AsyncFarm(address, token=token, tls_ca=tls_ca, project=project, on_status=on_status)
        self._loop: Loop | None = None

    def __enter__(self) -> Self:
        """Connect to the farm.

        Raises:
            EtfarmError: as AsyncFarm.
        """
        self._loop = Loop()
        try:
            self._loop.run(self._farm.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the farm; an embedded farm without other users stops."""
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

    @takes_keywords_of(BenchOptions)
    def bench(self, model: Model | Sequence[Model], options: BenchOptions) -> Job:
        """See `AsyncFarm.bench`."""
        return self._job(self._farm.submit_bench(model, options))

    def compile(
        self,
        model: Model | Sequence[Model],
        recipes: str | Recipe | Sequence[str | Recipe] = (DEFAULT_RECIPE,),
        *,
        example_inputs: ExampleInputs | None = None,
        calibration: Calibration | None = None,
        batched: bool = False,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        no_cache: bool = False,
        stop_after: str = "",
        on_upload: transfers.Moved | None = None,
    ) -> Job:
        """See `AsyncFarm.compile`."""
        return self._job(
            self._farm.compile(
                model,
                recipes,
                example_inputs=example_inputs,
                calibration=calibration,
                batched=batched,
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
        recipes: str | Recipe | Sequence[str | Recipe] = (DEFAULT_RECIPE,),
        device: str = "",
        *,
        example_inputs: ExampleInputs | None = None,
        calibration: Calibration | None = None,
        batched: bool = False,
        data: Sequence[str | Path] = (),
        inputs: Inputs | None = None,
        methods: Sequence[str] = (),
        threads: int | None = None,
        name: str = "",
        timeout_s: float | None = None,
        on_upload: transfers.Moved | None = None,
    ) -> Job:
        """See `AsyncFarm.run`."""
        return self._job(
            self._farm.run(
                model,
                recipes,
                device,
                example_inputs=example_inputs,
                calibration=calibration,
                batched=batched,
                data=data,
                inputs=inputs,
                methods=methods,
                threads=threads,
                name=name,
                timeout_s=timeout_s,
                on_upload=on_upload,
            )
        )

    def session(
        self,
        program: Model,
        device: str = "",
        *,
        recipe: str | Recipe = DEFAULT_RECIPE,
        example_inputs: ExampleInputs | None = None,
        data: Sequence[str | Path] = (),
        methods: Sequence[str] = (),
        threads: int | None = None,
        cores: str = "",
        idle_timeout_s: float | None = None,
        priority: int = 0,
        on_wait: TextCallback | None = None,
        on_log: TextCallback | None = None,
        on_upload: transfers.Moved | None = None,
    ) -> Session:
        """See `AsyncFarm.session`; use it with `with`."""
        session = self._farm.session(
            program,
            device,
            recipe=recipe,
            example_inputs=example_inputs,
            data=data,
            methods=methods,
            threads=threads,
            cores=cores,
            idle_timeout_s=idle_timeout_s,
            priority=priority,
            on_wait=on_wait,
            on_log=on_log,
            on_upload=on_upload,
        )
        return Session(lambda: self._open, session)

    def run_dataset(
        self,
        program: Model,
        inputs: Iterable[Any],
        device: str = "",
        *,
        devices: int | None = 1,
        on_result: Callable[[Result], None] | None = None,
        **options: Unpack[Options],
    ) -> Iterator[tuple[int, Outputs]]:
        """See `AsyncFarm.run_dataset`; `on_result` is called in the client's thread."""
        results = self._farm.run_dataset(program, inputs, device, devices=devices, on_result=on_result, **options)
        return self._open.each(results)

    def jobs(self, limit: int = 50) -> list[JobInfo]:
        """See `AsyncFarm.jobs`."""
        return self._open.run(self._farm.jobs(limit))

    def job(self, job_id: str) -> Job:
        """See `AsyncFarm.job`."""
        return self._job(self._farm.job(job_id))

    def history(
        self,
        model: str,
        *,
        device: str = "",
        recipe: str = "",
        method: str = "",
        threads: int | None = None,
        limit: int = 50,
    ) -> list[HistoryEntry]:
        """See `AsyncFarm.history`."""
        return self._open.run(
            self._farm.history(model, device=device, recipe=recipe, method=method, threads=threads, limit=limit)
        )

    def tag(self, job_id: str, tag: str) -> str | None:
        """See `AsyncFarm.tag`."""
        return self._open.run(self._farm.tag(job_id, tag))

    def untag(self, tag: str, job_id: str = "") -> str | None:
        """See `AsyncFarm.untag`."""
        return self._open.run(self._farm.untag(tag, job_id))

    def analyze(self, job_id: str) -> JobResult:
        """See `AsyncFarm.analyze`."""
        return self._open.run(self._farm.analyze(job_id))

    def compare(
        self,
        base: Compared,
        candidate: Compared,
        gate: str | Sequence[str] = (),
        *,
        strict: bool = False,
        accept_invalid: bool = False,
    ) -> Comparison:
        """See `AsyncFarm.compare`."""
        return self._open.run(self._farm.compare(base, candidate, gate, strict=strict, accept_invalid=accept_invalid))

    def devices(self, selector: str = "") -> list[Device]:
        """See `AsyncFarm.devices`."""
        return self._open.run(self._farm.devices(selector))

    def device(self, device_id: str) -> Device:
        """See `AsyncFarm.device`."""
        return self._open.run(self._farm.device(device_id))

    def forget_device(self, device_id: str) -> None:
        """See `AsyncFarm.forget_device`."""
        self._open.run(self._farm.forget_device(device_id))

    def agents(self) -> list[Agent]:
        """See `AsyncFarm.agents`."""
        return self._open.run(self._farm.agents())

    def bind_agent(self, agent_id: str, principal: str) -> Agent:
        """See `AsyncFarm.bind_agent`."""
        return self._open.run(self._farm.bind_agent(agent_id, principal))

    def restrict_device(self, device_id: str, projects: Sequence[str]) -> Device:
        """See `AsyncFarm.restrict_device`."""
        return self._open.run(self._farm.restrict_device(device_id, projects))

    def projects(self) -> list[Project]:
        """See `AsyncProjects.list`."""
        return self._open.run(self._farm.projects.list())

    def create_project(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """See `AsyncProjects.create`."""
        return self._open.run(self._farm.projects.create(name, members, storage_limit_bytes=storage_limit_bytes))

    def recipes(self) -> list[RecipeInfo]:
        """See `AsyncFarm.recipes`."""
        return self._open.run(self._farm.recipes())

    def bundles(self) -> list[Bundle]:
        """See `AsyncFarm.bundles`."""
        return self._open.run(self._farm.bundles())

    def add_bundle(self, path: Path) -> Bundle:
        """See `AsyncFarm.add_bundle`."""
        return self._open.run(self._farm.add_bundle(path))

    def info(self) -> ServerInfo:
        """See `AsyncFarm.info`."""
        return self._open.run(self._farm.info())

    @property
    def _open(self) -> Loop:
        if self._loop is None:
            raise NotConnected("The farm is not connected.", "Use it inside of `with Farm(...) as farm:`.")
        return self._loop

    def _job(self, submitting: Coroutine[Any, Any, AsyncJob]) -> Job:
        try:
            loop = self._open
        except NotConnected:
            submitting.close()  # a coroutine that never starts would cause a warning
            raise
        return Job(loop, loop.run(submitting))
