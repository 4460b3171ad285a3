"""`etfarm bench`: from models to a report for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.arguments import prepare_archives, report_generated_inputs, require_data_program, require_file
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.usage import Usage

if TYPE_CHECKING:
    from etfarm.client.export.spec import ModelSpec
    from etfarm.wire.recipes import Recipe


def main(argv: list[str]) -> int:
    """Run `etfarm bench`."""
    return execute(bench, argv, "bench")


def bench(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="x.pt2, x.pte, file.py:factory, package.module:factory or demo:NAME."),
    ],
    recipe: options.Recipes = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="SELECTOR", help="One cell on one device that matches, as arch=aarch64,memory>=2GiB."),
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="One cell on each device that matches.")] = False,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE.npz", help="Inputs by argument name or position; prefix METHOD/.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option("--method", metavar="M", help="A method; repeatable. [forward]")] = None,
    threads: Annotated[
        list[str] | None, typer.Option("--threads", metavar="N[,N]...", help="Thread counts. [the fastest cluster's cores]")
    ] = None,
    cores: Annotated[str, typer.Option("--cores", metavar="C", help="big, little, or cpus as 0-3.")] = "",
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", metavar="N", min=1, max=1_000_000, help="Minimum number of timed iterations. [100]"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", metavar="N", min=0, max=2**31 - 1, help="Number of warm-up runs. [until steady]")
    ] = None,
    min_time: Annotated[
        float | None,
        typer.Option("--min-time", metavar="S", min=0, callback=options.finite, help="Minimum seconds of timed iterations. [1]"),
    ] = None,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Measure the candidates in turns, and compare each with the first.")
    ] = False,
    no_profile: Annotated[bool, typer.Option("--no-profile", help="No traced pass, so no operators.")] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Also compare each operator's outputs, in a separate program and run.")
    ] = False,
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="X.ptd", help="A named data file of the .pte; repeatable.")
    ] = None,
    calibration: options.Calibration = None,
    batched: options.Batched = False,
    name: options.Name = "",
    label: options.Labels = None,
    timeout: options.Timeout = None,
    priority: Annotated[int, typer.Option("--priority", metavar="P", min=-(2**31), max=2**31 - 1, help="Higher first. [0]")] = 0,
    no_cache: options.NoCache = False,
    json: options.JsonFile = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write all reports to one HTML file, on failure too.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the job's id and exit.")] = False,
    verbose: options.Verbose = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> int:
    """Measures models on devices: latency, memory, accuracy, and operators by source line.

    Each model with each recipe, on each device choice, with each method and thread count is one cell of the job.
    """
    outcome: Outcome = context.obj
    outcome.takes_verbose(verbose)
    outcome.goes_to(json)
    outcome.goes_to_html(html)
    counts = options.threads_of(threads or ())
    methods = options.once("--method", method or [])
    labels = options.labels_of(label or ())
    cores = options.cores_of(cores)

    # Cheap checks come before anything starts.
    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.wire import selectors

    recipes = options.recipes_of(recipe or ())
    for text in device or ():
        selectors.parse(text)
    # A program that alternates with itself shows the difference that occurs by chance.
    specs = [resolve(model) for model in (models if interleave else options.once("MODEL", models, resolve))]
    if recipe and all(isinstance(spec, PteFile) for spec in specs):
        raise Usage("--recipe cannot be combined with a .pte, which is already compiled.", "Leave --recipe out.")
    if interleave:
        require_several_candidates(specs, recipes)
    if inputs is not None:
        require_file(inputs)
    require_data_program(data or (), specs)
    if numerics:
        require_graphs(specs)
    samples = options.calibration_of(calibration, batched, recipes)
    sources = prepare_archives(specs, recipes)
    report_generated_inputs(specs, inputs)

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal.display import Display, open_display
    from etfarm.client.cli.views.results import print_detached, print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import JobResult, JobState
    from etfarm.client.submit.bench_options import BenchOptions
    from etfarm.client.submit.prepared import PreparedModel

    chosen = BenchOptions(
        recipes,
        device or [""],
        all_devices=all_devices,
        inputs=inputs,
        methods=methods,
        threads=counts,
        cores=cores,
        iterations=iterations,
        warmup=warmup,
        min_time_s=min_time,
        profile=not no_profile,
        numerics=numerics,
        interleave=interleave,
        name=name,
        labels=labels,
        timeout_s=timeout,
        priority=priority,
        no_cache=no_cache,
    )

    async def submit(farm: AsyncFarm, prepared: list[PreparedModel], display: Display) -> AsyncJob:
        return await farm.submit_bench(prepared, replace(chosen, on_upload=display.moved))

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        display.stop()
        print_result(result, to_stderr=json == STDOUT)

    async def carry_out() -> int:
        if detach:
            await flow.require_persistent_farm(server)
        with open_display() as display:
            task = flow.Task(
                sources,
                submit,
                finish,
                server,
                tls_ca,
                detach,
                recipes=recipes,
                calibration=samples,
                batched=batched,
                data=data or (),
                verbose=verbose,
            )
            job, result = await flow.carry_out(task, outcome, display)
        if result is None:
            print_detached(job.id, to_stderr=json == STDOUT)
            return 0
        return 0 if result.state is JobState.SUCCEEDED else 1

    return run_async(carry_out, outcome)


def require_several_candidates(specs: Sequence[ModelSpec], recipes: Sequence[Recipe]) -> None:
    """Check, for `--interleave`, that there are at least two candidates.

    Raises:
        Usage: there is only one candidate.
    """
    from etfarm.client.export.spec import PteFile

    if len(specs) == 1 and (len(recipes) < 2 or isinstance(specs[0], PteFile)):
        raise Usage("--interleave requires two or more candidates, got one.", "Give a second MODEL or --recipe.")


def require_graphs(specs: Sequence[ModelSpec]) -> None:
    """Check, for `--numerics`, that every model has a graph.

    Raises:
        Usage: a model is a compiled program.
    """
    from etfarm.client.export.spec import PteFile

    for spec in specs:
        if isinstance(spec, PteFile):
            raise Usage(
                f"--numerics requires a model's graph, which the compiled program {spec.path.name} lacks.",
                "Give the .pt2 or the model itself, or leave --numerics out.",
            )
