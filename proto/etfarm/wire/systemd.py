"""The text of systemd units: words quoted so that systemd reads them literally, and the program that a unit starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from etfarm.wire.errors import UserError

_PLAIN: Final = re.compile(r"[\w@+=:,./\[\]-]+", re.ASCII)
_ESCAPES: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t", "%": "%%"}


def quoted(text: str) -> str:
    """Return one word of a setting. Dollar signs need no escape: ExecStart's colon disables them. Source: systemd.syntax(7)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!a} is not UTF-8, which a systemd unit requires.", "Rename it.", argument=ascii(text)) from None
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(_ESCAPES.get(c, c if ord(c) >= 0x20 and c != "\x7f" else f"\\x{ord(c):02x}") for c in text) + '"'


def own_program() -> list[str]:
    """Return the absolute path of the command `etfarm` of this installation, and what follows it."""
    script = Path(sys.executable).with_name("etfarm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "etfarm.wire.command"]


def without_options(arguments: Sequence[str], excluded: Sequence[tuple[str, str]]) -> list[str]:
    """Return the arguments without some options.

    Args:
        excluded: options without a value, each with the shortest abbreviation that argparse accepts.
    """
    return [
        argument
        for argument in arguments
        if not any(name.startswith(argument) and argument.startswith(shortest) for name, shortest in excluded)
    ]
