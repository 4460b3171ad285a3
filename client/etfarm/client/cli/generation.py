"""The options of `etfarm bench` for language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import error_for
from etfarm.wire.generation import (
    DEFAULT_ACCURACY_TOKENS,
    DEFAULT_DEPTH_SHARES,
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_REPETITIONS,
    MAX_REPETITIONS,
    MAX_TOKENS,
    MIN_TOKENS,
)
from etfarm.wire.options import Option, Range, chosen_of, options

if TYPE_CHECKING:
    from etfarm.client.submit.generate import Generate
    from etfarm.wire.measurement import MeasurementOptions

_MAX_DIGITS: Final = 20


def _read(
    tokens: int | None,
    prompt_tokens: str | None,
    depth: str | None,
    repetitions: int | None,
    tokens_file: Path | None,
    accuracy_tokens: int | None,
    prefill_method: str,
    decode_method: str,
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


@dataclass(frozen=True)
class GenerationOptions:
    """What a benchmark generates with language models."""

    # fmt: off
    generate: Generate | None = options(
        Option(
            flag="--generate", read=int, metavar="N", range=Range(MIN_TOKENS, MAX_TOKENS),
            help="Language models: measure prefill, and decode of N tokens."),
        Option(
            flag="--prompt-tokens", metavar="N[,N]...", without=",".join(map(str, DEFAULT_PROMPT_TOKENS)),
            help="Prompt lengths for --generate."),
        Option(
            flag="--depth", metavar="D[,D]...",
            without=",".join(f"{share:.0%}" if share else "0" for share in DEFAULT_DEPTH_SHARES),
            help="Tokens before the prompt, as 1024 or 75% of the room."),
        Option(
            flag="--repetitions", read=int, metavar="N", range=Range(1, MAX_REPETITIONS), without=str(DEFAULT_REPETITIONS),
            help="Repetitions for each length and depth."),
        Option(
            flag="--tokens", read=Path, metavar="FILE", without="random",
            help="A text's tokens, for accuracy and perplexity."),
        Option(
            flag="--accuracy-tokens", read=int, metavar="N", range=Range(0, MAX_TOKENS), without=str(DEFAULT_ACCURACY_TOKENS),
            help="Number of random tokens for accuracy; 0 for none."),
        Option(flag="--prefill-method", default="", metavar="M", without="recognized", help="The method for prompts."),
        Option(flag="--decode-method", default="", metavar="M", without="recognized", help="The method for single tokens."),
        build=_read, default=None,
    )
    # fmt: on


def refuse_others(measurement: MeasurementOptions, others: Mapping[str, object]) -> None:
    """Refuse options that have no meaning for generation.

    Args:
        others: values of the command's own such options, by their flags.

    Raises:
        USAGE: one of them is set.
    """
    chosen = [flag for flag, value in others.items() if _is_set(value)]
    chosen += [each.flag for each in chosen_of(measurement) if not each.with_generation]
    if chosen:
        raise error_for(
            "USAGE",
            f"{chosen[0]} cannot be combined with --generate, which has its own inputs and repetitions.",
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
