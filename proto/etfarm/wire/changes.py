"""The differences between the circumstances of two measurements, which may explain why their numbers changed.

Takes two REPORTs of etfarm.report/1. Pure. The numbers themselves are compared in `etfarm.wire.comparison`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypedDict

WARMER_C: Final = 5.0
"""Minimum difference of the hottest zone before the timed pass, in degrees Celsius; smaller ones are normal fluctuation."""

DIGEST_CHARACTERS: Final = 8
"""Number of characters of a digest that are shown."""

Report = Mapping[str, Any]


class Change(TypedDict):
    """One difference. `base` and `candidate` are JSON values; null means absent, as for a runner without a bundle."""

    what: str
    """Human-readable name of what differs, stable for programs: one of `WHATS`."""
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
"""Inputs of the compilation as (what, section, key)."""

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
"""The inputs; shown by their shapes if those differ as well."""

_PROGRAM: Final = ("program", "compile.program", "digest")
"""The program; reported if none of its known inputs explains the difference, such as after a change of calibration samples."""

_PROGRAMS: Final = frozenset(what for what, _, _ in (*_MADE_FROM, _PROGRAM))

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

_STATE: Final = ("governor", "frequency limit", "temperature", "throttled", "charging")

WHATS: Final = (*(what for what, _, _ in (*_MADE_FROM, _PROGRAM, _INPUTS, *_RUN_BY)), *_STATE, "analyzing etfarm")
"""Every possible `what`, in the order of the results."""

_DIGESTS: Final = frozenset({"model", "recipe", "program", "inputs", "runner bundle"})


def changes(base: Report, candidate: Report) -> list[Change]:
    """Return the differences between the circumstances of two reports, in the order of `WHATS`.

    A part that one of the two lacks (it failed earlier, or is only compiled) is not compared. In the device's state,
    `frequency limit` is the highest limit of any cpu, in Hz; `temperature` is that of the hottest zone before the timed pass, in
    degrees Celsius, reported from a difference of `WARMER_C`; `throttled` is whether a cooling device was active.
    """
    differences = [*_differing(base, candidate, _MADE_FROM)]
    if not differences:
        differences += _differing(base, candidate, (_PROGRAM,))
    differences += _inputs(base, candidate)
    differences += _differing(base, candidate, _RUN_BY)
    before, after = _state(base), _state(candidate)
    for what in _STATE:
        old, new = before.get(what), after.get(what)
        if old is None or new is None or old == new:
            continue
        if what != "temperature" or abs(new - old) >= WARMER_C:
            differences.append(Change(what=what, base=old, candidate=new))
    differences += _differing(base, candidate, (("analyzing etfarm", "analysis", "version"),))
    return differences


def is_other_program(differences: Iterable[Change]) -> bool:
    """Return whether differences include the program or what it was compiled from."""
    return any(change["what"] in _PROGRAMS for change in differences)


def sentence(change: Change) -> str:
    """Return a short text of a change, such as `torch 2.12.0 -> 2.13.0` or `temperature 41 -> 62 °C`."""
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
        old, new = _section(base, section), _section(candidate, section)
        if old is not None and new is not None and old.get(key) != new.get(key):
            yield Change(what=what, base=old.get(key), candidate=new.get(key))


def _inputs(base: Report, candidate: Report) -> Iterator[Change]:
    """Yield the change of the inputs, with shapes such as "x float32[1, 3, 32, 32]" instead of digests if those differ."""
    for change in _differing(base, candidate, (_INPUTS,)):
        old, new = _shapes(base), _shapes(candidate)
        yield Change(what="inputs", base=old, candidate=new) if old and new and old != new else change


def _shapes(report: Report) -> str:
    tensors = report["inputs"]["tensors"] or ()
    return ", ".join(f"{tensor['name']} {tensor['dtype']}{tensor['shape']}".strip() for tensor in tensors)


def _section(report: Report, path: str | None) -> Mapping[str, Any] | None:
    section: Mapping[str, Any] | None = report
    for name in path.split(".") if path else ():
        section = section.get(name) if section is not None else None
    return section


def _state(report: Report) -> dict[str, Any]:
    """Return the device's state before the timed pass; unreported values are left out or None."""
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
