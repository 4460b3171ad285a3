"""`etfarm bench`: from models to a report for each cell."""

from __future__ import annotations

from collections.abc import Sequence
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
from etfarm.client.cli.generation import GenerationOptions, refuse_others
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.measurement import MeasurementOptions

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.export.spec import ModelSpec
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import JobResult
    from etfarm.wire.recipes import Recipe


def main(argv: list[str]) -> int:
    """Run `etfarm bench`."""
    return execute(bench, argv, "bench")


def bench(
    outcome: Outcome,
    connection: Connection,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="x.pt2, x.pte, file.py:factory, package.module:factory, hf:FOLDER or demo:NAME."),
    ],
    *,
    recipe: options.Recipes = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="SELECTOR", help="One cell on one device that matches, as arch=aarch64,memory>=2GiB."),
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="One cell on each device that matches.")] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE.npz|FOLDER",
            help="Inputs by argument name or position; prefix METHOD/. Of a folder, the first is timed; accuracy is of up to 64.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="M", help="A method; repeatable. [forward, else all]")
    ] = None,
    threads: Annotated[
        list[str] | None, typer.Option("--threads", metavar="N[,N]...", help="Thread counts. [the fastest cluster's cores]")
    ] = None,
    measurement: MeasurementOptions,
    generation: GenerationOptions,
    data: options.Data = None,
    require_valid: Annotated[bool, typer.Option("--require-valid", help="Exit with 5 unless every latency is VALID.")] = False,
    retry_invalid: Annotated[
        int, typer.Option("--retry-invalid", metavar="N", min=0, max=20, help="Measure INVALID cells again, N times at most.")
    ] = 0,
    min_sqnr: Annotated[
        float | None,
        typer.Option(
            "--min-sqnr",
            metavar="DB",
            callback=options.finite,
            help="Exit with 3 if the SQNR of an output or of logits is below.",
        ),
    ] = None,
    min_top1: Annotated[
        str | None,
        typer.Option("--min-top1", metavar="SHARE", help="As 95%: exit with 3 if the top-1 agreement with the model is below."),
    ] = None,
    strict_quantization: options.StrictQuantization = False,
    max_p50: Annotated[
        str | None,
        typer.Option("--max-p50", metavar="TIME", help="As 5ms: exit with 3 if a median is above, with 5 if that is uncertain."),
    ] = None,
    calibration: options.Calibration = None,
    batched: options.Batched = False,
    keep_mutations: options.KeepMutations = False,
    name: options.Name = "",
    label: options.Labels = None,
    timeout: options.Timeout = None,
    reservation: options.Reservation = None,
    deadline: options.Deadline = None,
    max_wait: options.MaxWait = None,
    no_cache: options.NoCache = False,
    notify: options.Notify = None,
    json: options.JsonFile = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write all reports to one HTML file, on failure too.")
    ] = None,
    junit: options.JunitFile = None,
    top: Annotated[
        int | None, typer.Option("--top", metavar="N", min=0, help="Number of operators to show; 0: all. [10]")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the job's id and exit.")] = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure models on devices: latency, memory, accuracy, and operators by source line.

    Each model with each recipe, on each device choice, with each method and thread count is one cell of the job.
    """
    outcome.takes_verbose(verbose)
    outcome.goes_to(json)
    outcome.goes_to_html(html)
    outcome.goes_to_junit(junit)
    counts = options.threads_of(threads or ())
    methods = options.once("--method", method or [])
    labels = options.labels_of(label or ())
    options.cores_of(measurement.cores)
    max_p50_ns = options.duration_of("--max-p50", max_p50)
    least_top1 = options.share_of("--min-top1", min_top1)
    due, longest_wait_s = options.deadline_of(deadline), None if max_wait is None else options.seconds_of("--max-wait", max_wait)
    if measurement.interleave and (measurement.repeat or 1) > 1:
        raise error_for(
            "USAGE",
            "--repeat cannot be combined with --interleave, which starts each program several times itself.",
            "Leave one out.",
        )
    if measurement.interleave and retry_invalid:
        raise error_for(
            "USAGE", "--retry-invalid cannot be combined with --interleave, whose cells belong together.", "Leave one out."
        )
    generated = generation.generate
    if generated is not None:
        refuse_others(measurement, {"--method": method, "--max-p50": max_p50})
    if detach and (
        require_valid or retry_invalid or strict_quantization or any(each is not None for each in (min_sqnr, min_top1, max_p50))
    ):
        raise error_for(
            "USAGE", "--detach cannot be combined with a requirement, which needs the job's result.", "Leave one of them out."
        )

    # Cheap checks come before anything starts.
    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.wire import selectors

    recipes = options.recipes_of(recipe or ())
    for text in device or ():
        selectors.parse(text)
    # A program that alternates with itself shows the difference that occurs by chance.
    specs = [resolve(model) for model in (models if measurement.interleave else options.once("MODEL", models, resolve))]
    if recipe and all(isinstance(spec, PteFile) for spec in specs):
        raise error_for("USAGE", "--recipe cannot be combined with a .pte, which is already compiled.", "Leave --recipe out.")
    if measurement.trace_iterations is not None and not measurement.profile:
        raise error_for("USAGE", "--trace-iterations cannot be combined with --no-profile.", "Leave one of them out.")
    if measurement.interleave:
        require_several_candidates(specs, recipes)
    if inputs is not None and not inputs.is_dir():
        require_file(inputs)
    require_data_program(data or (), specs)
    if keep_mutations:
        specs = options.keeping_mutations(specs)
    if measurement.numerics:
        require_graphs("--numerics", specs)
    # A compiled language model is compared with the same program on the server.
    if generated is None:
        for option, limit in (("--min-sqnr", min_sqnr), ("--min-top1", min_top1)):
            if limit is not None:
                require_graphs(option, specs)
    samples = options.calibration_of(calibration, batched, recipes)
    sources = prepare_archives(specs, recipes)
    report_random_weights(specs)
    if generated is None:
        report_generated_inputs(specs, inputs)

    from etfarm.client.cli.terminal.display import Display
    from etfarm.client.cli.views.results import print_detached, print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.cli.workflows import retry as retries
    from etfarm.client.cli.workflows.requirements import Requirements, report_shortfalls
    from etfarm.client.models import JobState
    from etfarm.client.submit.bench_options import BenchOptions

    chosen = BenchOptions(
        recipes, device or [""], all_devices=all_devices, calibration=samples, batched=batched, data=data or (), inputs=inputs,
        methods=methods, threads=counts, generate=generated, name=name, labels=labels, timeout_s=timeout, reservation=reservation,
        deadline=due, max_wait_s=longest_wait_s, no_cache=no_cache, notify=notify or (), **vars(measurement),
    )  # fmt: skip

    async def submit(farm: AsyncFarm, display: Display) -> AsyncJob:
        return await farm.submit_bench(sources, replace(chosen, on_upload=display.moved, on_status=display.status))

    required = Requirements(require_valid, min_sqnr, max_p50_ns, least_top1, strict_quantization, retry_invalid)
    jobs: dict[str, str] = {}

    async def retry(farm: AsyncFarm, job: AsyncJob, result: JobResult, display: Display) -> JobResult:
        result, last_jobs = await retries.retry_invalid(
            farm, job, result, display, retry_invalid, verbose=verbose, with_series=outcome.needs_series
        )
        jobs.update(last_jobs)
        return result

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        display.stop()
        print_result(result, to_stderr=STDOUT in (json, junit), top=top, jobs=jobs)
        if required and result.state is JobState.SUCCEEDED and (failed := required.failures(result.json()["reports"])):
            await report_gate(job, " ".join(required.options()), failed)

    async def carry_out() -> int:
        if detach:
            await flow.require_persistent_farm(connection.server)
        task = flow.Task(
            submit, finish, connection, detach,
            exports=needs_export(sources), compiles=needs_compiler(sources), verbose=verbose,
            retry=retry if retry_invalid else None,
        )  # fmt: skip
        job, result = await flow.carry_out(task, outcome)
        if result is None:
            print_detached(job.id, to_stderr=STDOUT in (json, junit))
            return 0
        if result.state is not JobState.SUCCEEDED:
            return 1
        return report_shortfalls(required, result, outcome) if required else 0

    return run_async(carry_out, outcome)


async def report_gate(job: AsyncJob, gate: str, failures: Sequence[str]) -> None:
    """Tell the farm that a requirement is not met, which only this command knows; a farm that cannot take it changes nothing."""
    try:
        await job.report_gate(gate, failures)
    except EtfarmError as error:
        tell(f"etfarm: The farm was not told of the requirement: {error}", to_stderr=True)


def require_several_candidates(specs: Sequence[ModelSpec], recipes: Sequence[Recipe]) -> None:
    """Check, for `--interleave`, that there are at least two candidates.

    Raises:
        USAGE: there is only one candidate.
    """
    from etfarm.client.export.spec import PteFile

    if len(specs) == 1 and (len(recipes) < 2 or isinstance(specs[0], PteFile)):
        raise error_for("USAGE", "--interleave requires two or more candidates, got one.", "Give a second MODEL or --recipe.")


def require_graphs(option: str, specs: Sequence[ModelSpec]) -> None:
    """Check, for an option that compares results with those of the model, that every model has a graph.

    Raises:
        USAGE: a model is a compiled program.
    """
    from etfarm.client.export.spec import PteFile

    for spec in specs:
        if isinstance(spec, PteFile):
            raise error_for(
                "USAGE",
                f"{option} requires a model's graph, which the compiled program {spec.path.name} lacks.",
                f"Give the .pt2 or the model itself, or leave {option} out.",
            )
