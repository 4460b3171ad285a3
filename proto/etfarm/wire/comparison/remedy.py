"""The commands that decide what two measurements do not: they measure the same cells again, in turns or with repeats."""

from __future__ import annotations

import math
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

_LONGER: Final = 4
"""How many times as long to measure for an interval of half the width."""
_MIN_TIME_S, _MAX_TIME_S = 10, 240
"""Range of `--min-time` for programs in turns: two of them, with their warm-ups, end well before the default time limit."""


def how_to_decide(pair: Json, unobserved: Sequence[str] = (), *, other_program: bool) -> str:
    """Return how to decide which side of a PAIR is faster, as sentences without a full stop at the end.

    Different programs are measured in turns, if one command can repeat the circumstances of both: method, threads, cores, inputs,
    warm-up and device. Otherwise each is measured with repeats, by a command of its own. What was measured so already is measured
    for longer, as far as the time limit allows, or with twice as many repeats.

    Args:
        pair: as in the document, up to its `size`.
        unobserved: those of base and candidate whose variation between runs is unknown, which are the ones to measure; both if
            there is none.
        other_program: whether the reports are of different programs.
    """
    if pair["latency"]["method"] == "paired":
        return _longer_in_turns(pair)
    sides = unobserved or SIDES
    which = "each" if len(sides) > 1 else f"the {sides[0]}"
    repeat = f"--repeat {max(_runs(pair, side) for side in sides)}"
    if other_program and _can_share(pair):
        turns = f"`{_in_turns(pair)}` measures both in turns{_compiled(pair)}"
        return f"{turns}; or measure {which} with {repeat} instead of --interleave"
    return f"Measure {_commands(pair, sides, repeat, which)}"


def how_to_measure_again(pair: Json, sides: Sequence[str]) -> str:
    """Return how to replace the INVALID measurements of these sides of a PAIR, as `how_to_decide`."""
    if pair["latency"]["method"] == "paired":
        return f"Measure both again with `{_in_turns(pair)} --require-valid`{_compiled(pair)}"
    which = "both" if len(sides) > 1 else f"the {sides[0]}"
    runs = max(pair[side]["runs"] or 1 for side in sides)
    options = "--require-valid --retry-invalid 2"
    if runs > 1:
        return f"Measure {_commands(pair, sides, f'--repeat {runs} {options}', f'{which} again')}"
    return f"Measure {_commands(pair, sides, options, f'{which} again')}, or with --repeat {_RUNS}"


def how_to_decide_rates(pair: Json) -> str:
    """Return how to find out how a language model's rates compare, as `how_to_decide`: fresh processes on each side."""
    points = pair["generation"]["points"]
    lengths, depths = (dict.fromkeys(str(point[key]) for point in points) for key in ("prompt_tokens", "depth"))
    options = f"--generate N --prompt-tokens {','.join(lengths)} --depth {','.join(depths)} --repeat {_RUNS}"
    return f"Measure {_commands(pair, SIDES, options, 'each', of_text=True)}"


def _longer_in_turns(pair: Json) -> str:
    timed_s = max(pair[side]["timed_ns"] or 0 for side in SIDES) / 1e9
    if timed_s > _MAX_TIME_S / 2:
        what = f"Both were measured in turns for {timed_s:.0f} s already"
        return f"{what}: allow a larger difference, or measure them on a device with less variation"
    min_time_s = min(_MAX_TIME_S, max(_MIN_TIME_S, math.ceil(_LONGER * timed_s)))
    return f"`{_in_turns(pair)} --min-time {min_time_s}` measures both in turns for longer{_compiled(pair)}"


def _commands(pair: Json, sides: Sequence[str], options: str, which: str, *, of_text: bool = False) -> str:
    """Return a command for each of the sides, or one if they are equal: `each with COMMAND`."""
    commands = {side: _alone(pair, side, options, of_text=of_text) for side in sides}
    if len(set(commands.values())) == 1:
        return f"{which} with `{commands[sides[0]]}`"
    return " and ".join(f"the {side} with `{command}`" for side, command in commands.items())


def _runs(pair: Json, side: str) -> int:
    """Return how many runs to measure: twice as many as there are."""
    return min(_MAX_RUNS, max(_RUNS, 2 * (pair[side]["runs"] or 1)))


def _can_share(pair: Json) -> bool:
    """Return whether one command can repeat the circumstances of both sides."""
    base, candidate = pair["base"], pair["candidate"]
    is_same = list(_circumstances(base)) == list(_circumstances(candidate)) and base["inputs"] == candidate["inputs"]
    return is_same and not _has_data(pair)


def _in_turns(pair: Json) -> str:
    """Return the command that measures both sides in turns."""
    programs, needs_inputs = _both_programs(pair)
    parts = ("etfarm bench", programs, "--interleave", *_circumstances(pair["candidate"]), needs_inputs)
    return " ".join(filter(None, parts))


def _alone(pair: Json, side: str, options: str, *, of_text: bool = False) -> str:
    """Return the command that measures one side with further options.

    Args:
        of_text: whether it measures the generation of text, which has no method of its own, and inputs only of encoders.
    """
    named = pair[side]
    has_examples = bool(named["recipe"])
    program = f"MODEL --recipe {shlex.quote(named['recipe'])}" if has_examples else _file(pair, side)
    data = "--data DATA.ptd" if _has_data(pair, side) else ""
    inputs = _inputs(named, has_examples=has_examples)
    circumstances = _circumstances({**named, "method": "forward"} if of_text else named)
    return " ".join(filter(None, ("etfarm bench", program, options, *circumstances, data, inputs)))


def _file(pair: Json, side: str) -> str:
    """Return the name of a side's program as a file: that of a ready program, unless the other side has another one so named."""
    names = [pair[each]["model"] for each in SIDES if not pair[each]["recipe"]]
    name = pair[side]["model"]
    is_one = names.count(name) == 1 or (pair["latency"] or pair["generation"])["same_program"]
    is_known = not pair[side]["recipe"] and is_one and _PLAIN.fullmatch(name or "")
    return f"{name if is_known else side}.pte"


def _both_programs(pair: Json) -> tuple[str, str]:
    """Return the arguments that name both programs, and the option for their inputs; the latter is empty without need.

    One command measures two models with one recipe, or one model with two recipes. Anything else are two files: a recipe of the
    command would apply to both.
    """
    base = pair["base"]
    recipes = [pair[side]["recipe"] for side in SIDES]
    if _are_compiled_alike(pair):
        models = "BASE_MODEL CANDIDATE_MODEL" if recipes[0] == recipes[1] else "MODEL"
        arguments = " ".join(f"--recipe {shlex.quote(recipe)}" for recipe in dict.fromkeys(recipes))
        return f"{models} {arguments}", _inputs(base, has_examples=True)
    return " ".join(_file(pair, side) for side in SIDES), _inputs(base, has_examples=False)


def _are_compiled_alike(pair: Json) -> bool:
    """Return whether one command compiles both sides again: they differ by the model only, or by the recipe only."""
    base, candidate = pair["base"], pair["candidate"]
    if not (base["recipe"] and candidate["recipe"]):
        return False
    is_other_model = base["model"] != candidate["model"] or any(change["what"] == "model" for change in pair["changes"])
    return bool(is_other_model != (base["recipe"] != candidate["recipe"]))


def _compiled(pair: Json) -> str:
    """Return how to get the files that `_both_programs` names and that a recipe makes; empty if there are none."""
    if _are_compiled_alike(pair):
        return ""
    recipes = {_file(pair, side): pair[side]["recipe"] for side in SIDES if pair[side]["recipe"]}
    commands = [f"`etfarm compile MODEL --recipe {shlex.quote(recipe)} -o {file}`" for file, recipe in recipes.items()]
    return f", after {' and '.join(commands)}" if commands else ""


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
