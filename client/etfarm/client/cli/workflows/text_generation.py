"""`etfarm generate`: a session on a device, whose tokens are printed as they come, and their rate at the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.terminal.capabilities import printable, tell
from etfarm.client.cli.terminal.progress import open_progress
from etfarm.client.cli.workflows.job import import_torch
from etfarm.client.export.spec import ModelSpec
from etfarm.client.formats import units
from etfarm.client.models import Device
from etfarm.client.sessions.text import GeneratedTokens
from etfarm.client.submit.prepared import PreparedModel
from etfarm.client.submit.tokenizer import Tokenizer
from etfarm.client.transport import daemon_thread
from etfarm.wire.recipes import Recipe

_REASONS = {
    "LENGTH": "", "STOP_TOKEN": "ended by a stop token", "MAX_TIME": "ended by the time limit",
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """The arguments of the command."""

    model: ModelSpec | PreparedModel
    label: str
    """The model as the user named it."""
    prompt: Sequence[int]
    tokens: int
    """Maximum number of tokens to generate."""
    stop_tokens: Sequence[int] | Literal["eos"]
    tokenizer: Tokenizer | None
    device: str
    reservation: str | None
    recipe: Recipe
    recipe_name: str | None
    """The recipe's text; None for a ready program."""
    threads: int | None
    data: Sequence[Path]
    max_time_s: float | None
    timeout_s: float | None
    prefill_method: str
    decode_method: str
    connection: Connection
    verbose: bool
    exports: bool
    """Whether the model is eager, so that its export needs torch."""


@dataclass
class Generation:
    """The value of etfarm.generation/1, as far as known; times are None until the device has finished."""

    model: str
    recipe: str | None
    """The recipe that the model was compiled with; None for a ready program."""
    prompt_tokens: list[int]
    device: dict[str, Any] | None = None
    threads: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    """The text of the tokens; None without a tokenizer."""
    finish_reason: str | None = None
    context_tokens: int | None = None
    ttft_ns: int | None = None
    prefill_ns: int | None = None
    token_ns: list[int] | None = None
    tokens_per_s: float | None = None

    def add(self, token: int, tokenizer: Tokenizer | None) -> str:
        """Take a token, and return what it adds to the output: its id, or its text."""
        shown = f"{' ' if self.tokens else ''}{token}"
        self.tokens.append(token)
        if tokenizer is not None:
            shown = tokenizer.decode_next(token)
            self.text = (self.text or "") + shown
        return shown

    def finish(self, result: GeneratedTokens) -> None:
        """Take what the device said at the end."""
        self.finish_reason, self.context_tokens = result.finish_reason, result.context_tokens
        self.ttft_ns, self.prefill_ns, self.tokens_per_s = result.ttft_ns, result.prefill_ns, result.tokens_per_s
        self.token_ns = result.token_ns.tolist()


async def carry_out(wanted: Wanted, document: JsonListing) -> int:
    """Generate, print the tokens and the rate, and return the exit code.

    Raises:
        EtfarmError: the model, the device or the request does not fit, or the device failed; printed tokens stay.
        Interrupted: Ctrl-C.
    """
    out = sys.stderr if document.is_on_stdout else sys.stdout
    generation = document.record(Generation(wanted.label, wanted.recipe_name, list(wanted.prompt)))
    if wanted.exports:
        # Importing torch takes seconds, and so may starting a farm: they run concurrently.
        daemon_thread.start(import_torch)
    async with AsyncExitStack() as stack:
        stack.enter_context(progress := open_progress(wanted.tokens))
        farm = await stack.enter_async_context(wanted.connection.farm(progress.status))
        # Output of a user's factory must not mix with the tokens.
        with redirect_stdout(sys.stderr):
            session = await stack.enter_async_context(
                farm.session(
                    wanted.model, wanted.device,
                    recipe=wanted.recipe, data=wanted.data, threads=wanted.threads, reservation=wanted.reservation,
                    on_wait=lambda why: progress.status(f"Waiting: {why}.") if why else None,
                    on_log=progress.line if wanted.verbose else None, on_upload=progress.moved, on_status=progress.status,
                )
            )  # fmt: skip
        progress.stop()
        device, generation.threads = session.device, session.threads
        generation.device = {key: getattr(device, key) for key in ("id", "name", "arch", "soc", "emulated")}
        stream = session.generate(
            wanted.prompt, wanted.tokens,
            stop_tokens=wanted.stop_tokens, max_time_s=wanted.max_time_s, timeout_s=wanted.timeout_s,
            prefill_method=wanted.prefill_method, decode_method=wanted.decode_method,
        )  # fmt: skip
        try:
            async for token in stream:
                shown = generation.add(token, wanted.tokenizer)
                # A model may generate control characters, from which a terminal is protected.
                out.write(printable(shown) if out.isatty() else shown)
                out.flush()
        except asyncio.CancelledError:
            generation.finish_reason = "CANCELLED"
            raise
        finally:
            if generation.tokens:
                out.write("\n")
                out.flush()
        result = await stream.result()
        generation.finish(result)
        tell(_summary(wanted, device, result), to_stderr=True, flush=True)
    return 0


def _summary(wanted: Wanted, device: Device, result: GeneratedTokens) -> str:
    """Return `llama.pte on vm: 32 tokens, the first after 5.1 ms, then 112 tokens/s`."""
    parts = [units.count(len(result.tokens), "token")]
    if result.ttft_ns is not None:
        parts.append(f"the first after {units.time(result.ttft_ns)}")
    if result.tokens_per_s is not None:
        parts.append(f"then {units.rate(result.tokens_per_s)[0]}")
    if reason := _REASONS.get(result.finish_reason, result.finish_reason):
        parts.append(reason)
    emulated = " (emulated: times mean nothing)" if device.emulated else ""
    return f"{wanted.label} on {device.name}{emulated}: {', '.join(parts)}"
