"""Checks of arguments that several commands share; each refuses before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.client.cli.terminal.capabilities import tell
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.export.spec import ModelSpec
    from etfarm.client.submit.prepared import PreparedModel
    from etfarm.wire.recipes import Recipe


def require_file(path: Path) -> None:
    """Check that a file which is read later exists.

    Raises:
        USAGE: there is no such file, or it is a folder.
    """
    if path.is_dir():
        raise error_for(
            "USAGE", f"{path} is a folder.", "Name a file. `etfarm run --inputs` takes a folder, as a data set.", path=path
        )
    if not path.is_file():
        raise error_for("USAGE", f"There is no file {path}.", f"Paths start at the working folder, {Path.cwd()}.", path=path)


def require_data_program(data: Sequence[Path], specs: Sequence[ModelSpec]) -> None:
    """Check the files of `--data`: they exist, and exactly one model is a ready program.

    Raises:
        USAGE: a file is missing, or the models are not exactly one program.
    """
    from etfarm.client.export.spec import PteFile

    for path in data:
        require_file(path)
    programs = [spec for spec in specs if isinstance(spec, PteFile)]
    if data and len(programs) != 1:
        count = len(programs) or "none"
        raise error_for("USAGE", f"--data requires exactly one .pte, got {count}.", "Run a separate command for each program.")


def prepare_archives(specs: Sequence[ModelSpec], recipes: Sequence[Recipe]) -> list[ModelSpec | PreparedModel]:
    """Return the models with each archive prepared; what takes longer stays as it is until the farm is being started.

    Raises:
        RECIPE_NEEDS_EAGER_MODULE: a recipe needs the module of an archive.
    """
    from etfarm.client.export.spec import Pt2File
    from etfarm.client.submit.preparation import prepare

    return [prepare(spec, recipes=recipes) if isinstance(spec, Pt2File) else spec for spec in specs]


def needs_export(sources: Sequence[ModelSpec | PreparedModel]) -> bool:
    """Return whether a model is eager, so that torch is needed here."""
    from etfarm.client.export.spec import EagerSpec

    return any(isinstance(source, EagerSpec) for source in sources)


def needs_compiler(sources: Sequence[ModelSpec | PreparedModel]) -> bool:
    """Return whether a model is not a ready program, so that the farm compiles."""
    from etfarm.client.export.spec import PteFile

    return not all(isinstance(source, PteFile) for source in sources)


def report_generated_inputs(specs: Sequence[ModelSpec], inputs: Path | None) -> None:
    """Print which programs run on generated inputs: a .pte contains no example inputs."""
    from etfarm.client.export.spec import PteFile

    programs = [spec.path.name for spec in specs if isinstance(spec, PteFile)]
    if programs and inputs is None:
        run = "runs" if len(programs) == 1 else "run"
        tell(f"No --inputs: {', '.join(programs)} {run} on generated inputs, seed 0.", to_stderr=True)


def report_random_weights(specs: Sequence[ModelSpec]) -> None:
    """Print which models have random weights: those of folders without a checkpoint."""
    from etfarm.client.export.spec import HuggingFaceFolder

    for spec in specs:
        if isinstance(spec, HuggingFaceFolder) and spec.is_random:
            tell(
                f"{spec.path} has no checkpoint (*.safetensors): its weights are random. Times and memory are those of the "
                "architecture; outputs and accuracy mean nothing.",
                to_stderr=True,
            )
