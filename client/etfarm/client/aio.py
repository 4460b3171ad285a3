"""`AsyncFarm`, a connection to the farm at an address or to the embedded farm."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, Unpack

from etfarm.client.admin.projects import AsyncProjects
from etfarm.client.datasets import devices as dataset_devices
from etfarm.client.datasets.dataset import Options, Result
from etfarm.client.datasets.samples import number_samples
from etfarm.client.embedded.lease import Lease
from etfarm.client.jobs import history
from etfarm.client.jobs.comparison import Compared, Comparison, compare, gate_of
from etfarm.client.jobs.history import HistoryEntry
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import Agent, Bundle, Device, JobInfo, JobResult, Project, RecipeInfo, ServerInfo
from etfarm.client.sessions.calls import Outputs
from etfarm.client.sessions.program import ServedModel, SharedModel
from etfarm.client.sessions.session import AsyncSession, Line, TextCallback
from etfarm.client.submit.bench_options import BenchOptions, device_choices, takes_keywords_of
from etfarm.client.submit.calibration import Calibration
from etfarm.client.submit.inputs import Inputs
from etfarm.client.submit.preparation import ExampleInputs, Model
from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe
from etfarm.client.submit.submission import SubmissionRequest, several
from etfarm.client.transport import decode, transfers
from etfarm.client.transport.connection import Connection, NotConnected
from etfarm.client.transport.paging import iterate_pages
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import (
    agent_pb2,
    compile_pb2,
    device_pb2,
    farm_pb2,
    job_pb2,
    report_pb2,
    session_pb2,
)
from etfarm.wire import chunks, selectors
from etfarm.wire.recipes import Recipe
from etfarm.wire.stages import check_stop_after

GIVE_UP_S = 5.0
"""Seconds that a cancelled submission may take to cancel the job that it created."""

_PAGE_SIZE = 500
"""Requested number of entries on a page of a list: the most that a server returns."""


class AsyncFarm:
    """A farm to submit jobs to.

    Use it with `async with`. Its jobs continue after the block ends.

        async with AsyncFarm() as farm:
            job = await farm.bench("demo:resnet8", recipes=["xnnpack_fp32"])
            result = await job.result()
            print(result.report.latency)

    Without an address and without ETFARM_SERVER, this is the user's embedded farm. It starts for its first user, is
    shared by later ones and stops with the last.
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
        """Prepare a connection; `async with` opens it.

        Args:
            address: HOST:PORT, [IPV6]:PORT or unix:PATH; ETFARM_SERVER when None.
            token: the bearer token; ETFARM_TOKEN when None.
            tls_ca: PEM file of the authority that signed the server's certificate; ETFARM_TLS_CA when None.
            project: owner of what this client creates; ETFARM_PROJECT when None, else the caller's only project, else `default`.
            on_status: called with one sentence about what the start of the embedded farm waits for.

        Raises:
            BadAddress: the file `tls_ca` does not exist, or there is no server address to use it for.
        """
        self._connection = Connection(address, token, tls_ca, on_status, project)

    async def __aenter__(self) -> Self:
        """Connect to the farm.

        Raises:
            EtfarmError: SERVER_UNREACHABLE, UNAUTHENTICATED; BAD_ADDRESS, BAD_TLS_FILE; EMBEDDED_FARM_FAILED.
        """
        await self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect from the farm; an embedded farm without other users stops."""
        await self._connection.close()

    @property
    def address(self) -> str:
        """The server's address."""
        return self._open.server

    @property
    def lease(self) -> Lease | None:
        """The lease on the embedded farm; None for a server with an address."""
        return self._connection.lease

    @takes_keywords_of(BenchOptions)
    async def bench(self, model: Model | Sequence[Model], options: BenchOptions) -> AsyncJob:
        """Submit a benchmark.

        One cell is created for each combination of model, recipe, device choice, method and thread count.

        Args:
            model: a model, or a list of models, of any kind in `etfarm.client.submit.preparation.Model`; exporting an
                eager module takes seconds.
            recipes: names with arguments, several joined by +, or TOML files, as on the command line.
            devices: selectors; each is one cell on one matching device, or one per match with `all_devices`.
            example_inputs: arguments of `forward` for an nn.Module; for a dict of modules, a dict by method.
            calibration: samples for static quantization instead of the models' own: any type in
                `etfarm.client.submit.calibration.Calibration`, such as an .npz or a folder of them; with `batched`, axis
                0 of every array indexes the samples.
            data: named data files (.ptd) of a ready program.
            inputs: inputs of the programs; the models' own example inputs when None.
            numerics: compare the outputs of each operator too (`report.numeric_gap`): in addition to the timed program,
                one with a delegate per operator is compiled and run once. Not available for ready programs.
            interleave: measure the candidates of each device choice, method and thread count in turns, on one device; at
                least two. `report.interleaved` then compares each with the first, round by round.
            options: all other options of `etfarm.client.submit.bench_options.BenchOptions`.

        Raises:
            EtfarmError: a model, recipe, selector or input is wrong, or the server refuses the job.
        """
        return await self.submit_bench(model, options)

    async def submit_bench(self, model: Model | Sequence[Model], options: BenchOptions) -> AsyncJob:
        """Submit a benchmark with one options object; otherwise the same as `bench`."""
        request = SubmissionRequest(
            model, options.recipes, options.example_inputs, options.calibration, options.batched, options.data, options.inputs
        )
        return await self._submit(options.job_spec(), request, options.on_upload)

    async def compile(
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
    ) -> AsyncJob:
        """Submit a compilation; `AsyncJob.save_program` downloads the result.

        Args:
            stop_after: the last stage to run, such as "QUANTIZE"; `AsyncJob.save_stage_files` downloads its output. The
                job produces a program when empty.
            model, recipes, example_inputs, calibration, batched: as in `bench`.

        Raises:
            EtfarmError: a model or recipe is wrong, or the server refuses the job.
        """
        spec = job_pb2.JobSpec(name=name, labels=labels, no_cache=no_cache, stop_after=stop_after)
        parsed = [read_recipe(recipe) for recipe in several(recipes)]
        if stop_after:
            for recipe in parsed:
                check_stop_after(recipe, stop_after)
        request = SubmissionRequest(model, parsed, example_inputs, calibration, batched)
        return await self._submit(spec, request, on_upload)

    async def run(
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
    ) -> AsyncJob:
        """Submit one run without a measurement; `AsyncJob.outputs` downloads the program's outputs.

        The arguments are the same as for `bench`.

        Raises:
            EtfarmError: the model, selector or inputs are wrong, or the server refuses the job.
        """
        spec = job_pb2.JobSpec(
            name=name,
            devices=device_choices(device, all_devices=False),
            methods=methods,
            threads=[threads] if threads else [],
            timeout_s=timeout_s,
        )
        request = SubmissionRequest(model, recipes, example_inputs, calibration, batched, data, inputs)
        return await self._submit(spec, request, on_upload)

    def session(
        self,
        program: Model | SharedModel,
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
    ) -> AsyncSession:
        """Return a session: a device used by this program alone, with `program` loaded.

        The session starts when it is entered with `async with`.

        Args:
            program: a .pte, or any other model that `bench` takes, which is first compiled with `recipe`.
            device: a selector; while all matching devices are busy, the session waits in the queue.
            methods: methods to load at the start; others are loaded at their first call.
            idle_timeout_s: seconds without a call after which the session ends; 600 when None.
            on_wait: called with what the session waits for, whenever that changes.
            on_log: called with each line that the runner prints.
            example_inputs, data, threads, cores, priority: as in `bench`.

        Raises:
            UserError: `device` is not a selector. Entering the session raises the errors of SessionService.Open and of
                compiling.
        """
        selectors.parse(device)
        request = session_pb2.OpenSessionRequest(
            selector=device,
            methods=methods,
            threads=threads,
            cores=cores,
            idle_timeout_s=idle_timeout_s,
            priority=priority,
        )
        served: ServedModel | SharedModel
        served = program if isinstance(program, SharedModel) else ServedModel(program, recipe, example_inputs, data)

        async def connect(_: AsyncExitStack) -> Line:
            stubs = self._open
            program_message, names = await served.on_farm(stubs, self.compile, on_upload=on_upload)
            request.program.CopyFrom(program_message)
            return Line(stubs.server, stubs.sessions, stubs.artifacts, request, names)

        return AsyncSession(connect, on_wait=on_wait, on_log=on_log)

    def run_dataset(
        self,
        program: Model,
        inputs: Iterable[Any],
        device: str = "",
        *,
        devices: int | None = 1,
        on_result: Callable[[Result], None] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[tuple[int, Outputs], None]:
        """Yield the index and outputs of every set of inputs, in order.

        Each device keeps one program loaded and has a few samples in flight.

        Args:
            program: as in `session`.
            inputs: sets of arrays by name, arrays in order, or single arrays; read in a thread as they are needed.
            devices: number of equal matching devices to split the samples over; all when None. Busy devices join once
                free.
            on_result: called with each sample's result, including failures, and the device that ran it.
            options: see `etfarm.client.datasets.dataset.Options`.

        Raises:
            EtfarmError: no session can be opened, or a sample failed; the error names it. `keep_going` skips failed
                samples.
        """
        samples = number_samples(inputs)
        return dataset_devices.dataset(self, program, samples, device, devices=devices, options=options).outputs(on_result)

    async def jobs(self, limit: int = 50) -> list[JobInfo]:
        """Return the farm's jobs, newest first."""
        jobs: list[JobInfo] = []
        request = job_pb2.ListJobsRequest(page_size=min(limit, _PAGE_SIZE))
        async for page in iterate_pages(self._open.jobs.List, request, server=self.address):
            jobs += [decode.job(job) for job in page.jobs]
            if len(jobs) >= limit:
                break
        return jobs[:limit]

    async def job(self, job_id: str) -> AsyncJob:
        """Return a job by its id, a unique prefix of at least 4 characters, a tag, or `latest`.

        Raises:
            EtfarmError: JOB_NOT_FOUND.
        """
        request = job_pb2.GetJobRequest(job_id=job_id)
        return AsyncJob(self._open, await self._open.jobs.Get(request))

    async def history(
        self,
        model: str,
        *,
        device: str = "",
        recipe: str = "",
        method: str = "",
        threads: int | None = None,
        limit: int = 50,
    ) -> list[HistoryEntry]:
        """Return the reports of a model, newest first; `etfarm.client.jobs.history.trends` groups them into series.

        Args:
            model: the model's name in reports, or at least the first 4 characters of its digest.
            device: a selector; all devices when empty.
            recipe, method, threads: exact values to filter by; all when empty.

        Raises:
            UserError: `device` is not a selector.
            EtfarmError: NO_HISTORY, which lists the models that have reports.
        """
        return await history.fetch(self._open, model, device=device, recipe=recipe, method=method, threads=threads, limit=limit)

    async def tag(self, job_id: str, tag: str) -> str | None:
        """Give a job a tag, which replaces its id wherever one is accepted.

        Return the id of the job that had the tag before.

        Raises:
            EtfarmError: BAD_TAG; JOB_NOT_FOUND; NOT_YOURS.
        """
        return await self._tag(report_pb2.TagJobRequest(job_id=job_id, tag=tag))

    async def untag(self, tag: str, job_id: str = "") -> str | None:
        """Remove a tag and return the id of the job that had it; with `job_id`, only from that job.

        Raises:
            EtfarmError: TAG_NOT_FOUND; JOB_NOT_FOUND; NOT_YOURS.
        """
        return await self._tag(report_pb2.TagJobRequest(job_id=job_id, tag=tag, remove=True))

    async def _tag(self, request: report_pb2.TagJobRequest) -> str | None:
        answer = await self._open.reports.Tag(request)
        return answer.previous_job_id or None

    async def analyze(self, job_id: str) -> JobResult:
        """Recompute a job's reports with the server's version from the stored files, and replace the old reports.

        Raises:
            EtfarmError: JOB_LIVE; JOB_NOT_FOUND; NOT_YOURS.
        """
        request = report_pb2.AnalyzeJobRequest(job_id=job_id)
        await self._open.reports.Analyze(request)
        return JobResult.from_dict(await (await self.job(job_id)).document())

    async def compare(
        self,
        base: Compared,
        candidate: Compared,
        gate: str | Sequence[str] = (),
        *,
        strict: bool = False,
        accept_invalid: bool = False,
    ) -> Comparison:
        """Compare a candidate with a base: latency, operators, size, memory, accuracy, delegation and provenance.

        Args:
            base, candidate: a job, a report file or a result; see `etfarm.client.jobs.comparison.Compared`.
            gate: limits, `3%` (of latency) or `["latency=3%", "accuracy=1dB"]`; sets `Comparison.passed`.
            strict: also fail if an interval does not decide whether a limit is kept.
            accept_invalid: accept latencies with a verdict other than VALID.

        Raises:
            EtfarmError: BAD_GATE, BAD_REPORT_DOCUMENT; JOB_NOT_FOUND, REPORT_NOT_FOUND; NOTHING_TO_COMPARE.
        """
        limits = gate_of(gate, strict=strict, accept_invalid=accept_invalid)
        return await compare(self._open, base, candidate, limits)

    async def devices(self, selector: str = "") -> list[Device]:
        """Return the known devices that match, including offline devices.

        Raises:
            UserError: `selector` is not a valid selector.
        """
        selectors.parse(selector)
        request = device_pb2.ListDevicesRequest(selector=selector, page_size=_PAGE_SIZE)
        devices: list[Device] = []
        async for page in iterate_pages(self._open.devices.List, request, server=self.address):
            devices += [decode.device(device) for device in page.devices]
        return devices

    async def device(self, device_id: str) -> Device:
        """Return a device by its id, a unique prefix of its id, or its name.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND.
        """
        request = device_pb2.GetDeviceRequest(device_id=device_id)
        return decode.device(await self._open.devices.Get(request))

    async def forget_device(self, device_id: str) -> None:
        """Remove an offline device from the farm; its reports stay. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, DEVICE_CONNECTED, PERMISSION_DENIED.
        """
        request = device_pb2.ForgetDeviceRequest(device_id=device_id)
        await self._open.devices.Forget(request)

    async def agents(self) -> list[Agent]:
        """Return the known agent identities and the principals whose tokens may use them. Admins only."""
        request = agent_pb2.ListAgentsRequest(page_size=_PAGE_SIZE)
        agents: list[Agent] = []
        async for page in iterate_pages(self._open.agents.ListAgents, request, server=self.address):
            agents += [decode.agent(agent) for agent in page.agents]
        return agents

    async def bind_agent(self, agent_id: str, principal: str) -> Agent:
        """Bind an agent identity to the principal whose token may use it from now on. Admins only.

        Raises:
            EtfarmError: AGENT_NOT_FOUND, PERMISSION_DENIED.
        """
        request = agent_pb2.BindAgentRequest(agent_id=agent_id, principal=principal)
        return decode.agent(await self._open.agents.BindAgent(request))

    async def restrict_device(self, device_id: str, projects: Sequence[str]) -> Device:
        """Let a device run only the jobs and sessions of some projects, or of all projects if `projects` is empty. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, PROJECT_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.RestrictDeviceRequest(device_id=device_id, projects=projects)
        return decode.device(await self._open.devices.Restrict(request))

    @property
    def projects(self) -> AsyncProjects:
        """The farm's projects."""
        return AsyncProjects(self._open)

    async def create_project(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """Create a project; the same as `create` of `projects`."""
        return await self.projects.create(name, members, storage_limit_bytes=storage_limit_bytes)

    async def recipes(self) -> list[RecipeInfo]:
        """Return all recipes, with what the server lacks for those that it cannot run."""
        request = compile_pb2.ListRecipesRequest(page_size=_PAGE_SIZE)
        recipes: list[RecipeInfo] = []
        async for page in iterate_pages(self._open.compiler.ListRecipes, request, server=self.address):
            recipes += [decode.recipe(recipe) for recipe in page.recipes]
        return recipes

    async def bundles(self) -> list[Bundle]:
        """Return the runner bundles that the farm sends to devices, newest first."""
        request = farm_pb2.ListBundlesRequest(page_size=_PAGE_SIZE)
        bundles: list[Bundle] = []
        async for page in iterate_pages(self._open.farm.ListBundles, request, server=self.address):
            bundles += [decode.bundle(bundle) for bundle in page.bundles]
        return bundles

    async def add_bundle(self, path: Path, *, on_upload: transfers.Moved | None = None) -> Bundle:
        """Upload a runner bundle and offer it to the devices of its architecture.

        Raises:
            EtfarmError: NOT_A_BUNDLE; PERMISSION_DENIED.
        """
        artifact = await chunks.artifact_of_file(path)
        blobs: dict[str, tuple[Any, transfers.Source]] = {artifact.digest: (artifact, path)}
        await transfers.upload_missing(self._open.artifacts, blobs, server=self.address, on_progress=on_upload)
        request = farm_pb2.AddBundleRequest(digest=artifact.digest)
        return decode.bundle(await self._open.farm.AddBundle(request))

    async def info(self) -> ServerInfo:
        """Return information about the server, including what it is still starting."""
        request = farm_pb2.GetServerInfoRequest()
        return decode.server_info(await self._open.farm.GetServerInfo(request))

    @property
    def _open(self) -> Stubs:
        return self._connection.stubs

    def _not_open(self) -> NotConnected:
        return self._connection.not_open()

    async def _submit(self, spec: job_pb2.JobSpec, parts: SubmissionRequest, on_upload: transfers.Moved | None) -> AsyncJob:
        # Cheap checks come before expensive ones.
        parsed = [read_recipe(recipe) for recipe in parts.listed_recipes]
        for choice in spec.devices:
            selectors.parse(choice.selector)
        # Samples and exports may be larger than memory, so they stay in files until they are sent.
        with tempfile.TemporaryDirectory(prefix="etfarm-submission-", ignore_cleanup_errors=True) as folder:
            submission = await asyncio.to_thread(lambda: parts.gather(spec, parsed, Path(folder)))
            stubs = self._open
            await transfers.upload_missing(stubs.artifacts, submission.blobs, server=stubs.server, on_progress=on_upload)
        request = job_pb2.SubmitJobRequest(request_id=submission.request_id, spec=submission.spec)

        async def submit() -> job_pb2.Job:
            return await stubs.jobs.Submit(request)

        submitting = asyncio.create_task(submit(), name="submit")
        try:
            return AsyncJob(stubs, await asyncio.shield(submitting))
        except asyncio.CancelledError:
            # The server may have created the job although the caller does not know its id: cancel it.
            async with asyncio.timeout(GIVE_UP_S):
                await AsyncJob(stubs, await submitting).cancel()
            raise
