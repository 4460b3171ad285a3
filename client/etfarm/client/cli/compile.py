"""Steps 1 and 10, command line: `etfarm compile`, from a model to a .pte and its ETRecord."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import STDOUT, Outcome, Usage, execute, must_be_writable, run_async
from etfarm.client.errors import NotAvailable
from etfarm.wire.names import STAGES


def main(argv: list[str]) -> int:
    """Runs `etfarm compile`."""
    return execute(compile_, argv, "compile")


def compile_(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="x.pt2, file.py:factory, package.module:factory or demo:NAME.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="R", help="A recipe's name, name:key=value, or a TOML file.")
    ] = "xnnpack_fp32",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="x.pte", help="Where the program goes.")] = None,
    etrecord: Annotated[Path | None, typer.Option("--etrecord", metavar="x.etrecord", help="Where the ETRecord goes.")] = None,
    stop_after: Annotated[str, typer.Option("--stop-after", metavar="STAGE", help="Only TO_EXECUTORCH in this version.")] = "",
    name: options.Name = "",
    label: options.Labels = None,
    no_cache: options.NoCache = False,
    json: options.JsonFile = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> int:
    """Lowers a model to a .pte and its ETRecord."""
    outcome: Outcome = context.obj
    outcome.goes_to(json)
    stage = stop_after.upper()
    if stage and stage not in STAGES:
        raise Usage(f"--stop-after {stop_after!r} is no stage.", f"The stages are {', '.join(STAGES)}.", stage_name=stop_after)
    if stage and stage != "TO_EXECUTORCH":
        raise NotAvailable(f"--stop-after {stage}", "The only stage to stop after is TO_EXECUTORCH, the last one.")
    if output is None and json is None:
        raise Usage("There is nowhere to put the program.", "Give -o FILE.pte.")
    labels = options.labels_of(label or ())

    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.client.submission import read_recipe

    read_recipe(recipe)
    spec = resolve(model)
    if isinstance(spec, PteFile):
        raise Usage(f"{model} is compiled already.", "Run it with `etfarm run` or measure it with `etfarm bench`.", path=model)
    for path in filter(None, (output, etrecord)):
        must_be_writable(path)

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli import flow
    from etfarm.client.cli.bench import print_result
    from etfarm.client.cli.display import Display, open_display
    from etfarm.client.jobs import AsyncJob
    from etfarm.client.models import JobResult, JobState
    from etfarm.client.submission import PreparedModel

    async def submit(farm: AsyncFarm, prepared: list[PreparedModel], display: Display) -> AsyncJob:
        return await farm.compile(
            prepared, recipe, name=name, labels=labels, no_cache=no_cache, stop_after=stage, on_upload=display.moved
        )

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        if result.state is JobState.SUCCEEDED:
            if output is not None:
                await job.save_program(output, on_progress=None)
            if etrecord is not None:
                await job.save_etrecord(etrecord)
        display.stop()
        print_result(result, to_stderr=json == STDOUT)

    async def carry_out() -> int:
        with open_display() as display:
            _, result = await flow.carry_out(flow.Task([spec], submit, finish, server, tls_ca), outcome, display)
        return 0 if result is not None and result.state is JobState.SUCCEEDED else 1

    return run_async(carry_out, outcome)
