"""Options that several commands share, each with one spelling and one help text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etfarm.client.cli.terminal.capabilities import tell
from etfarm.wire.durations import read_period_s, read_size
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.export.spec import ModelSpec
    from etfarm.wire.recipes import Recipe

Item = TypeVar("Item")

_CPUS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*(%)?", re.ASCII)
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(ns|us|µs|ms|s)", re.ASCII)
_CENTURY_S = 100 * 366 * 86_400.0
_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}

JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write etfarm.report/1 there, on failure too; - is stdout.")
]
JunitFile = Annotated[
    str | None,
    typer.Option("--junit", metavar="FILE", help="Write JUnit XML there, a test for each cell and gate; - is stdout."),
]
ListJson = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON there, on failure too; - is stdout.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Delete nothing, and show what would be deleted.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, its first characters, a tag, a name, or latest.")]
DeviceId = Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")]
DeviceIds = Annotated[list[str], typer.Argument(metavar="DEVICE", help="Ids, their first characters, or names.")]
OneDevice = Annotated[str, typer.Option("--device", metavar="SELECTOR", help="A device that matches. [any]")]
ProgramOrModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="x.pte; or a model as in `etfarm bench`, which is compiled first.")
]
RecipeOfModel = Annotated[
    str | None, typer.Option("--recipe", metavar="R", help="For a model that is not a .pte. [xnnpack_fp32]")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads. [the fastest cluster's cores]")
]
Data = Annotated[list[Path] | None, typer.Option("--data", metavar="X.ptd", help="A named data file of the .pte; repeatable.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="R", help="A recipe's name, name:key=value, or a TOML file; repeatable. [xnnpack_fp32]"),
]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label of the job; repeatable.")]
Name = Annotated[str, typer.Option("--name", metavar="N", help="The job's name.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile again even if the farm has a cached result.")]

Notify = Annotated[
    list[str] | None,
    typer.Option("--notify", metavar="URL", help="POST a notice there when the job has ended or a gate failed; repeatable."),
]
StrictQuantization = Annotated[
    bool, typer.Option("--strict-quantization", help="Exit with 3 if a recipe quantizes nothing in a method.")
]

Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="PATH", help="Samples for int8: an .npz, or a folder with one .npz per sample."),
]
Batched = Annotated[bool, typer.Option("--batched", help="Axis 0 of every array of --calibration is the sample axis.")]
KeepMutations = Annotated[
    bool, typer.Option("--keep-mutations", help="Return the inputs that a factory's model writes to as outputs, too.")
]
Reservation = Annotated[
    str | None,
    typer.Option("--reservation", metavar="ID", help="Use the devices of a reservation; else ETFARM_RESERVATION."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show what compilers and runners print, and the original text of errors.")
]


def finite(value: float | None) -> float | None:
    """Check that a number is finite, as a callback: nan and inf may pass comparisons with a bound."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="S", min=1, callback=finite, help="Maximum seconds on the device. [600]")
]


Deadline = Annotated[
    str | None,
    typer.Option("--deadline", metavar="TIME", help="As 30m or 2026-11-23T18:00: what has not started by then fails. [none]"),
]
MaxWait = Annotated[
    str | None, typer.Option("--max-wait", metavar="TIME", help="As 10m: a cell that waits longer for a device fails. [no limit]")
]


def seconds_of(option: str, text: str) -> float:
    """Return a duration such as `90s`, `30m`, `2h` or `1d` in seconds.

    Raises:
        USAGE: it is not a positive number with such a unit.
    """
    value_s = read_period_s(text)
    if not value_s:
        raise error_for(
            "USAGE", f"{option} requires a duration, got {text!r}.", f"Give for example {option} 30m (s, m, h or d).", value=text
        )
    return value_s


def deadline_of(text: str | None) -> datetime | timedelta | None:
    """Return the time of `--deadline`: a duration from now on, or a time in ISO 8601, local if it names no time zone.

    Raises:
        USAGE: it is neither.
    """
    if text is None:
        return None
    if read_period_s(text) is not None:
        return timedelta(seconds=min(seconds_of("--deadline", text), _CENTURY_S))
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise error_for(
            "USAGE",
            f"--deadline requires a duration or a time, got {text!r}.",
            "Give for example --deadline 2h or --deadline 2026-11-23T18:00.", value=text,
        ) from None  # fmt: skip


def recipes_of(texts: Sequence[str]) -> list[Recipe]:
    """Return the recipes of `--recipe`, each once; the default recipe when there is none.

    Raises:
        EtfarmError: as `read_recipe`.
    """
    from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe

    recipes = {text: read_recipe(text) for text in texts or (DEFAULT_RECIPE,)}
    return [recipes[text] for text in once("--recipe", texts or (DEFAULT_RECIPE,), lambda text: recipes[text].digest)]


def keeping_mutations(specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return the models of `--keep-mutations`.

    Raises:
        USAGE: one of them is not a factory.
    """
    from etfarm.client.export.spec import FileFactory, ModuleFactory

    kept: list[ModelSpec] = []
    for spec in specs:
        if not isinstance(spec, FileFactory | ModuleFactory):
            raise error_for(
                "USAGE",
                f"--keep-mutations requires a factory, and {spec.label} is exported already or changes no inputs.",
                "Give file.py:factory or package.module:factory.",
            )
        kept.append(replace(spec, keep_mutations=True))
    return kept


def calibration_of(path: Path | None, batched: bool, recipes: Sequence[Recipe]) -> Path | None:
    """Return PATH of `--calibration` after checking that it exists and that a recipe reads it.

    Raises:
        USAGE: it does not exist, no recipe reads it, or `--batched` is used without it.
    """
    from etfarm.client.submit.recipes import reads_values

    if path is None:
        if batched:
            raise error_for("USAGE", "--batched requires --calibration.", "Give --calibration PATH too.")
        return None
    if not path.exists():
        raise error_for(
            "USAGE", f"There is no file or folder {path}.", f"Paths start at the working folder, {Path.cwd()}.", path=path
        )
    if not any(reads_values(recipe) for recipe in recipes):
        texts = ", ".join(recipe.text for recipe in recipes)
        raise error_for(
            "USAGE",
            f"No recipe of this job calibrates ({texts}), so --calibration has no effect.",
            "Leave it out, or use a static int8 recipe such as xnnpack_pt2e_int8_static_per_channel.",
        )
    return path


def threads_of(texts: Sequence[str]) -> list[int]:
    """Return the thread counts of `--threads 1,2 --threads 4`.

    Raises:
        USAGE: a count is not a positive number.
    """
    counts: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 0 < int(part) <= 1024):
            raise error_for(
                "USAGE", f"--threads {part!r} is not a number of threads.", "Give for example --threads 1,4.", value=part
            )
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


def instant_of(option: str, text: str) -> datetime:
    """Return a time that is given as a duration before now such as `2d`, or as an ISO time.

    Raises:
        USAGE: it is neither.
    """
    with suppress(ValueError, OverflowError):
        if read_period_s(text) is not None:
            return datetime.now(UTC) - timedelta(seconds=seconds_of(option, text))
        return datetime.fromisoformat(text).astimezone(UTC)
    raise error_for(
        "USAGE",
        f"{option} requires a duration or a time, got {text!r}.",
        f"Give for example {option} 2d or {option} 2026-06-01.",
        value=text,
    )


def duration_of(option: str, text: str | None) -> float | None:
    """Return a duration such as `5ms` in nanoseconds; None if the option is absent.

    Raises:
        USAGE: it is not a positive number with a unit.
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    value_ns = float(match[1]) * _UNITS_NS[match[2]] if match else 0.0
    if not 0 < value_ns < math.inf:
        raise error_for(
            "USAGE", f"{option} {text!r} is not a duration.", f"Give a number and ns, us, ms or s: {option} 5ms.", value=text
        )
    return value_ns


def size_of(option: str, text: str) -> int:
    """Return a size such as `200GiB` in bytes.

    Raises:
        USAGE: the text is not a size.
    """
    if (size := read_size(text)) is None:
        raise error_for("USAGE", f"{option} must be a size, got {text!r}.", "Write 500MiB, 200GiB or 2TiB; 0MiB keeps nothing.")
    return size


def share_of(option: str, text: str | None) -> float | None:
    """Return a share such as `95%` or `0.95` as a fraction; None if the option is absent.

    Raises:
        USAGE: it is not a number of 0 to 1, or of 0 to 100 with a percent sign.
    """
    if text is None:
        return None
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise error_for("USAGE", f"{option} {text[:40]!r} is not a share.", f"Give for example {option} 95%.", value=text[:40])
    return share


def cores_of(text: str) -> str:
    """Return `--cores` unchanged; the device checks whether it has these CPUs.

    Raises:
        USAGE: it is neither big, little nor a list of CPUs.
    """
    ranges = [_CPUS.fullmatch(part.strip()) for part in text.split(",")]
    if text and text not in ("big", "little") and not all(part and int(part[1]) <= int(part[2] or part[1]) for part in ranges):
        raise error_for("USAGE", f"--cores {text!r} names no cores.", "Give big, little, or cpus as 0-3 or 0,2.", value=text)
    return text


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels of `--label K=V`.

    Raises:
        USAGE: a label is not K=V, or a key has two values.
    """
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise error_for("USAGE", f"--label {text!r} is not K=V.", "Give for example --label team=vision.", value=text)
        key, value = key.strip(), value.strip()
        if labels.setdefault(key, value) != value:
            raise error_for("USAGE", f"--label {key} is set twice, to {labels[key]!r} and to {value!r}.", "Give one.", key=key)
    return labels
