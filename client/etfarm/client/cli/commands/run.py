"""`etfarm run`: a program's outputs on a device for the user's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.arguments import (
    needs_compiler,
    needs_export,
    prepare_archives,
    report_generated_inputs,
    report_random_weights,
    require_data_program,
    require_file,
)
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.files import require_writable
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.wire.errors import error_for
from etfarm.wire.tensors import Scalar, Tensor, Value

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm


def main(argv: list[str]) -> int:
    """Run `etfarm run`."""
    return execute(run, argv, "run")


def run(
    outcome: Outcome,
    connection: Connection,
    model: options.ProgramOrModel,
    recipe: options.RecipeOfModel = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="PATH", help="An .npz, keys by argument name or position, prefix METHOD/; a folder: a data set."
        ),
    ] = None,
    batched: Annotated[bool, typer.Option("--batched", help="Axis 0 of every array of --inputs is the sample axis.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PATH", help="Output file X.npz, or a folder for a data set."),
    ] = None,
    device: options.OneDevice = "",
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, max=10_000, help="Split a data set over N equal devices. [1]")
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Split it over all that match.")] = False,
    mixed: Annotated[bool, typer.Option("--mixed", help="They may differ in arch and soc.")] = False,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="M", help="top1, an installed metric, file.py:function or package.module:function."),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a sample that failed.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Load the program again for each sample, without its state.")] = False,
    method: Annotated[str, typer.Option("--method", metavar="M", help="The method to run. [forward, or the only one]")] = "",
    threads: options.Threads = None,
    data: options.Data = None,
    keep_mutations: options.KeepMutations = False,
    name: options.Name = "",
    timeout: options.Timeout = None,
    reservation: options.Reservation = None,
    notify: options.Notify = None,
    deadline: options.Deadline = None,
    max_wait: options.MaxWait = None,
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
) -> int:
    """Run a program once on a device and fetch its outputs; or a data set, one sample after the other.

    A data set is a folder with an .npz a sample, or --batched. What a program keeps in its state stays from sample to sample.
    """
    outcome.takes_verbose(verbose)
    outcome.goes_to(json)

    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe
    from etfarm.wire import selectors

    due, longest_wait_s = options.deadline_of(deadline), None if max_wait is None else options.seconds_of("--max-wait", max_wait)
    read = read_recipe(DEFAULT_RECIPE if recipe is None else recipe)
    selectors.parse(device)
    spec = resolve(model)
    if recipe is not None and isinstance(spec, PteFile):
        raise error_for("USAGE", "--recipe cannot be combined with a .pte, which is already compiled.", "Leave --recipe out.")
    require_data_program(data or (), [spec])
    if keep_mutations:
        (spec,) = options.keeping_mutations([spec])
    (source,) = prepare_archives([spec], [read])
    report_random_weights([spec])
    if is_dataset(
        inputs, batched, {"--devices": devices, "--all-devices": all_devices, "--mixed": mixed, "--metric": metric,
        "--keep-going": keep_going, "--reset": reset},
    ):  # fmt: skip
        assert inputs is not None
        if name:
            raise error_for("USAGE", "--name applies to a job, and a data set is not a job.", "Leave it out.")
        if notify:
            raise error_for("USAGE", "--notify applies to a job, and a data set is not a job.", "Leave it out.")
        if deadline is not None or max_wait is not None:
            raise error_for("USAGE", "--deadline and --max-wait apply to a job, and a data set is not a job.", "Leave them out.")
        if devices is not None and all_devices:
            raise error_for("USAGE", "--devices and --all-devices cannot be combined.", "Give one of them.")
        from etfarm.client.cli.workflows import dataset
        from etfarm.client.datasets.dataset import Options

        chosen: Options = {
            "method": method, "threads": threads, "timeout_s": timeout, "data": data or (), "mixed": mixed,
            "keep_going": keep_going, "reset": reset, "recipe": read, "reservation": reservation,
        }  # fmt: skip
        score = dataset.metric_of(metric) if metric is not None else None
        wanted = dataset.Wanted(
            source, inputs, batched, device, None if all_devices else devices or 1, chosen, output, score,
            connection, verbose, needs_export([source]),
        )  # fmt: skip
        return run_async(lambda: dataset.carry_out(wanted, outcome), outcome)
    if inputs is not None:
        require_file(inputs)
    if output is not None:
        require_npz(output)
        require_writable(output)
    report_generated_inputs([spec], inputs)

    from etfarm.client.cli.terminal.display import Display
    from etfarm.client.cli.views.results import print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import JobResult, JobState
    from etfarm.client.submit.run_options import RunOptions

    one_run = RunOptions(
        [read],
        device,
        data=data or (),
        inputs=inputs,
        methods=[method] if method else (),
        threads=threads,
        name=name,
        timeout_s=timeout,
        reservation=reservation,
        notify=notify or (),
        deadline=due,
        max_wait_s=longest_wait_s,
    )

    async def submit(farm: AsyncFarm, display: Display) -> AsyncJob:
        return await farm.submit_run(source, replace(one_run, on_upload=display.moved, on_status=display.status))

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        values = await job.outputs() if result.state is JobState.SUCCEEDED else []
        display.stop()
        print_result(result, to_stderr=json == STDOUT)
        if result.state is JobState.SUCCEEDED:
            print_outputs(values, to_stderr=json == STDOUT)
            if output is not None:
                from etfarm.client.submit import npz

                method_run, names = job.info.cells[0].method, [value.name for value in values]
                npz.write_outputs(output, {method_run: values}, {method_run: names})
                print_written(output, values, to_stderr=json == STDOUT)

    async def carry_out() -> int:
        task = flow.Task(
            submit, finish, connection, exports=needs_export([source]), compiles=needs_compiler([source]), verbose=verbose
        )
        _, result = await flow.carry_out(task, outcome)
        return 0 if result is not None and result.state is JobState.SUCCEEDED else 1

    return run_async(carry_out, outcome)


def require_npz(path: Path) -> None:
    """Check the name of an output file: a file such as x.npy would contain an .npz.

    Raises:
        USAGE: its name has another ending.
    """
    if path.suffix.lower() not in ("", ".npz"):
        raise error_for(
            "USAGE", f"-o writes an .npz, and {path} has another ending.", f"Name it {path.with_suffix('.npz')}.", path=path
        )


def is_dataset(inputs: Path | None, batched: bool, options_of_one: Mapping[str, object]) -> bool:
    """Return whether `--inputs` is a data set; for a single run, refuse options that need a data set.

    Raises:
        USAGE: `--batched` without `--inputs`, or a set option of `options_of_one` without a data set.
    """
    if inputs is None and batched:
        raise error_for("USAGE", "--batched requires --inputs.", "Give --inputs X.npz too.")
    if batched or (inputs is not None and inputs.is_dir()):
        return True
    for option, value in options_of_one.items():
        if value:
            raise error_for(
                "USAGE", f"{option} requires a data set.", "Give --inputs FOLDER, or --inputs X.npz --batched.", option=option
            )
    return False


def print_outputs(values: Sequence[Value], *, to_stderr: bool) -> None:
    """Print the outputs, one per line: name, dtype and shape, and the first numbers."""
    from etfarm.client.cli.terminal import output
    from etfarm.wire.tensors import to_array

    rows = []
    for place, value in enumerate(values):
        if isinstance(value, Scalar):
            rows.append((value.name or str(place), type_of(value), str(value.value)))
        elif isinstance(value, Tensor):
            flat = to_array(value).reshape(-1)[:6].tolist()
            more = ", ..." if len(flat) == 6 else ""
            shown = ", ".join(f"{number:.5g}" if isinstance(number, float) else str(number) for number in flat)
            rows.append((value.name or str(place), type_of(value), f"{shown}{more}"))
    output.show_table(("OUTPUT", "TYPE", "VALUES"), rows, shrink=("VALUES",), to_stderr=to_stderr)


def type_of(value: Value) -> str:
    """Return a value's type as `float32 [1, 10]`, or `scalar`."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "scalar"


def print_written(path: Path, values: Sequence[Value], *, to_stderr: bool) -> None:
    """Print a file of outputs: its size, and the key and type of each array."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    names = [value.name for value in values]
    keys = [name if name and names.count(name) == 1 else str(place) for place, name in enumerate(names)]
    arrays = ", ".join(f"{key} {type_of(value)}" for key, value in zip(keys, values, strict=True))
    text = f"wrote {path}, {units.size(path.stat().st_size)}: {arrays}"
    output.show(output.line(text), to_stderr=to_stderr)
