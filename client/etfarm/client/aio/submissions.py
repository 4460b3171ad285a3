"""The part of `AsyncFarm` that submits jobs and opens sessions.

Its methods import what prepares models and runs sessions: most commands need none of it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.aio.connected import AsyncConnected
from etfarm.client.submit.bench_options import BenchOptions
from etfarm.client.submit.compile_options import CompileOptions
from etfarm.client.submit.options import (
    chosen_reservation,
    device_choices,
    one_spelling,
    only_device,
    takes_keywords_of,
    to_list,
)
from etfarm.client.submit.recipes import only_recipe, read_recipe
from etfarm.client.submit.run_options import RunOptions
from etfarm.client.transport import transfers
from etfarm.client.transport.daemon_thread import in_thread
from etfarm.v1 import compile_pb2, job_pb2, session_pb2
from etfarm.wire import selectors
from etfarm.wire.names import PROTOCOL_VERSION

if TYPE_CHECKING:
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.sessions.open_calls import Line, TextCallback
    from etfarm.client.sessions.program import SharedModel
    from etfarm.client.sessions.session import AsyncSession
    from etfarm.client.submit.job_options import DeviceJobOptions, JobOptions
    from etfarm.client.submit.preparation import ExampleInputs, Model
    from etfarm.client.submit.prepared import PreparedModel
    from etfarm.client.submit.recipes import Recipes
    from etfarm.client.submit.submission import Submission, SubmissionRequest

GIVE_UP_S = 5.0
"""Seconds that a cancelled submission may take to cancel the job that it created."""


class AsyncSubmissions(AsyncConnected):
    """Submissions to a farm."""

    @takes_keywords_of(BenchOptions)
    async def bench(self, model: Model | Sequence[Model], options: BenchOptions) -> AsyncJob:
        """Submit a benchmark.

        One cell is created for each combination of model, recipe, device choice, method and thread count.

        Args:
            model: a model, or a list of models, of any kind in `etfarm.client.submit.preparation.Model`; exporting an
                eager module takes seconds.
            recipes: names with arguments, several joined by +, or TOML files, as on the command line; `recipe` is the
                same.
            devices: selectors; each is one cell on one matching device, or one per match with `all_devices`; `device` is
                the same.
            example_inputs: arguments of `forward` for an nn.Module; for a dict of modules, a dict by method.
            calibration: samples for static quantization instead of the models' own: any type in
                `etfarm.client.submit.calibration.Calibration`, such as an .npz or a folder of them; with `batched`, axis
                0 of every array indexes the samples.
            data: named data files (.ptd) of a ready program.
            inputs: inputs of the programs, such as an .npz, or a folder of them, of which the first one is timed and accuracy
                is over all; the models' own example inputs when None.
            numerics: compare the outputs of each operator too (`report.numeric_gap`): in addition to the timed program,
                one with a delegate per operator is compiled and run once. Not available for ready programs.
            repeat: measure in that many fresh processes, one after the other. `report.runs` has each of them, and
                `report.run_spread` how much their medians vary, which a comparison of two reports needs.
            generate: for language models, a number of tokens to generate, or `Generate` with prompt lengths and depths:
                measures time to the first token and the rates of prefill and decode (`report.generation`).
            interleave: measure the candidates of each device choice, method and thread count in turns, on one device; at
                least two. `report.interleaved` then compares each with the first, round by round.
            notify: addresses that get a notice when the job has ended or a gate on it failed; `webhooks.secret` verifies its
                signature.
            options: all other options of `etfarm.client.submit.bench_options.BenchOptions`.

        Raises:
            EtfarmError: a model, recipe, selector or input is wrong, or the server refuses the job.
        """
        return await self.submit_bench(model, options)

    async def submit_bench(self, model: Model | Sequence[Model], options: BenchOptions) -> AsyncJob:
        """Submit a benchmark with one options object; otherwise the same as `bench`."""
        return await self._submit_to_devices(model, options)

    async def inspect(self, path: str | Path, *, name: str = "") -> PreparedModel:
        """Upload a .pt2 or .pte, and return it as a model to submit, as the farm describes it.

        Unlike `etfarm.client.submit.preparation.prepare`, this process does not read into the file, so it may be anybody's.

        Args:
            path: a file whose name ends with .pt2 or .pte.
            name: the model's name; the file's when empty.

        Raises:
            EtfarmError: the file is not what its name says, or its loading could execute code; see CompileService.Inspect and
                ArtifactService.Upload.
        """
        from etfarm.client.submit.submission import inspect_on_farm

        return await inspect_on_farm(self._open, Path(path), name)

    async def measure_again(self, job_id: str, cell: str) -> AsyncJob:
        """Submit a finished cell's measurement again: the same compiled program on the same device, as a job of its own.

        Args:
            job_id: the id of a job that was not interleaved.
            cell: the id of one of its cells, which ran on a device.

        Raises:
            EtfarmError: there is no such cell, or the server refuses the job.
        """
        from etfarm.client.jobs.job import AsyncJob
        from etfarm.client.submit.submission import Submission

        stubs = self._open
        job = AsyncJob(stubs, await stubs.jobs.Get(job_pb2.GetJobRequest(job_id=job_id)))
        return await self._submit_spec(Submission(job._spec_of(cell)))

    @takes_keywords_of(CompileOptions)
    async def compile(self, model: Model | Sequence[Model], options: CompileOptions) -> AsyncJob:
        """Submit a compilation; `AsyncJob.save_program` downloads the result.

        Args:
            stop_after: the last stage to run, such as "QUANTIZE"; `AsyncJob.save_stage_files` downloads its output. The
                job produces a program when empty.
            on_status: called with one sentence about slow work before the job runs, such as an export.
            model, recipes, recipe, example_inputs, calibration, batched: as in `bench`.
            options: all other options of `etfarm.client.submit.compile_options.CompileOptions`.

        Raises:
            EtfarmError: a model or recipe is wrong, or the server refuses the job.
        """
        return await self.submit_compile(model, options)

    async def submit_compile(self, model: Model | Sequence[Model], options: CompileOptions) -> AsyncJob:
        """Submit a compilation with one options object; otherwise the same as `compile`."""
        from etfarm.client.submit.submission import SubmissionRequest
        from etfarm.wire.stages import check_stop_after

        parsed = [read_recipe(each) for each in options.chosen_recipes]
        if options.stop_after:
            for each in parsed:
                check_stop_after(each, options.stop_after)
        request = SubmissionRequest(model, parsed, options.example_inputs, options.calibration, options.batched)
        return await self._submit(options, request)

    @takes_keywords_of(RunOptions)
    async def run(self, model: Model, options: RunOptions) -> AsyncJob:
        """Submit one run without a measurement; `AsyncJob.outputs` downloads the program's outputs.

        Args:
            device: a selector; the run takes one matching device. `devices` is the same.
            model, recipes, recipe, example_inputs, calibration, batched, data, inputs: as in `bench`.
            options: all other options of `etfarm.client.submit.run_options.RunOptions`.

        Raises:
            EtfarmError: the model, selector or inputs are wrong, or the server refuses the job.
        """
        return await self.submit_run(model, options)

    async def submit_run(self, model: Model, options: RunOptions) -> AsyncJob:
        """Submit one run with one options object; otherwise the same as `run`."""
        return await self._submit_to_devices(model, options)

    def session(
        self,
        program: Model | SharedModel,
        device: str | Sequence[str] | None = None,
        *,
        devices: str | Sequence[str] | None = None,
        recipe: Recipes | None = None,
        recipes: Recipes | None = None,
        example_inputs: ExampleInputs | None = None,
        data: Sequence[str | Path] = (),
        methods: str | Sequence[str] | None = None,
        method: str | Sequence[str] | None = None,
        threads: int | None = None,
        cores: str = "",
        idle_timeout_s: float | None = None,
        priority: int = 0,
        reservation: str | None = None,
        on_wait: TextCallback | None = None,
        on_log: TextCallback | None = None,
        on_upload: transfers.Moved | None = None,
        on_status: TextCallback | None = None,
    ) -> AsyncSession:
        """Return a session: a device used by this program alone, with `program` loaded.

        The session starts when it is entered with `async with`.

        Args:
            program: a .pte, or any other model that `bench` takes, which is first compiled with `recipe`.
            device: a selector; while all matching devices are busy, the session waits in the queue. `devices` is the same.
            recipe: a recipe, as in `bench`; `recipes` is the same.
            methods: methods to load at the start; others are loaded at their first call. `method` is the same.
            idle_timeout_s: seconds without a call after which the session ends; 600 when None.
            on_wait: called with what the session waits for, whenever that changes.
            on_log: called with each line that the runner prints.
            example_inputs, data, threads, cores, priority, reservation, on_upload, on_status: as in `bench`.

        Raises:
            UserError: `device` is not a selector. Entering the session raises the errors of SessionService.Open and of
                compiling.
        """
        from etfarm.client.sessions.open_calls import Line
        from etfarm.client.sessions.program import ServedModel, SharedModel
        from etfarm.client.sessions.session import AsyncSession

        selector = only_device(device, devices)
        selectors.parse(selector)
        request = session_pb2.OpenSessionRequest(
            selector=selector,
            methods=to_list(one_spelling("method", method, "methods", methods, ())),
            threads=threads,
            cores=cores,
            idle_timeout_s=idle_timeout_s,
            priority=priority,
            reservation_id=chosen_reservation(reservation),
        )
        # What the server checks of a job before its model is exported.
        spec = job_pb2.JobSpec(
            devices=device_choices(selector, all_devices=False),
            methods=request.methods,
            threads=[] if threads is None else [threads],
            measurement=job_pb2.Measurement(cores=cores) if cores else None,
            priority=priority,
            reservation_id=request.reservation_id,
        )
        served: ServedModel | SharedModel
        chosen = only_recipe(recipe, recipes)
        served = program if isinstance(program, SharedModel) else ServedModel(program, chosen, example_inputs, data)

        async def connect(_: AsyncExitStack) -> Line:
            stubs = self._open.lasting()
            stored = await served.on_farm(stubs, spec, self.compile, on_upload=on_upload, on_status=on_status)
            if on_status is not None:
                on_status("Waiting for a device.")
            request.program.CopyFrom(stored.program)

            async def find_operators() -> Mapping[str, compile_pb2.LocatedOperators]:
                if not stored.compilation_key:
                    return {}
                compiled = await stubs.compiler.GetCompilation(compile_pb2.GetCompilationRequest(key=stored.compilation_key))
                return compiled.located_operators

            return Line(stubs, request, stored.names, find_operators)

        return AsyncSession(connect, on_wait=on_wait, on_log=on_log)

    async def _submit_to_devices(self, model: Model | Sequence[Model], options: DeviceJobOptions) -> AsyncJob:
        from etfarm.client.submit.submission import SubmissionRequest

        request = SubmissionRequest(
            model, options.chosen_recipes, options.example_inputs, options.calibration, options.batched, options.data,
            options.inputs,
        )  # fmt: skip
        return await self._submit(options, request)

    async def _submit(self, options: JobOptions, parts: SubmissionRequest) -> AsyncJob:
        from etfarm.client.submit.early_checks import require_accepted

        spec, say = options.job_spec(), options.on_status
        # Cheap checks come before expensive ones.
        parsed = [read_recipe(recipe) for recipe in parts.listed_recipes]
        for choice in spec.devices:
            selectors.parse(choice.selector)
        stubs = self._open.lasting()
        await require_accepted(stubs, spec, parts.models, parsed)
        # Samples and exports may be larger than memory, so they stay in files until they are sent. A thread that Ctrl-C leaves
        # behind may still write there while the folder is removed.
        with tempfile.TemporaryDirectory(prefix="etfarm-submission-", ignore_cleanup_errors=True) as folder:
            submission = await in_thread(lambda: parts.gather(spec, parsed, Path(folder), say))
            if say is not None:
                say("Submitting.")
            await transfers.upload_missing(stubs, submission.blobs, on_progress=options.on_upload)
        return await self._submit_spec(submission)

    async def _submit_spec(self, submission: Submission) -> AsyncJob:
        """Submit a job whose artifacts the farm has."""
        from etfarm.client.jobs.job import AsyncJob

        stubs = self._open.lasting()
        request = job_pb2.SubmitJobRequest(
            request_id=submission.request_id, spec=submission.spec, protocol_version=PROTOCOL_VERSION
        )

        async def submit() -> job_pb2.Job:
            return await stubs.jobs.Submit(request)

        submitting = asyncio.create_task(submit(), name="submit")
        try:
            return AsyncJob(stubs, await asyncio.shield(submitting), submission.names)
        except asyncio.CancelledError:
            # The server may have created the job although the caller does not know its id: cancel it.
            async with asyncio.timeout(GIVE_UP_S):
                await AsyncJob(stubs, await submitting).cancel()
            raise
