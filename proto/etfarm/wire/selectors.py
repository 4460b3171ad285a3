"""Device selectors: `arch=aarch64,memory>=2GiB,feature=i8mm,label.rack=3`. Parsing and matching are pure functions.

Values are compared case-insensitively. For soc, model and os, which people abbreviate, some consecutive words are enough:
`os=Android 14` matches "Android 14 (API 34), Linux 6.1.25", and `model=Pixel 8` does not match "Google Pixel 8a".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.v1.device_pb2 import Device

KEYS: Final = ("id", "name", "arch", "soc", "model", "os", "memory", "cores", "feature", "backend", "emulated", "label.KEY")
_WORDY: Final = ("soc", "model", "os")
_NUMERIC: Final = ("memory", "cores")
# Patterns that need a single pass: selectors are untrusted, and backtracking over blanks would take quadratic time.
_COMPARISON = re.compile(r"([a-z][a-zA-Z0-9_.\-]*)\s*(>=|<=|!=|=)(?!=)")
_NAME = re.compile(r"[\w.\-]{1,100}\Z")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s{0,9}([KMGT]i?B|B)?\Z")
_UNITS: dict[str, int] = {"B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", 1)}


MAX_CHARACTERS: Final = 4096
"""Maximum length of a selector."""

MAX_TERMS: Final = 64
"""Maximum number of terms of a selector."""


_MAX_LABELS: Final = 1_000
"""Maximum number of labels that a mistyped one is compared with."""


@dataclass(frozen=True)
class Term:
    """A comparison. `value` is a number for memory (bytes) and cores, a bool for emulated, else text."""

    key: str
    operator: str
    value: str | float | bool


@dataclass(frozen=True)
class Selector:
    """A conjunction of terms; without terms it matches every device."""

    terms: tuple[Term, ...] = ()

    def matches(self, device: Device) -> bool:
        """Return whether every term holds for `device`. A device that lacks a key matches only `!=`."""
        return all(_holds(term, device) for term in self.terms)


def parse(text: str) -> Selector:
    """Return the selector in `text`, ignoring blanks around terms.

    Raises:
        UNKNOWN_SELECTOR_KEY: a key is not in `KEYS`.
        BAD_SELECTOR: the text is too long or has too many terms, a term is not KEY OP VALUE, or its value has the wrong type.
    """
    if len(text) > MAX_CHARACTERS:
        raise error_for(
            "BAD_SELECTOR",
            f"A selector must have at most {MAX_CHARACTERS} characters, got {len(text)}.", "Select by `id` or a label.",
            limit=MAX_CHARACTERS, got=len(text),
        )  # fmt: skip
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > MAX_TERMS:
        raise error_for(
            "BAD_SELECTOR",
            f"A selector must have at most {MAX_TERMS} terms, got {len(parts)}.", "Select by `id` or a label.",
            limit=MAX_TERMS, got=len(parts),
        )  # fmt: skip
    return Selector(tuple(_term(part) for part in parts))


def hint_label(selector: Selector, devices: Iterable[Device]) -> str:
    """Return a sentence that names the nearest label for one that no device has; empty if all labels exist, or none is near."""
    wanted = [term.key.removeprefix("label.") for term in selector.terms if term.key.startswith("label.")]
    if not wanted:
        return ""
    known = {key for device in devices for key in device.labels}
    for key in wanted:
        if key not in known and (near := difflib.get_close_matches(key, sorted(known)[:_MAX_LABELS], n=1)):
            return f"No device has a label {key!r}; did you mean 'label.{near[0]}'? "
    return ""


def _term(text: str) -> Term:
    bare = text.strip()
    comparison = _COMPARISON.match(bare)
    if comparison is None or "\n" in bare[comparison.end() :].strip():
        key, colon, value = bare.partition(":")
        hint = f"To select a device by its name, give name={bare}. " if _NAME.match(bare) else ""
        hint = f"Give {key}={value}. " if colon and key in KEYS and _NAME.match(value) else hint
        raise error_for(
            "BAD_SELECTOR",
            f"The selector {bare!r} is not KEY OP VALUE.",
            f"{hint}Keys: {', '.join(KEYS)}; operators: = != >= <=.",
            term=text,
        )
    key, operator = comparison.groups()
    value = bare[comparison.end() :].strip()
    if key not in KEYS and not (key.startswith("label.") and len(key) > len("label.")):
        near = _nearest(key)
        hint = f" Did you mean {near!r}?" if near else ""
        raise error_for(
            "UNKNOWN_SELECTOR_KEY", f"Devices have no {key!r} to select by.{hint}", f"Keys: {', '.join(KEYS)}.", key=key
        )
    if not value:
        raise error_for("BAD_SELECTOR", f"The selector {bare!r} has no value.", "Give KEY=VALUE.", term=text)
    if key in _NUMERIC:
        return Term(key, operator, _number(key, value))
    if operator in (">=", "<="):
        raise error_for(
            "BAD_SELECTOR", f"{key!r} is text, {operator} compares numbers.", f"Numbers: {', '.join(_NUMERIC)}.", term=text
        )
    if key == "emulated":
        if value.lower() not in ("true", "false"):
            raise error_for(
                "BAD_SELECTOR", f"'emulated' is true or false, not {value!r}.", "Give emulated=true or emulated=false.", term=text
            )
        return Term(key, operator, value.lower() == "true")
    return Term(key, operator, value)


def _nearest(key: str) -> str:
    """Return the key that a mistyped one resembles; empty if there is none."""
    prefix, dot, label = key.partition(".")
    if dot and label and difflib.get_close_matches(prefix, ["label"]):
        return f"label.{label}"
    near = difflib.get_close_matches(key.lower(), KEYS, n=1) or difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.5)
    return near[0] if near else ""


def _number(key: str, value: str) -> float:
    match = _SIZE.match(value)
    if match is None or (key == "cores" and match.group(2)):
        example = "memory>=2GiB" if key == "memory" else "cores>=4"
        raise error_for(
            "BAD_SELECTOR", f"{key!r} must be a number, got {value!r}.", f"Give for example {example}.", key=key, value=value
        )
    return float(match.group(1)) * _UNITS[match.group(2) or "B"]


_VALUES: Final[dict[str, Callable[[Device], Sequence[str | float | bool]]]] = {
    "id": lambda device: (device.id,),
    "name": lambda device: (device.name,),
    "arch": lambda device: (device.arch,),
    "soc": lambda device: (device.soc,),
    # `model` is empty if it would repeat `soc`.
    "model": lambda device: (device.model or device.soc,),
    "os": lambda device: (device.os,),
    "memory": lambda device: (float(device.memory_bytes),),
    "cores": lambda device: (float(device.cores),),
    "feature": lambda device: tuple(device.features),
    "backend": lambda device: tuple(device.backends),
    "emulated": lambda device: (device.emulated,),
}


def _holds(term: Term, device: Device) -> bool:
    if term.key.startswith("label."):
        label = term.key.removeprefix("label.")
        values: Sequence[str | float | bool] = (device.labels[label],) if label in device.labels else ()
    else:
        values = _VALUES[term.key](device)
    if term.operator in ("=", "!="):
        equal = _has_words if term.key in _WORDY else _equal
        return any(equal(value, term.value) for value in values) == (term.operator == "=")
    wanted = float(term.value)
    return any(float(value) >= wanted if term.operator == ">=" else float(value) <= wanted for value in values)


def _equal(value: str | float | bool, wanted: str | float | bool) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return value == wanted


def _has_words(value: str | float | bool, wanted: str | float | bool) -> bool:
    """Return whether the value contains the wanted words consecutively."""
    words, wanted_words = (re.findall(r"[^\s,()]+", str(text).lower()) for text in (value, wanted))
    return _equal(value, wanted) or any(
        wanted_words == words[at : at + len(wanted_words)] for at in range(len(words) if wanted_words else 0)
    )
