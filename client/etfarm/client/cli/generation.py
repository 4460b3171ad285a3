"""The options of `etfarm bench` for language models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.submit.generate import Generate

_MAX_DIGITS: Final = 20


def options_of(
    tokens: int | None,
    *,
    prompt_tokens: str | None,
    depth: str | None,
    repetitions: int | None,
    prefill_method: str,
    decode_method: str,
    tokens_file: Path | None = None,
    accuracy_tokens: int | None = None,
) -> Generate | None:
    """Return what `--generate` and the options that belong to it request; None without it.

    Raises:
        USAGE: an option requires `--generate`, or a prompt length is no number.
        BAD_OPTION: a depth is neither a number of tokens nor a share.
        BAD_TEXT_FILE: the file of `--tokens` is not one of tokens.
    """
    belonging = {
        "--prompt-tokens": prompt_tokens, "--depth": depth, "--repetitions": repetitions, "--prefill-method": prefill_method,
        "--decode-method": decode_method, "--tokens": tokens_file, "--accuracy-tokens": accuracy_tokens,
    }  # fmt: skip
    if tokens is None:
        if chosen := next((name for name, value in belonging.items() if _is_set(value)), None):
            raise error_for("USAGE", f"{chosen} requires --generate.", "Give --generate too, for example --generate 128.")
        return None
    from etfarm.client.submit.generate import Generate

    return Generate(
        tokens,
        prompt_tokens=[_length(part) for part in (prompt_tokens or "").split(",") if part.strip()],
        depths=[part for part in (depth or "").split(",") if part.strip()],
        repetitions=repetitions,
        prefill_method=prefill_method,
        decode_method=decode_method,
        text=tokens_file or (),
        accuracy_tokens=accuracy_tokens,
    )


def refuse_others(options: Mapping[str, object]) -> None:
    """Refuse options that have no meaning for generation.

    Raises:
        USAGE: one of them is set.
    """
    if chosen := next((name for name, value in options.items() if _is_set(value)), None):
        raise error_for(
            "USAGE",
            f"{chosen} cannot be combined with --generate, which has its own inputs and repetitions.",
            "Leave one of them out.",
        )


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != ""


def _length(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > _MAX_DIGITS:
        raise error_for(
            "USAGE",
            f"--prompt-tokens {text.strip()[:40]!r} is not a number of tokens.",
            "Give for example --prompt-tokens 128,512.",
        )
    return int(text)
