"""Steps 1 and 10, command line: `etfarm run`, a program's outputs on a device for your inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import STDOUT, Outcome, Usage, execute, must_be_writable, run_async


def main(argv: list[str]) -> int:
    """Runs `etfarm run`."""
    return execute(run, argv, "run")


def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="x.pte; or what `etfarm bench` takes, compiled before.")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="R", help="For a model that is no .pte. [xnnpack_fp32]")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="in.npz", help="Inputs by argument name or place; METHOD/ before it.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="out.npz", help="Where the outputs go.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="SELECTOR", help="A device that matches. [any]")] = "",
    method: Annotated[str, typer.Option("--method", metavar="M", help="The method to run. [forward, or the only one]")] = "",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads. [the fastest cluster's cores]")
    ] = None,
    name: options.Name = "",
    timeout: options.Timeout = None,
    json: options.JsonFile = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> int:
    """Runs a program once on a device and fetches its outputs."""
    outcome: Outcome = context.obj
    outcome.goes_to(json)

    from etfarm.client.cli.bench import must_be_file, print_result, say_made_up
    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.client.submission import DEFAULT_RECIPE, read_recipe
    from etfarm.wire import selectors

    if recipe is not None:
        read_recipe(recipe)
    selectors.parse(device)
    spec = resolve(model)
    if recipe is not None and isinstance(spec, PteFile):
        raise Usage("A .pte is compiled already, so that --recipe says nothing about it.", "Leave --recipe out.")
    if inputs is not None:
        must_be_file(inputs)
    if output is not None:
        must_be_writable(output)
    say_made_up([spec], inputs)

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli import flow
    from etfarm.client.cli.display import Display, open_display
    from etfarm.client.jobs import AsyncJob
    from etfarm.client.models import JobResult, JobState
    from etfarm.client.submission import PreparedModel

    async def submit(farm: AsyncFarm, prepared: list[PreparedModel], display: Display) -> AsyncJob:
        return await farm.run(
            prepared[0],
            recipe or DEFAULT_RECIPE,
            device,
            inputs=inputs,
            methods=[method] if method else (),
            threads=threads,
            name=name,
            timeout_s=timeout,
            on_upload=display.moved,
        )

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        values = await job.outputs() if result.state is JobState.SUCCEEDED else []
        display.stop()
        print_result(result, job.made_up_inputs, to_stderr=json == STDOUT)
        if result.state is JobState.SUCCEEDED:
            print_outputs(values, to_stderr=json == STDOUT)
            if output is not None:
                from etfarm.client import npz

                npz.write_outputs(
                    output, {job.info.cells[0].method: values}, {job.info.cells[0].method: [v.name for v in values]}
                )

    async def carry_out() -> int:
        with open_display() as display:
            _, result = await flow.carry_out(flow.Task([spec], submit, finish, server, tls_ca), outcome, display)
        return 0 if result is not None and result.state is JobState.SUCCEEDED else 1

    return run_async(carry_out, outcome)


def print_outputs(values: object, *, to_stderr: bool) -> None:
    """Prints what came out, a line a value: name, dtype and shape, and the first numbers."""
    from etfarm.client.cli import output
    from etfarm.wire.tensors import Scalar, Tensor, to_array

    rows = []
    assert isinstance(values, list)
    for place, value in enumerate(values):
        if isinstance(value, Scalar):
            rows.append((value.name or str(place), "scalar", str(value.value)))
        elif isinstance(value, Tensor):
            flat = to_array(value).reshape(-1)[:6].tolist()
            more = ", ..." if len(flat) == 6 else ""
            shown = ", ".join(f"{number:.5g}" if isinstance(number, float) else str(number) for number in flat)
            rows.append((value.name or str(place), f"{value.dtype} {list(value.shape)}", f"{shown}{more}"))
    output.show_table(("OUTPUT", "TYPE", "VALUES"), rows, shrink=("VALUES",), to_stderr=to_stderr)
