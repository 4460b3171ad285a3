"""Files with the tokens of a text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from etfarm.wire.errors import error_for
from etfarm.wire.generation import MAX_TEXT

_REMEDY: Final = "Give a .npy of integers with one dim, or a text file with whole numbers between spaces, commas or lines."
_MAX_BYTES: Final = 32 * MAX_TEXT
"""Maximum size of a file, which is more than any number of MAX_TEXT tokens needs."""
_SHOWN: Final = 40


def read_tokens(path: Path, *, least: int = 2) -> list[int]:
    """Return the tokens of a file.

    A `.npy` holds one dim of integers, as `numpy.save` writes it. Any other file is a text of whole numbers between white space
    or commas; brackets around them, as in JSON, are ignored.

    Args:
        least: minimum number of tokens.

    Raises:
        BAD_TEXT_FILE: it cannot be read, is too large, has fewer than `least` or more than 16,384 tokens, or has something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise error_for("BAD_TEXT_FILE", f"{path} cannot be read: {error.strerror or error}.", _REMEDY, path=str(path)) from None
    if len(data) > _MAX_BYTES:
        raise error_for(
            "BAD_TEXT_FILE",
            f"{path} has more than {_MAX_BYTES:,} bytes; a text has at most {MAX_TEXT:,} tokens.",
            "Give a part of it.",
            path=str(path),
        )
    tokens = _of_array(path) if path.suffix == ".npy" else _of_text(path, data)
    if not least <= len(tokens) <= MAX_TEXT:
        raise error_for(
            "BAD_TEXT_FILE",
            f"{path} has {len(tokens):,} tokens; {least} to {MAX_TEXT:,} are possible.",
            "Give a longer text, or a part of it.",
            path=str(path),
        )
    for index, token in enumerate(tokens):
        if not 0 <= token < 1 << 31:
            raise error_for(
                "BAD_TEXT_FILE", f"Token {index:,} of {path} is {token}, which is no id of a token.", _REMEDY, path=str(path)
            )
    return tokens


def _of_array(path: Path) -> list[int]:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise error_for("BAD_TEXT_FILE", f"{path} is no .npy: {error}.", _REMEDY, path=str(path)) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise error_for("BAD_TEXT_FILE", f"{path} has {what} instead of one dim of integers.", _REMEDY, path=str(path))
    return [int(token) for token in array]


def _of_text(path: Path, data: bytes) -> list[int]:
    words = re.split(r"[\s,]+", data.decode(errors="replace").strip().removeprefix("[").removesuffix("]").strip())
    tokens = []
    for index, word in enumerate(word for word in words if word):
        if not re.fullmatch(r"-?[0-9]{1,20}", word):
            raise error_for(
                "BAD_TEXT_FILE", f"Token {index:,} of {path} is {word[:_SHOWN]!r}, not a whole number.", _REMEDY, path=str(path)
            )
        tokens.append(int(word))
    return tokens
