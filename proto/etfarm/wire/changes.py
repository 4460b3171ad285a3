"""Step 10: what is another between two measurements of a series, which is where a change of their numbers may come from.

Takes two REPORTs of etfarm.report/1. Pure; comparing the numbers themselves is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict

WARMER_C: Final = 5.0
"""By so many degrees Celsius the hottest zone must differ before the timed pass for that to be told: less is any minute's."""

DIGEST_CHARACTERS: Final = 8
"""What is shown of a digest."""

Report = Mapping[str, Any]


class Change(TypedDict):
    """One thing that differs. `base` and `candidate` are JSON values: null is "none", as for a runner without a bundle."""

    what: str
    """For people, and stable for programs: one of `WHATS`."""
    base: Any
    candidate: Any


_MADE_FROM: Final = (
    ("model", "model", "digest"),
    ("recipe", None, "recipe_digest"),
    ("torch", "compile.toolchain", "torch"),
    ("executorch", "compile.toolchain", "executorch"),
    ("torchao", "compile.toolchain", "torchao"),
    ("compiling etfarm", "compile.toolchain", "etfarm"),
)
"""(what, section, key): all that makes a program."""

_RUN_BY: Final = (
    ("method", None, "method"),
    ("threads", None, "threads"),
    ("device", "device", "id"),
    ("system", "device", "os"),
    ("memory of the device", "device", "memory_bytes"),
    ("runner", "runner", "kind"),
    ("runner's executorch", "runner", "executorch"),
    ("runner bundle", "runner", "bundle_digest"),
    ("cores", "runner", "cores"),
)

_INPUTS: Final = ("inputs", "inputs", "digest")
"""Their shapes, where those are others as well."""

_PROGRAM: Final = ("program", "compile.program", "digest")
"""Told where nothing of what it is made from says why it is another: calibration samples, or shapes of the inputs."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

_STATE: Final = ("governor", "frequency limit", "temperature", "throttled", "charging")

WHATS: Final = (*(what for what, _, _ in (*_MADE_FROM, _PROGRAM, _INPUTS, *_RUN_BY)), *_STATE, "analyzing etfarm")
"""Every `what` that there is, in the order in which they are given."""

_DIGESTS: Final = frozenset({"model", "recipe", "program", "inputs", "runner bundle"})


def changes(base: Report, candidate: Report) -> list[Change]:
    """What differs of how the two came about, in the order of `WHATS`; empty where nothing that is known does.

    A part that one of the two does not have (it failed before, or is only compiled) is not compared. Of the device's state,
    `frequency limit` is the highest one that any cpu may use, in Hz; `temperature` that of the hottest zone before the timed
    pass, in degrees Celsius, told from `WARMER_C` on; `throttled` whether something was slowed down against heat.
    """
    found = [*_differing(base, candidate, _MADE_FROM)]
    if not found:
        found += _differing(base, candidate, (_PROGRAM,))
    found += _inputs(base, candidate)
    found += _differing(base, candidate, _RUN_BY)
    before, after = _state(base), _state(candidate)
    for what in _STATE:
        one, other = before.get(what), after.get(what)
        if one is None or other is None or one == other:
            continue
        if what != "temperature" or abs(other - one) >= WARMER_C:
            found.append(Change(what=what, base=one, candidate=other))
    found += _differing(base, candidate, (("analyzing etfarm", "analysis", "version"),))
    return found


def sentence(change: Change) -> str:
    """A change in a few words: `torch 2.12.0 -> 2.13.0`, `governor powersave -> performance`, `temperature 41 -> 62 °C`."""
    what = change["what"]
    unit = {"temperature": " °C", "frequency limit": " GHz", "memory of the device": " GiB"}.get(what, "")
    return f"{what} {_shown(what, change['base'])} -> {_shown(what, change['candidate'])}{unit}"


def _shown(what: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if what in _DIGESTS and _DIGEST.fullmatch(str(value)):
        return str(value)[:DIGEST_CHARACTERS]
    if what == "frequency limit":
        return f"{value / 1e9:.2f}"
    if what == "memory of the device":
        return f"{value / (1 << 30):.1f}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _differing(base: Report, candidate: Report, facts: tuple[tuple[str, str | None, str], ...]) -> Iterator[Change]:
    for what, section, key in facts:
        one, other = _section(base, section), _section(candidate, section)
        if one is not None and other is not None and one.get(key) != other.get(key):
            yield Change(what=what, base=one.get(key), candidate=other.get(key))


def _inputs(base: Report, candidate: Report) -> Iterator[Change]:
    """Of inputs whose shapes are others the shapes, as "x float32[1, 3, 32, 32]", which say more than digests."""
    for change in _differing(base, candidate, (_INPUTS,)):
        one, other = _shapes(base), _shapes(candidate)
        yield Change(what="inputs", base=one, candidate=other) if one and other and one != other else change


def _shapes(report: Report) -> str:
    tensors = report["inputs"]["tensors"] or ()
    return ", ".join(f"{tensor['name']} {tensor['dtype']}{tensor['shape']}".strip() for tensor in tensors)


def _section(report: Report, path: str | None) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = report
    for name in path.split(".") if path else ():
        found = found.get(name) if found is not None else None
    return found


def _state(report: Report) -> dict[str, Any]:
    """The device's state before the timed pass; what it did not tell is left out."""
    reading = _section(report, "telemetry.before")
    if reading is None:
        return {}
    cpus = reading.get("cpus") or ()
    governors = sorted({cpu["governor"] for cpu in cpus if cpu["governor"]})
    limits = [cpu["limit_hz"] for cpu in cpus if cpu["limit_hz"]]
    zones = [zone["temperature_c"] for zone in reading.get("zones") or () if zone["temperature_c"] is not None]
    cooling = [device["state"] for device in reading.get("cooling") or ()]
    return {
        "governor": ", ".join(governors) or None,
        "frequency limit": max(limits, default=None),
        "temperature": max(zones, default=None),
        "throttled": any(state > 0 for state in cooling) if cooling else None,
        "charging": reading.get("charging"),
    }
