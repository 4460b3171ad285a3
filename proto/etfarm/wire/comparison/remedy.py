"""The commands that decide what two measurements do not: they measure the same cells again, in turns or with repeats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from etfarm.wire.report import Json

_PLAIN: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""A name that a command can have as it is."""

_CPUS: Final = re.compile(r"[0-9][0-9,-]{0,99}", re.ASCII)

SIDES: Final = ("base", "candidate")

_RUNS, _MAX_RUNS = 5, 50
"""Number of runs to measure for the variation between them, and the maximum of a job."""


def how_to_decide(pair: Json, unobserved: Sequence[str] = (), *, other_program: bool) -> str:
    """Return how to decide which side of a PAIR is faster, as sentences without a full stop at the end.

    Different programs are measured in turns, if one command can repeat the circumstances of both: method, threads, cores, inputs,
    warm-up and device. Otherwise each is measured with repeats, by a command of its own. What was measured so already is measured
    for longer, or with twice as many repeats.

    Args:
        pair: as in the document, up to its `size`.
        unobserved: those of base and candidate whose variation between runs is unknown, which are the ones to measure; both if
            there is none.
        other_program: whether the reports are of different programs.
    """
    if pair["latency"]["method"] == "paired":
        return f"`{_in_turns(pair)} --min-time 10` measures both in turns for longer"
    sides = unobserved or SIDES
    which = "each" if len(sides) > 1 else f"the {sides[0]}"
    repeat = f"--repeat {max(_runs(pair, side) for side in sides)}"
    if other_program and _can_share(pair):
        return f"`{_in_turns(pair)}` measures both in turns; or measure {which} with {repeat} instead of --interleave"
    return f"Measure {_commands(pair, sides, repeat, which)}"


def how_to_measure_again(pair: Json, sides: Sequence[str]) -> str:
    """Return how to replace the INVALID measurements of these sides of a PAIR, as `how_to_decide`."""
    if pair["latency"]["method"] == "paired":
        return f"Measure both again with `{_in_turns(pair)} --require-valid`"
    which = "both" if len(sides) > 1 else f"the {sides[0]}"
    command = _commands(pair, sides, "--require-valid --retry-invalid 2", f"{which} again")
    return f"Measure {command}, or with --repeat {_RUNS}"


def _commands(pair: Json, sides: Sequence[str], options: str, which: str) -> str:
    """Return a command for each of the sides, or one if they are equal: `each with COMMAND`."""
    commands = {side: _alone(pair, side, options) for side in sides}
    if len(set(commands.values())) == 1:
        return f"{which} with `{commands[sides[0]]}`"
    return " and ".join(f"the {side} with `{command}`" for side, command in commands.items())


def _runs(pair: Json, side: str) -> int:
    """Return how many runs to measure: twice as many as there are."""
    spread = pair["latency"][f"{side}_spread"] or {}
    known = spread["runs"] or 0 if spread.get("source") == "REPEATS" else 0
    return min(_MAX_RUNS, max(_RUNS, 2 * known))


def _can_share(pair: Json) -> bool:
    """Return whether one command can repeat the circumstances of both sides."""
    base, candidate = pair["base"], pair["candidate"]
    is_same = list(_circumstances(base)) == list(_circumstances(candidate)) and base["inputs"] == candidate["inputs"]
    return is_same and not _has_data(pair)


def _in_turns(pair: Json) -> str:
    """Return the command that measures both sides in turns."""
    programs, needs_inputs = _both_programs(pair["base"], pair["candidate"])
    parts = ("etfarm bench", programs, "--interleave", *_circumstances(pair["candidate"]), needs_inputs)
    return " ".join(filter(None, parts))


def _alone(pair: Json, side: str, options: str) -> str:
    """Return the command that measures one side with further options."""
    named = pair[side]
    if named["recipe"]:
        program, has_examples = f"MODEL --recipe {shlex.quote(named['recipe'])}", True
    else:
        program, has_examples = f"{named['model'] if _PLAIN.fullmatch(named['model'] or '') else side}.pte", False
    data = "--data DATA.ptd" if _has_data(pair, side) else ""
    inputs = _inputs(named, has_examples=has_examples)
    return " ".join(filter(None, ("etfarm bench", program, options, *_circumstances(named), data, inputs)))


def _both_programs(base: Json, candidate: Json) -> tuple[str, str]:
    """Return the arguments that name both programs, and the option for their inputs; the latter is empty without need."""
    models, recipes = (base["model"], candidate["model"]), (base["recipe"], candidate["recipe"])
    if models[0] == models[1] and all(recipes) and recipes[0] != recipes[1]:
        arguments = " ".join(f"--recipe {shlex.quote(recipe)}" for recipe in recipes)
        return f"MODEL {arguments}", _inputs(base, has_examples=True)
    if models[0] != models[1] and all(recipes) and recipes[0] == recipes[1]:
        return f"BASE_MODEL CANDIDATE_MODEL --recipe {shlex.quote(recipes[0])}", _inputs(base, has_examples=True)
    if models[0] != models[1] and all(_PLAIN.fullmatch(model or "") for model in models):
        programs = f"{models[0]}.pte {models[1]}.pte"
    else:
        programs = "base.pte candidate.pte"
    return programs, _inputs(base, has_examples=False)


def _inputs(named: Json, *, has_examples: bool) -> str:
    """Return the option for a report's inputs; empty if the command has them without it.

    Args:
        named: a REPORT_NAME.
        has_examples: whether the command has the model, whose example inputs are the default. A .pte has none.
    """
    is_needed = named["inputs_from_job"] if has_examples else named["inputs"]
    return "--inputs FILE.npz" if is_needed else ""


def _circumstances(named: Json) -> Iterator[str]:
    """Yield the options that repeat the method, threads, cores, warm-up and device of a REPORT_NAME."""
    method, device = named["method"], named["device"] or {}
    if method != "forward" and _PLAIN.fullmatch(method or ""):
        yield f"--method {method}"
    if named["threads"]:
        yield f"--threads {named['threads']}"
    if _CPUS.fullmatch(named["cores"] or ""):
        yield f"--cores {named['cores']}"
    if named["warmup"] is not None:
        yield f"--warmup {named['warmup']}"
    for key in ("name", "id"):
        if _PLAIN.fullmatch(device.get(key) or ""):
            yield f"--device {key}={device[key]}"
            break


def _has_data(pair: Json, side: str | None = None) -> bool:
    """Return whether the program of a side, or of either, has data files, which a command names for one program only."""
    known = (pair["size"] or {}).get("data_bytes") or {}
    return any(known.get(each) for each in ((side,) if side else SIDES))
