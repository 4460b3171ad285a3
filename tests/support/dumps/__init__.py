"""Facts of real boards, servers and phones, taken from public dumps; each file begins with its source and licence.

`@ PATH` begins a fact, which ends at the next; `{0-3}` in it, and in a `processor` line of /proc/cpuinfo, stands for as many
facts or blocks that are the same but for the number. Serial numbers are left out; what a dump lacks is no fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
_RANGE: Final = re.compile(r"\{(\d+)-(\d+)\}")


def names() -> list[str]:
    """Return the devices that there are facts of."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def load(name: str) -> dict[str, str]:
    """Return a device's facts, as `inventory.parse` takes them."""
    facts: dict[str, str] = {}
    # What stands before the first fact says where they are from.
    for section in re.split(r"^@ ", (FOLDER / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]:
        path, _, text = section.partition("\n")
        if path == "/proc/cpuinfo":
            blocks = text.rstrip("\n").split("\n\n")
            facts[path] = "\n\n".join(one for block in blocks for one in _expanded(block)) + "\n"
        else:
            facts |= dict.fromkeys(_expanded(path), text)
    return facts


def _expanded(text: str) -> Iterator[str]:
    """`a{0-1}b` gives a0b and a1b; what has no range, itself."""
    result = _RANGE.search(text)
    if result is None:
        yield text
        return
    for number in range(int(result.group(1)), int(result.group(2)) + 1):
        yield text.replace(result.group(), str(number), 1)
