"""Options that several commands share, each with one spelling and one help text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.usage import Usage

if TYPE_CHECKING:
    from etfarm.wire.recipes import Recipe

Item = TypeVar("Item")

_CPUS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)

_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(ns|us|µs|ms|s)", re.ASCII)
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}

Server = Annotated[
    str | None,
    typer.Option("--server", metavar="ADDR", help="HOST:PORT or unix:PATH; else ETFARM_SERVER, else a farm of its own."),
]
TlsCa = Annotated[
    str | None, typer.Option("--tls-ca", metavar="FILE", help="PEM of the authority that signed the server's certificate.")
]


def _choose_project(name: str | None) -> None:
    """Select the project of `--project` for the farms that the command connects to.

    Raises:
        Usage: the name is empty, or it is another option.
    """
    if name is None:
        return
    if not name or name.startswith("-"):
        raise Usage("--project requires a project's name.", "`etfarm projects list` shows yours.")
    from etfarm.client.transport.connection import CHOSEN_PROJECT

    CHOSEN_PROJECT.set(name)


Project = Annotated[
    str | None,
    typer.Option(
        "--project",
        metavar="NAME",
        help="The project that owns what the command creates; else ETFARM_PROJECT, else your only project.",
        callback=_choose_project,
        expose_value=False,
    ),
]
"""The callback does all the work: commands do not read the argument."""

JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write etfarm.report/1 there, on failure too; - is stdout.")
]
ListJson = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON there, on failure too; - is stdout.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, its first characters, a tag, a name, or latest.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="R", help="A recipe's name, name:key=value, or a TOML file; repeatable. [xnnpack_fp32]"),
]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label of the job; repeatable.")]
Name = Annotated[str, typer.Option("--name", metavar="N", help="The job's name.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile again even if the farm has a cached result.")]

Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="PATH", help="Samples for int8: an .npz, or a folder with one .npz per sample."),
]
Batched = Annotated[bool, typer.Option("--batched", help="Axis 0 of every array of --calibration is the sample axis.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show what compilers and runners print, and the original text of errors.")
]


def finite(value: float | None) -> float | None:
    """Check that a number is finite, as a callback: nan and inf may pass comparisons with a bound."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of seconds")
    return value


Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="S", min=1, callback=finite, help="Maximum seconds on the device. [600]")
]


def recipes_of(texts: Sequence[str]) -> list[Recipe]:
    """Return the recipes of `--recipe`, each once; the default recipe when there is none.

    Raises:
        EtfarmError: as `read_recipe`.
    """
    from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe

    recipes = {text: read_recipe(text) for text in texts or (DEFAULT_RECIPE,)}
    return [recipes[text] for text in once("--recipe", texts or (DEFAULT_RECIPE,), lambda text: recipes[text].digest)]


def calibration_of(path: Path | None, batched: bool, recipes: Sequence[Recipe]) -> Path | None:
    """Return PATH of `--calibration` after checking that it exists and that a recipe reads it.

    Raises:
        Usage: it does not exist, no recipe reads it, or `--batched` is used without it.
    """
    from etfarm.client.submit.recipes import reads_values

    if path is None:
        if batched:
            raise Usage("--batched requires --calibration.", "Give --calibration PATH too.")
        return None
    if not path.exists():
        raise Usage(f"There is no file or folder {path}.", f"Paths start at the working folder, {Path.cwd()}.", path=path)
    if not any(reads_values(recipe) for recipe in recipes):
        texts = ", ".join(recipe.text for recipe in recipes)
        raise Usage(
            f"No recipe of this job calibrates ({texts}), so --calibration has no effect.",
            "Leave it out, or use a static int8 recipe such as xnnpack_pt2e_int8_static_per_channel.",
        )
    return path


def threads_of(texts: Sequence[str]) -> list[int]:
    """Return the thread counts of `--threads 1,2 --threads 4`.

    Raises:
        Usage: a count is not a positive number.
    """
    counts: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 0 < int(part) <= 1024):
            raise Usage(f"--threads {part!r} is not a number of threads.", "Give for example --threads 1,4.", value=part)
        counts.append(int(part))
    return once("--threads", counts)


def once(what: str, items: Sequence[Item], key: Callable[[Item], object] = lambda item: item) -> list[Item]:
    """Return `items` in order without duplicates, and report the dropped ones on stderr.

    Args:
        what: their kind, for the message.
        key: returns equal values for duplicates.
    """
    kept: list[Item] = []
    keys: list[object] = []
    dropped: list[str] = []
    for item in items:
        if key(item) not in keys:
            keys.append(key(item))
            kept.append(item)
        elif str(item) not in dropped:
            dropped.append(str(item))
    if dropped:
        tell(f"Duplicates are ignored: {what} {', '.join(dropped)}.", to_stderr=True)
    return kept


def duration_of(option: str, text: str | None) -> float | None:
    """Return a duration such as `5ms` in nanoseconds; None if the option is absent.

    Raises:
        Usage: it is not a positive number with a unit.
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    value_ns = float(match[1]) * _UNITS_NS[match[2]] if match else 0.0
    if not 0 < value_ns < math.inf:
        raise Usage(f"{option} {text!r} is not a duration.", f"Give a number and ns, us, ms or s: {option} 5ms.", value=text)
    return value_ns


def cores_of(text: str) -> str:
    """Return `--cores` unchanged; the device checks whether it has these CPUs.

    Raises:
        Usage: it is neither big, little nor a list of CPUs.
    """
    ranges = [_CPUS.fullmatch(part.strip()) for part in text.split(",")]
    if text and text not in ("big", "little") and not all(part and int(part[1]) <= int(part[2] or part[1]) for part in ranges):
        raise Usage(f"--cores {text!r} names no cores.", "Give big, little, or cpus as 0-3 or 0,2.", value=text)
    return text


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels of `--label K=V`.

    Raises:
        Usage: a label is not K=V, or a key has two values.
    """
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise Usage(f"--label {text!r} is not K=V.", "Give for example --label team=vision.", value=text)
        key, value = key.strip(), value.strip()
        if labels.setdefault(key, value) != value:
            raise Usage(f"--label {key} is set twice, to {labels[key]!r} and to {value!r}.", "Give one.", key=key)
    return labels
