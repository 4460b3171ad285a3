"""`etfarm run --inputs FOLDER` or `--batched`: many samples, their outputs, throughput and a metric."""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import aclosing, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from etfarm.client.cli.connection import Connection
from etfarm.client.cli.files import require_writable
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal import output
from etfarm.client.cli.terminal.progress import Progress, open_progress
from etfarm.client.cli.workflows.job import import_torch
from etfarm.client.datasets import devices as dataset_devices
from etfarm.client.datasets.dataset import Dataset, Options, Result, named
from etfarm.client.datasets.metrics import Mean, Metric, find
from etfarm.client.datasets.outputs import Sink, open_sink
from etfarm.client.datasets.samples import Source, of_batch, of_folder
from etfarm.client.errors import EtfarmError, Interrupted
from etfarm.client.export.spec import ModelSpec
from etfarm.client.formats import units
from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.transport import daemon_thread
from etfarm.wire import report
from etfarm.wire.errors import error_for

SHOWN_FAILURES = 20
"""Maximum number of failed samples that the terminal shows; `--json` has all."""


@dataclass(frozen=True)
class Wanted:
    """The arguments of the command."""

    model: ModelSpec | PreparedModel
    inputs: Path
    batched: bool
    device: str
    devices: int | None
    """Number of devices; all that match when None."""
    options: Options
    output: Path | None
    metric: Metric | None
    connection: Connection
    verbose: bool
    exports: bool
    """Whether the model is eager, so that its export needs torch."""


@dataclass
class Taken:
    """The results of the samples so far, beside the data set's own tally."""

    sink: Sink | None
    metric: Metric | None
    keep_going: bool
    done: int = 0
    means: dict[str, Mean] = field(default_factory=dict)
    failed: list[Result] = field(default_factory=list)

    def take(self, result: Result) -> bool:
        """Write one sample's outputs, update its metric, and return whether to continue."""
        failure = result
        try:
            if result.outputs is not None:
                if self.sink is not None:
                    self.sink.add(result.index, result.name, result.outputs)
                self.done += 1
                if self.metric is not None:
                    # Output of a user's metric must not mix with what the command writes to stdout.
                    with redirect_stdout(sys.stderr):
                        numbers = self.metric(result.inputs, result.outputs.as_dict(), result.index, result.labels)
                    for name, value in numbers.items():
                        self.means.setdefault(name, Mean()).add(value)
                return True
        except EtfarmError as error:
            failure = Result(result.index, result.name, result.device, error=named(error, result.index, result.name))
        self.failed.append(failure)
        return self.keep_going


def source_of(inputs: Path, batched: bool) -> Source:
    """Return the samples of `--inputs`.

    Raises:
        USAGE: it does not exist, or `--batched` is used with a folder.
        EtfarmError: as `of_folder` and `of_batch`.
    """
    if inputs.is_dir():
        if batched:
            raise error_for(
                "USAGE", "--batched requires one .npz; a folder has one file per sample.", "Leave it out.", path=inputs
            )
        return of_folder(inputs)
    if not inputs.is_file():
        raise error_for(
            "USAGE", f"There is no file or folder {inputs}.", f"Paths start at the working folder, {Path.cwd()}.", path=inputs
        )
    return of_batch(inputs)


def metric_of(text: str) -> Metric:
    """Return the metric of `--metric`.

    Raises:
        EtfarmError: as `find`.
    """
    with redirect_stdout(sys.stderr):
        return find(text)


def sink_of(path: Path, inputs: Path) -> Sink:
    """Return the destination of outputs for `-o`.

    Raises:
        USAGE: it cannot be created, or is the folder of the inputs.
    """
    if path.exists() and path.resolve() == inputs.resolve():
        raise error_for("USAGE", f"-o {path} would replace the inputs.", "Name another.", path=path)
    if path.is_dir():
        return open_sink(path)
    if path.exists() and path.suffix.lower() != ".npz":
        raise error_for(
            "USAGE", f"{path} is a file.", "Name a folder for one file per sample, or X.npz for all in one.", path=path
        )
    require_writable(path)
    return open_sink(path)


async def carry_out(wanted: Wanted, outcome: Outcome) -> int:
    """Run the data set, show its results, and return the exit code.

    Raises:
        EtfarmError: it cannot start or continue; finished samples are kept.
        Interrupted: Ctrl-C; finished samples are kept.
    """
    source = source_of(wanted.inputs, wanted.batched)
    sink = sink_of(wanted.output, wanted.inputs) if wanted.output is not None else None
    taken = Taken(sink, wanted.metric, wanted.options.get("keep_going", False))
    dataset: Dataset | None = None
    ended: EtfarmError | None = None
    with open_progress(source.count) as progress:
        options = wanted.options.copy()
        options["on_wait"], options["on_upload"], options["on_status"] = progress.status, progress.moved, progress.status
        if wanted.verbose:
            options["on_log"] = progress.line
        if wanted.exports:
            # Importing torch takes seconds, and so may starting a farm: they run concurrently.
            daemon_thread.start(import_torch)
        try:
            async with wanted.connection.farm(progress.status) as farm:
                dataset = dataset_devices.dataset(
                    farm, wanted.model, source.samples, wanted.device,
                    devices=wanted.devices, labels=wanted.metric is not None, options=options,
                )  # fmt: skip
                outcome.document = partial(_document, dataset, taken, source)
                # Output of a user's factory must not mix with what the command writes to stdout.
                with redirect_stdout(sys.stderr):
                    await _follow(dataset, taken, source, progress)
        except EtfarmError as error:
            ended = error
        except asyncio.CancelledError:
            ended = Interrupted(f"Interrupted after {units.count(taken.done, 'sample')} of {source.count:,}.")
        finally:
            kept = sink.close() if sink is not None else 0
    if dataset is not None and (ended is None or taken.done):
        _show(dataset, taken, source, wanted, kept, to_stderr=outcome.json_file == STDOUT)
    if ended is not None:
        raise ended
    return 1 if taken.failed else 0


async def _follow(dataset: Dataset, taken: Taken, source: Source, progress: Progress) -> None:
    async with aclosing(dataset.results()) as results:
        async for result in results:
            # The metric and the disk take time, and the devices get their next samples meanwhile. A sample is processed as a
            # whole: Ctrl-C waits for it.
            taking = asyncio.create_task(asyncio.to_thread(taken.take, result), name="take a sample")
            try:
                goes_on = await asyncio.shield(taking)
            except asyncio.CancelledError:
                await asyncio.wait([taking])
                raise
            failed = len(taken.failed)
            if failed and taken.failed[-1].index == result.index and failed <= SHOWN_FAILURES:
                progress.line(f"etfarm: {taken.failed[-1].error}")
            progress.advance(result.index + 1, dataset.tally.samples_per_s)
            if not goes_on:
                return


def _error(taken: Taken, source: Source) -> EtfarmError | None:
    """Return the error of the command; None if it succeeded."""
    if not taken.failed:
        return None
    if not taken.keep_going:
        return taken.failed[-1].error
    names = [result.name for result in taken.failed]
    shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    return error_for(
        "SAMPLES_FAILED", f"{len(names)} of {source.count} samples failed: {shown}.", "Each has its error.", failed=len(names)
    )


def _document(dataset: Dataset, taken: Taken, source: Source, error: EtfarmError | None) -> dict[str, Any]:
    """Return etfarm.report/1 without a job, with the results of the data set."""
    tally = dataset.tally
    return {
        **report.document(None, (), error or _error(taken, source)),
        "dataset": {
            "total": source.count,
            "samples": taken.done,
            "failed": [
                {"index": result.index, "name": result.name, "error": report.error_json(result.error)}
                for result in taken.failed
                if result.error is not None
            ],
            "devices": [
                {"id": work.device.id, "name": work.device.name, "samples": work.samples} for work in tally.devices.values()
            ],
            "wall_s": tally.wall_s,
            "samples_per_s": tally.samples_per_s,
            "run_p50_ns": tally.run_p50_ns,
            "busy_share": tally.busy_share,
            "metrics": {
                name: {"mean": mean.value if math.isfinite(mean.value) else None, "count": mean.count}
                for name, mean in taken.means.items()
            },
        },
    }


def _show(dataset: Dataset, taken: Taken, source: Source, wanted: Wanted, kept: int, *, to_stderr: bool) -> None:
    tally = dataset.tally
    of_all = "" if taken.done == source.count else f" of {source.count:,}"
    parts = [
        wanted.model.name if isinstance(wanted.model, PreparedModel) else wanted.model.label,
        f"{taken.done:,}{of_all} samples" if of_all else units.count(taken.done, "sample"),
        f"in {units.clock(tally.wall_s)}",
    ]
    if tally.samples_per_s is not None:
        parts.append(f"{units.significant(tally.samples_per_s)} samples/s")
    if tally.run_p50_ns is not None:
        share = f", {units.percent(tally.busy_share)} of the wall time" if tally.busy_share is not None else ""
        parts.append(f"p50 {units.time(tally.run_p50_ns)} in the program{share}")
    output.show(output.line("  ".join(parts)), to_stderr=to_stderr)
    works = sorted(tally.devices.values(), key=lambda work: work.device.name)
    if len(works) > 1:
        rows = [
            (work.device.name, f"{work.samples:,}", units.significant(work.samples / tally.wall_s) if tally.wall_s else "-")
            for work in works
        ]
        output.show_table(("DEVICE", "SAMPLES", "SAMPLES/S"), rows, right=("SAMPLES", "SAMPLES/S"), to_stderr=to_stderr)
    for work in works:
        if work.lost is not None:
            output.show(output.line(f"{work.device.name} was lost: {work.lost}", style="yellow"), to_stderr=to_stderr)
    if taken.means:
        rows_of = [(name, f"{mean.value:.6g}", f"{mean.count:,}") for name, mean in taken.means.items()]
        output.show_table(("METRIC", "MEAN", "SAMPLES"), rows_of, right=("MEAN", "SAMPLES"), to_stderr=to_stderr)
    if taken.failed:
        remedy = "Each is named above." if taken.keep_going else "--keep-going continues with the others."
        output.show(output.line(f"{units.count(len(taken.failed), 'sample')} failed. {remedy}", style="red"), to_stderr=to_stderr)
    if wanted.output is not None and kept:
        output.show(output.line(f"{wanted.output}: {units.count(kept, 'sample')}", style="dim"), to_stderr=to_stderr)
