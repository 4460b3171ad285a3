"""`Generate`, the options of a measurement of generated text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, SupportsIndex

from etfarm.client.submit.options import to_list
from etfarm.client.submit.token_files import read_tokens
from etfarm.v1 import generation_pb2
from etfarm.wire.errors import EtfarmError, error_for

DEFAULT_TOKENS: Final = 128


@dataclass(frozen=True)
class Generate:
    """What to measure of a language model: its rate of prefill by prompt length, and of decode, at depths of the context.

    The tokens of contexts and prompts are random but always the same; generation is greedy, and no token ends it.
    """

    tokens: int = DEFAULT_TOKENS
    """Number of tokens that each repetition generates, at least 2."""
    prompt_tokens: int | Sequence[int] = ()
    """Prompt lengths; when empty, those of 128 and 512 that fit into the context."""
    depths: int | float | str | Sequence[int | float | str] = ()
    """Numbers of tokens in the context before the prompt: whole numbers, or shares of the largest depth that leaves room for the
    prompt and the generated tokens, such as 0.75 or "75%"; when empty, 0 and 0.75."""
    repetitions: int | None = None
    """Number of timed repetitions for each prompt length at each depth; 5 when None."""
    warmup: int | None = None
    """Number of repetitions before these; 1 when None."""
    prefill_method: str = ""
    """The method that processes the prompt; recognized by its name and inputs when empty."""
    decode_method: str = ""
    """The method that generates single tokens; recognized by its name and inputs when empty."""
    text: Sequence[int] | str | Path = ()
    """The tokens of a text, or a file with them (see `read_tokens`), to measure the accuracy of the logits and the perplexity on;
    at most 16,384. When empty, the accuracy is measured on drawn tokens."""
    accuracy_tokens: int | None = None
    """Number of drawn tokens, 2 to 4,096; 0 to measure no accuracy, 64 when None."""

    def __post_init__(self) -> None:
        """Check the values that the server cannot check.

        Raises:
            BAD_OPTION: a depth is neither a number of tokens nor a share, or a number needs more than 32 bits.
            BAD_TEXT_FILE: the file of a text cannot be read.
        """
        self.message()

    def message(self) -> generation_pb2.GenerationOptions:
        """Return the options as a part of a Measurement."""
        depths = [self.depths] if isinstance(self.depths, int | float | str) else list(self.depths)
        counts: dict[str, list[int | None]] = {
            "tokens": [self.tokens], "prompt_tokens": [*to_list(self.prompt_tokens)], "repetitions": [self.repetitions],
            "warmup": [self.warmup], "accuracy_tokens": [self.accuracy_tokens],
        }  # fmt: skip
        for name, values in counts.items():
            for value in values:
                if value is not None:
                    _require_count(name, value)
        return generation_pb2.GenerationOptions(
            tokens=self.tokens,
            prompt_tokens=to_list(self.prompt_tokens),
            depths=[_depth(each) for each in depths],
            repetitions=self.repetitions,
            warmup=self.warmup,
            prefill_method=self.prefill_method,
            decode_method=self.decode_method,
            text=read_tokens(Path(self.text)) if isinstance(self.text, str | Path) else _tokens_of(self.text),
            accuracy_tokens=self.accuracy_tokens,
        )


def _tokens_of(tokens: Sequence[int]) -> list[int]:
    for token in tokens:
        _require_count("text", token)
    return [int(token) for token in tokens]


def _depth(depth: int | float | str) -> generation_pb2.ContextDepth:
    """Return a depth: a whole number is a number of tokens, any other a share."""
    if isinstance(depth, str):
        text = depth.strip()
        try:
            depth = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
        except ValueError:
            raise _bad_depth(text) from None
    if isinstance(depth, float):
        if not 0 <= depth <= 1:
            raise _bad_depth(depth)
        return generation_pb2.ContextDepth(share=depth)
    _require_count("depths", depth)
    return generation_pb2.ContextDepth(tokens=depth)


def _require_count(option: str, value: int) -> None:
    """Require a number that a message can hold; the server knows the limits of each.

    Raises:
        BAD_OPTION: it is negative, too large, or no whole number.
    """
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not is_whole or not 0 <= value < 1 << 31:
        raise error_for(
            "BAD_OPTION",
            f"`{option}` must be a whole number of 0 or more with at most 31 bits, got {str(value)[:40]}.",
            "Give a number such as 128.", option=option,
        )  # fmt: skip


def _bad_depth(depth: object) -> EtfarmError:
    return error_for(
        "BAD_OPTION",
        f"A depth must be a number of tokens or a share of the context, got {depth!r}.",
        "Give for example 1024, 0.75 or '75%'.", option="depths",
    )  # fmt: skip


def options_of(generate: Generate | int | None) -> generation_pb2.GenerationOptions | None:
    """Return the keyword `generate` as a part of a Measurement; a number stands for that many tokens."""
    if generate is None:
        return None
    return (Generate(generate) if isinstance(generate, int) else generate).message()
