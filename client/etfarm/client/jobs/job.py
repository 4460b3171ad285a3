"""A submitted job: watching it across broken streams, cancelling it, and reading its result."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from etfarm.client import reports
from etfarm.client.errors import OutputUnwritable
from etfarm.client.jobs import raw_files, series
from etfarm.client.jobs.file_names import data_file_name, method_file, safe_name
from etfarm.client.models import Cell, CellState, Event, JobInfo, JobState, LogLine
from etfarm.client.submit.names_file import write_names
from etfarm.client.submit.value_names import ValueNames
from etfarm.client.transport import decode, transfers
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.paging import iterate_pages
from etfarm.v1 import common_pb2, job_pb2, report_pb2, webhook_pb2
from etfarm.wire import report, tensors
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import RETRY_LABEL

if TYPE_CHECKING:
    from etfarm.client.reports import JobResult
    from etfarm.client.transport.stubs import Stubs


class AsyncJob:
    """A job on the farm.

    It continues whether or not a client watches it.
    """

    def __init__(self, stubs: Stubs, job: job_pb2.Job, names: ValueNames | None = None) -> None:
        """Wrap a job message; `AsyncFarm` creates instances."""
        self._farm = stubs
        self._job = job
        self._names = names or ValueNames()

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r}, {self.state})"

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def input_names(self) -> Mapping[str, Sequence[str]]:
        """Input names of the model by method, in flattened order; empty for several models and jobs submitted elsewhere."""
        return self._names.inputs

    @property
    def output_names(self) -> Mapping[str, Sequence[str]]:
        """Output names of the model by method, in flattened order; empty for several models and jobs submitted elsewhere."""
        return self._names.outputs

    @property
    def state(self) -> JobState:
        """The job's state as last read from the server."""
        return decode.job_state(self._job.state)

    @property
    def info(self) -> JobInfo:
        """The job and its cells as last read from the server."""
        return decoded(JobInfo, self._job)

    async def refresh(self) -> JobInfo:
        """Read the job's current state from the server.

        Raises:
            EtfarmError: JOB_NOT_FOUND; SERVER_UNREACHABLE.
        """
        request = job_pb2.GetJobRequest(job_id=self.id)
        self._job = await self._stubs.jobs.Get(request)
        return self.info

    def _spec_of(self, cell: str) -> job_pb2.JobSpec:
        """Return the spec of a job that has only one of this job's cells, on the device that it ran on.

        Raises:
            CELL_NOT_FOUND: the job has no such cell, or it never ran.
        """
        known = next((each for each in self._job.cells if each.id == cell and each.attempts), None)
        if known is None:
            raise error_for(
                "CELL_NOT_FOUND", f"Job {self.id} has no cell {cell!r} that ran on a device.", "`etfarm report show` lists them."
            )
        spec = job_pb2.JobSpec()
        spec.CopyFrom(self._job.spec)
        candidate = self._job.spec.candidates[known.candidate_index]
        # The name stays with this job alone, so that it keeps resolving to it.
        for name in ("name", "candidates", "devices", "methods", "threads", "no_cache", "notify_urls", "deadline_time"):
            spec.ClearField(name)
        spec.labels[RETRY_LABEL] = self.id
        spec.candidates.append(candidate)
        spec.devices.add(selector=f"id={known.attempts[-1].device_id}")
        if not spec.measurement.HasField("generation"):  # which chooses its methods itself
            spec.methods.append(known.method)
        if known.HasField("threads"):
            spec.threads.append(known.threads)
        return spec

    async def retry(self) -> AsyncJob:
        """Submit the failed cells as a new job with the label `retry_of`, this job's id, and without a name.

        Raises:
            EtfarmError: NOTHING_TO_RETRY, JOB_LIVE; those of a submission.
        """
        request = job_pb2.RetryJobRequest(job_id=self.id, request_id=str(uuid.uuid4()))
        return AsyncJob(self._stubs, await self._stubs.jobs.Retry(request), self._names)

    async def report_gate(self, gate: str, failures: Sequence[str]) -> None:
        """Report that the job's result does not pass a gate, to its `notify` addresses and the farm's webhooks.

        Args:
            gate: what was required, such as `--gate 3%`.
            failures: what does not meet it, one sentence each; the first 20 are sent.

        Raises:
            EtfarmError: NOT_YOURS, TOO_MANY_NOTICES.
        """
        cut = [failure[:500] for failure in failures[:20]]
        request = webhook_pb2.ReportGateRequest(job_id=self.id, gate=gate[:500], failures=cut)
        await self._stubs.webhooks.ReportGate(request)

    async def watch(self, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events after the sequence number `after`, then new events until the job's state is final.

        A broken stream is resumed after the last sequence number: each journaled event is yielded exactly once.

        Raises:
            EtfarmError: SEQUENCE_UNKNOWN; SERVER_UNREACHABLE if the server does not come back.
        """
        backoff = self._stubs.patience.backoff()
        while True:
            try:
                request = job_pb2.WatchJobRequest(job_id=self.id, after_sequence=after)
                async for message in self._stubs.jobs.Watch(request):
                    backoff.reset()
                    if message.HasField("sequence"):
                        if message.sequence <= after:
                            continue
                        after = message.sequence
                    self._note(message)
                    if (event := decode.event(message)) is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                await backoff.after(error)

    async def wait(self, *, progress: bool = False) -> JobState:
        """Wait until the job's state is final and return it.

        Args:
            progress: show a progress bar, in a notebook or on a terminal.

        Raises:
            EtfarmError: as `watch`.
        """
        if not self.state.is_terminal:
            if progress:
                await self._show_progress()
            else:
                async for _ in self.watch():
                    pass
            await self.refresh()
        return self.state

    async def result(self, *, progress: bool = False) -> JobResult:
        """Wait until the job's state is final and return its reports, including those of failed cells.

        Args:
            progress: as in `wait`.

        Raises:
            EtfarmError: as `watch`. A failed cell raises only on `JobResult.report`.
        """
        await self.wait(progress=progress)
        return reports.JobResult.from_dict(await self.document())

    async def document(self, error: EtfarmError | None = None, *, with_series: bool = True) -> dict[str, Any]:
        """Return the current document etfarm.report/1, without the reports of unfinished cells.

        Args:
            error: the error that ended the caller.
            with_series: whether to download the samples and the times of traced iterations; otherwise `samples_ns` is empty
                and `times_ns` is null.

        Raises:
            REPORT_INCOMPLETE: a report lacks what identifies it.
        """
        reports = await self._reports()
        for each in reports:
            if not each.id or not each.state:
                raise _incomplete(self.id, each)
        document = report.document(self._job, reports, error)
        if with_series:
            document["reports"] = await series.documents(self._stubs, reports)
        return document

    def document_without_reports(self, error: EtfarmError | None) -> dict[str, Any]:
        """Return the document etfarm.report/1 when the server cannot be reached any more."""
        return report.document(self._job, (), error)

    async def cancel(self) -> JobState:
        """Cancel the unfinished cells and return the job's state once all cells are final.

        Raises:
            EtfarmError: NOT_YOURS; SERVER_UNREACHABLE.
        """
        request = job_pb2.CancelJobRequest(job_id=self.id)
        self._job = await self._stubs.jobs.Cancel(request)
        return self.state

    async def logs(self, *, cell: int | None = None, follow: bool = False) -> AsyncIterator[LogLine]:
        """Yield the lines that compilers and runners printed, in order of arrival.

        With `follow`, continue until the job's state is final.

        Args:
            cell: index of the only cell to return lines of.

        Raises:
            CELL_NOT_FOUND: the cell does not exist.
            EtfarmError: SERVER_UNREACHABLE.
        """
        cell_id = self._cell(cell).id if cell is not None else ""
        seen, backoff = 0, self._stubs.patience.backoff()
        while True:
            try:
                request = job_pb2.TailJobLogRequest(job_id=self.id, cell_id=cell_id, follow=follow)
                async for message in self._stubs.jobs.TailLog(request):
                    backoff.reset()
                    if message.number > seen:
                        seen = message.number
                        yield decoded(LogLine, message)
                return
            except grpc.aio.AioRpcError as error:
                await backoff.after(error)

    async def outputs(self, cell: int = 0) -> list[tensors.Value]:
        """Return the outputs of a cell's program in flattened order, with the names of `output_names`.

        `etfarm.wire.tensors.to_array` converts tensors to arrays.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED: the cell does not exist, or has no outputs.
        """
        artifact = self._produced(cell, "outputs")
        values = tensors.decode(await transfers.download_bytes(self._stubs, artifact))
        return self._names.name_outputs(self._cell(cell).method, values)

    async def save_program(self, path: str | Path, cell: int = 0, *, on_progress: transfers.Moved | None = None) -> list[Path]:
        """Write a cell's .pte to `path`, and its named data files beside it under the names that the program refers to.

        The names of its inputs and outputs, if the job has them, are written to `x.inputs.json` beside `x.pte`, where runs and
        sessions find them.

        Return the written files, `path` first.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED, OutputUnwritable: the cell or program does not exist, or a file cannot be written.
        """
        path = Path(path)
        program = self._produced(cell, "program")
        await transfers.download_file(self._stubs, program.pte, path, on_progress=on_progress)
        written = [path]
        for name, artifact in sorted(program.data.items()):
            file = path.with_name(data_file_name(name))
            await transfers.download_file(self._stubs, artifact, file)
            written.append(file)
        if path.is_file() and self._names:
            written.append(write_names(path, self._names))
        return written

    async def save_exported_programs(self, path: str | Path, cell: int = 0) -> list[Path]:
        """Write each method's exported program as it was lowered.

        The file is `path`; with several methods, `x.METHOD.pt2` for each.

        Return the written files, by method.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED, OutputUnwritable: the cell or program does not exist, or a file cannot be written.
        """
        path = Path(path)
        programs = await self._files(cell, "exported_programs")
        files = {name: path if len(programs) == 1 else method_file(path, name) for name in programs}
        return await self._download(programs, files)

    async def stage_files(self, cell: int = 0) -> list[str]:
        """Return the file names of the stage that the job stopped after: METHOD.pt2, METHOD.txt, delegation.csv.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED: the cell does not exist, or the job produced a program.
        """
        return list(await self._files(cell, "stage_files"))

    async def save_stage_files(
        self, folder: str | Path, cell: int = 0, *, to: Mapping[str, str | Path] | None = None
    ) -> list[Path]:
        """Write the files of the stage that the job stopped after to `folder`, which is created.

        Args:
            to: paths by file name (see `stage_files`); only these files are written, to these paths.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED, OutputUnwritable: the cell or a file does not exist, or a file cannot be written.
        """
        folder = Path(folder)
        there = await self._files(cell, "stage_files")
        if to is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputUnwritable(
                    f"{folder} cannot be created: {error.strerror}.", "Give another folder.", path=folder
                ) from None
            to = {name: folder / safe_name(name) for name in there}
        for name in to:
            if name not in there:
                raise error_for(
                    "NOT_PRODUCED", f"The stage wrote no {name}; it wrote {', '.join(there)}.", job=self.id, cell=cell
                )
        return await self._download({name: there[name] for name in to}, {name: Path(path) for name, path in to.items()})

    async def save_etrecord(self, path: str | Path, cell: int = 0) -> Path:
        """Write a cell's ETRecord to `path`, and return the path.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            CELL_NOT_FOUND, NOT_PRODUCED, OutputUnwritable: the cell or ETRecord does not exist, or `path` cannot be
                written.
        """
        artifact: common_pb2.Artifact = self._produced(cell, "etrecord")
        await transfers.download_file(self._stubs, artifact, Path(path))
        return Path(path)

    async def save_raw_files(self, folder: str | Path, cell: int = 0) -> list[Path]:
        """Write the raw data of a cell's report to `folder`, which is created.

        That is its program, ETRecord, ETDump, inputs, outputs and values of the numerics pass, as far as the cell has
        them, with a script that opens them in ExecuTorch's Inspector.

        Return the written files, README.txt first.

        Raises:
            CELL_NOT_FOUND, NOT_PRODUCED, OutputUnwritable: the cell or report does not exist, or a file cannot be written.
            EtfarmError: a file was removed from the store; SERVER_UNREACHABLE.
        """
        message = self._cell(cell)
        for entry in await self._reports(message.id):
            return await raw_files.save(self._stubs, self._job, message, entry, Path(folder))
        raise error_for(
            "NOT_PRODUCED",
            f"Cell {cell} of job {self.id} has no report: it is {decoded(Cell, message).state}.",
            job=self.id,
            cell=cell,
        )

    async def _show_progress(self) -> None:
        """Show a progress bar until the job's state is final."""
        from etfarm.client.jobs.progress_bar import JobProgress, open_bar

        progress = JobProgress(self.info)
        with open_bar(progress) as bar:
            async for event in self.watch():
                progress.observe(event)
                bar.show(progress)

    async def _files(self, cell: int, what: str) -> dict[str, common_pb2.Artifact]:
        """Return the artifacts of a map in the cell's report, by key."""
        message = self._cell(cell)
        if (error := decoded(Cell, message).error) is not None:
            raise error
        for entry in await self._reports(message.id):
            artifacts = getattr(entry.compile.compilation, what)
            if artifacts:
                return dict(sorted(artifacts.items()))
        raise error_for("NOT_PRODUCED", f"Cell {cell} of job {self.id} has no {what.replace('_', ' ')}.", job=self.id, cell=cell)

    async def _reports(self, cell_id: str = "") -> list[report_pb2.Report]:
        """Return all existing reports of the job, or those of one cell."""
        request = report_pb2.GetReportsRequest(job_id=self.id, cell=cell_id)
        return [
            each
            async for page in iterate_pages(self._stubs.reports.Get, request, server=self._stubs.server)
            for each in page.reports
        ]

    async def _download(self, artifacts: Mapping[str, common_pb2.Artifact], files: Mapping[str, Path]) -> list[Path]:
        for name, artifact in artifacts.items():
            await transfers.download_file(self._stubs, artifact, files[name])
        return [files[name] for name in artifacts]

    @cached_property
    def _stubs(self) -> Stubs:
        return self._farm.lasting(self._how_to_return)

    def _how_to_return(self) -> str:
        """Return what to do if the server does not come back."""
        state = "has ended" if self.state.is_terminal else "goes on"
        return f"Job {self.id} {state}: once the server is back, `etfarm jobs watch {self.id}` shows it."

    def _note(self, message: job_pb2.JobEvent) -> None:
        """Update `info` from an event."""
        kind = message.WhichOneof("event")
        if kind == "progress":
            for known in self._job.cells:
                if known.id == message.progress.cell_id and not message.progress.HasField("duration_ms"):
                    known.phase = message.progress.phase
        if not message.HasField("sequence"):
            return
        self._job.state = message.job_state
        if kind == "cell":
            for known in self._job.cells:
                if known.id == message.cell.id:
                    known.CopyFrom(message.cell)
        elif kind == "job" and message.job.HasField("end_time"):
            self._job.end_time.CopyFrom(message.job.end_time)

    def _cell(self, index: int) -> job_pb2.Cell:
        for cell in self._job.cells:
            if cell.index == index:
                return cell
        raise error_for(
            "CELL_NOT_FOUND", f"Job {self.id} has no cell {index}.", f"It has {len(self._job.cells)}.", job=self.id, cell=index
        )

    def _produced(self, index: int, what: str) -> Any:
        cell = self._cell(index)
        known = decoded(Cell, cell)
        if known.error is not None:
            raise known.error
        if not cell.HasField(what):  # type: ignore[arg-type]
            is_live = not CellState(known.state).is_terminal
            why = "it has not reached that stage" if is_live else "it produced none"
            remedy = "Wait for the job first: job.result()." if is_live else ""
            raise error_for(
                "NOT_PRODUCED", f"Cell {index} of job {self.id} has no {what}: {why}.", remedy, job=self.id, cell=index
            )
        return getattr(cell, what)


def _incomplete(job: str, incomplete: report_pb2.Report) -> EtfarmError:
    which, lacking = (f"Report {incomplete.id}", "state") if incomplete.id else ("A report", "id")
    return error_for(
        "REPORT_INCOMPLETE",
        f"{which} of job {job} has no {lacking}: what the server's database stores of it is damaged.",
        f"Remove the job with `etfarm jobs delete {job}`, and submit it again. An admin finds further damaged values with "
        "`etfarm artifacts verify`.",
        job=job, report=incomplete.id,
    )  # fmt: skip
