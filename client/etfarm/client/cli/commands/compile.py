"""`etfarm compile`: from a model to a .pte and its ETRecord, or to the output of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.arguments import needs_export, prepare_archives, report_random_weights
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.files import require_writable
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.wire.recipes import Recipe

LAST = "TO_EXECUTORCH"
"""The stage that produces a program."""

_DELEGATING = ("TO_EDGE_TRANSFORM_AND_LOWER", "TO_BACKEND")
"""The stages that produce a delegation table."""

_EXPORTING = ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT")
"""The stages that end before the edge dialect."""

_OF_STAGES = (".pt2", ".txt", ".csv")


def main(argv: list[str]) -> int:
    """Run `etfarm compile`."""
    return execute(compile_, argv, "compile")


def compile_(
    outcome: Outcome,
    connection: Connection,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="x.pt2, file.py:factory, package.module:factory, hf:FOLDER or demo:NAME.")
    ],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="R", help="A recipe's name, name:key=value, several joined by +, or a TOML file.")
    ] = "xnnpack_fp32",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file, x.pte; after a stage x.pt2 (its program), x.txt (the program printed), x.csv (delegation), "
            "or a folder for all of these.",
        ),
    ] = None,
    etrecord: Annotated[
        Path | None, typer.Option("--etrecord", metavar="x.etrecord", help="Output file of the ETRecord.")
    ] = None,
    stop_after: Annotated[
        str, typer.Option("--stop-after", metavar="STAGE", help="The last stage to run, as QUANTIZE. [TO_EXECUTORCH]")
    ] = "",
    calibration: options.Calibration = None,
    batched: options.Batched = False,
    keep_mutations: options.KeepMutations = False,
    name: options.Name = "",
    label: options.Labels = None,
    strict_quantization: options.StrictQuantization = False,
    no_cache: options.NoCache = False,
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
) -> int:
    """Lower a model to a .pte and its ETRecord, or stop after a stage and fetch that stage's files.

    A program's named data files (.ptd) and the names of its inputs and outputs (x.inputs.json) are written beside it; of several
    methods, each one's files are x.METHOD.pt2.
    """
    outcome.takes_verbose(verbose)
    outcome.goes_to(json)
    labels = options.labels_of(label or ())

    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.client.submit.recipes import read_recipe

    read = read_recipe(recipe)
    stage = _stage(stop_after, read)
    if output is None and json is None:
        raise error_for("USAGE", "-o is missing.", "Give -o FILE.pte.")
    spec = resolve(model)
    if isinstance(spec, PteFile):
        raise error_for(
            "USAGE", f"{model} is already compiled.", "Run it with `etfarm run` or measure it with `etfarm bench`.", path=model
        )
    _must_fit(stage, output, etrecord)
    if keep_mutations:
        (spec,) = options.keeping_mutations([spec])
    samples = options.calibration_of(calibration, batched, [read])
    sources = prepare_archives([spec], [read])
    report_random_weights([spec])

    from etfarm.client.cli.terminal.display import Display
    from etfarm.client.cli.views.results import print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.cli.workflows.requirements import Requirements, report_shortfalls
    from etfarm.client.models import JobResult, JobState
    from etfarm.client.submit.compile_options import CompileOptions

    chosen = CompileOptions(
        [read],
        calibration=samples,
        batched=batched,
        name=name,
        labels=labels,
        no_cache=no_cache,
        stop_after=stage,
    )

    async def submit(farm: AsyncFarm, display: Display) -> AsyncJob:
        return await farm.submit_compile(sources, replace(chosen, on_upload=display.moved, on_status=display.status))

    async def finish(job: AsyncJob, result: JobResult, display: Display) -> None:
        written: list[Path] = []
        if result.state is JobState.SUCCEEDED:
            if output is not None:
                written += await (_save_stage(job, output) if stage else job.save_program(output))
            if etrecord is not None:
                written += await _save_etrecord(job, etrecord)
        display.stop()
        print_result(result, to_stderr=json == STDOUT)
        _print_written(written, to_stderr=json == STDOUT, note=_how_to_load(stage, read, written))

    async def carry_out() -> int:
        task = flow.Task(submit, finish, connection, exports=needs_export(sources), verbose=verbose)
        _, result = await flow.carry_out(task, outcome)
        if result is None or result.state is not JobState.SUCCEEDED:
            return 1
        required = Requirements(strict_quantization=strict_quantization)
        return report_shortfalls(required, result, outcome) if required else 0

    return run_async(carry_out, outcome)


def _stage(text: str, recipe: Recipe) -> str:
    """Return the stage to stop after; empty for a program.

    Raises:
        BAD_STAGES: the stage does not exist, or the recipe does not have it.
    """
    from etfarm.wire.stages import check_stop_after

    stage = text.strip().upper()
    if stage:
        check_stop_after(recipe, stage)
    return "" if stage == LAST else stage


def _must_fit(stage: str, output: Path | None, etrecord: Path | None) -> None:
    """Check that the stage produces the files that the outputs' names require, and that they can be written.

    Raises:
        USAGE: the stage does not produce them.
        OutputUnwritable: a file cannot be written.
    """
    kind = output.suffix.lower() if output is not None else ""
    if stage and etrecord is not None:
        raise error_for(
            "USAGE",
            f"There is no ETRecord after {stage}: it belongs to a complete program.",
            "Leave --stop-after or --etrecord out.",
        )
    if stage and kind == ".pte":
        raise error_for(
            "USAGE",
            f"{stage} produces no .pte; {LAST}, the last stage, does.",
            "Give -o x.pt2 for the program, x.txt for the printed program, or a folder; or leave --stop-after out.",
        )
    if not stage and kind in _OF_STAGES:
        raise error_for(
            "USAGE",
            f"A {kind} is the output of one stage; all stages together produce a .pte.",
            "Give -o x.pte, or --stop-after STAGE as well.",
            path=output,
        )
    if not stage and kind not in ("", ".pte"):
        assert output is not None  # it has an ending
        raise error_for(
            "USAGE", f"-o writes a .pte, and {output} has another ending.", f"Name it {output.with_suffix('.pte')}.", path=output
        )
    if kind == ".csv" and stage not in _DELEGATING:
        raise error_for(
            "USAGE",
            f"The delegation is not known after {stage}.",
            f"Give -o x.pt2 or x.txt, or stop after {' or '.join(_DELEGATING)}.",
        )
    for path in filter(None, (output, etrecord)):
        if stage and path is output and kind not in _OF_STAGES:
            _must_be_folder(path)
        else:
            require_writable(path)


def _must_be_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise error_for(
            "USAGE",
            f"{path} is a file, but a stage's files need a folder.",
            "Give -o x.pt2, x.txt, x.csv, or another name.",
            path=path,
        )
    if not path.parent.is_dir():
        raise error_for("USAGE", f"There is no folder {path.parent} for {path}.", "Create it first.", path=path)


async def _save_stage(job: AsyncJob, output: Path) -> list[Path]:
    """Save a stage's files: those of the output's kind, or all into a folder."""
    from etfarm.client.jobs.file_names import method_file

    kind = output.suffix.lower()
    if kind not in _OF_STAGES:
        return await job.save_stage_files(output)
    names = await job.stage_files()
    chosen = [name for name in names if Path(name).suffix == kind]
    if not chosen:
        raise error_for(
            "NOT_PRODUCED", f"The stage wrote no {kind} file; it wrote {', '.join(names)}.", "Give -o FOLDER for all of these."
        )
    several = len(chosen) > 1
    to = {name: method_file(output, Path(name).stem) if several else output for name in chosen}
    return await job.save_stage_files(output.parent, to=to)


async def _save_etrecord(job: AsyncJob, path: Path) -> list[Path]:
    """Save the ETRecord; with several methods, also each method's exported program, which the ETRecord does not contain."""
    saved = [await job.save_etrecord(path)]
    methods = (await job.document(with_series=False))["reports"][0]["compile"]["exported_programs"] or {}
    return saved + (await job.save_exported_programs(path.with_suffix(".pt2")) if len(methods) > 1 else [])


def _how_to_load(stage: str, recipe: Recipe, files: Sequence[Path]) -> str:
    """Return how to load a stage's .pt2; empty if torch.export.load suffices, or if there is none."""
    from etfarm.wire.recipes import Quantization

    names = ", ".join(path.name for path in files if path.suffix == ".pt2")
    if not stage or not names:
        return ""
    if stage not in _EXPORTING:
        return f"Load {names} with executorch.exir.serde.serialize.load: torch.export.load does not read the edge dialect."
    if stage == "QUANTIZE" or recipe.quantization is not Quantization.NONE:
        return f"Import torchao before torch.export.load reads {names}: its operators are torchao's."
    return ""


def _print_written(files: Sequence[Path], *, to_stderr: bool, note: str = "") -> None:
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    if not files:
        return
    for path in files:
        output.show(output.line(f"wrote {path}, {units.size(path.stat().st_size)}"), to_stderr=to_stderr)
    data = [path.name for path in files if path.suffix == ".ptd"]
    if data:
        flags = " ".join(f"--data {name}" for name in data)
        output.show(output.line(f"The program needs its data files: {flags}.", style="dim"), to_stderr=to_stderr)
    if note:
        output.show(output.line(note, style="dim"), to_stderr=to_stderr)
