"""`etfarm generate`: tokens of a language model, from a device as they come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.arguments import needs_export, prepare_archives, report_random_weights, require_data_program
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.outcome import Outcome
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.submit.tokenizer import Tokenizer

_MAX_DIGITS: Final = 10
_IDS: Final = re.compile(r"[0-9]+(,[0-9]+)*", re.ASCII)


def main(argv: list[str]) -> int:
    """Run `etfarm generate`."""
    return execute(generate, argv, "generate")


def generate(
    outcome: Outcome,
    connection: Connection,
    model: options.ProgramOrModel,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="ID[,ID]...", help="The prompt as token ids, for example 1,15,27.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", help="The prompt's token ids in a file: a .npy, or numbers as text."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt as text; requires --tokenizer.")
    ] = None,
    number: Annotated[
        int, typer.Option("-n", "--number", metavar="N", min=1, max=65_536, help="Maximum number of tokens to generate.")
    ] = 128,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json: prints text instead of token ids.")
    ] = None,
    stop_tokens: Annotated[
        str, typer.Option("--stop-tokens", metavar="ID[,ID]...|eos", help="Tokens that end the text; eos: the program's own.")
    ] = "",
    max_time: Annotated[
        float | None,
        typer.Option("--max-time", metavar="S", min=0, callback=options.finite, help="Seconds after which the text ends. [600]"),
    ] = None,
    recipe: options.RecipeOfModel = None,
    device: options.OneDevice = "",
    threads: options.Threads = None,
    prefill_method: Annotated[
        str, typer.Option("--prefill-method", metavar="M", help="The method for prompts. [recognized]")
    ] = "",
    decode_method: Annotated[
        str, typer.Option("--decode-method", metavar="M", help="The method for single tokens. [recognized]")
    ] = "",
    data: options.Data = None,
    timeout: options.Timeout = None,
    reservation: options.Reservation = None,
    json: options.ListJson = None,
    verbose: options.Verbose = False,
) -> int:
    """Generate tokens with a language model on a device, and print them as they come.

    The loop over the tokens runs on the device; each token is the most likely one. The rate at the end is that of one text on a
    device that also sends it: `etfarm bench --generate` measures.

    stdout gets the token ids, or with --tokenizer their text, and nothing else.
    """
    outcome.takes_verbose(verbose)
    document = JsonListing(outcome, json, "generation", is_list=False)

    from etfarm.client.export.spec import PteFile, resolve
    from etfarm.client.sessions.text import request_of
    from etfarm.client.submit.recipes import DEFAULT_RECIPE, read_recipe
    from etfarm.wire import selectors

    read = read_recipe(DEFAULT_RECIPE if recipe is None else recipe)
    selectors.parse(device)
    stops = stop_tokens_of(stop_tokens)
    decoder = _open_tokenizer(tokenizer)
    ids = prompt_of(prompt_ids, tokens, prompt, decoder)
    # What the session would refuse only after the model is compiled.
    request_of(
        ids, number, stops, max_time_s=max_time, prefill_method=prefill_method, decode_method=decode_method,
    )  # fmt: skip
    spec = resolve(model)
    if recipe is not None and isinstance(spec, PteFile):
        raise error_for("USAGE", "--recipe cannot be combined with a .pte, which is already compiled.", "Leave --recipe out.")
    require_data_program(data or (), [spec])
    (source,) = prepare_archives([spec], [read])
    report_random_weights([spec])

    from etfarm.client.cli.workflows import text_generation

    wanted = text_generation.Wanted(
        source, spec.label, ids, number, stops, decoder,
        device=device, reservation=reservation, threads=threads,
        recipe=read, recipe_name=None if isinstance(spec, PteFile) else read.text,
        data=data or (), max_time_s=max_time, timeout_s=timeout, prefill_method=prefill_method, decode_method=decode_method,
        connection=connection, verbose=verbose, exports=needs_export([source]),
    )  # fmt: skip
    return run_async(lambda: text_generation.carry_out(wanted, document), outcome)


def prompt_of(ids: str | None, file: Path | None, text: str | None, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of the prompt.

    Raises:
        USAGE: there is none or more than one, or a text without a tokenizer.
        BAD_TEXT_FILE: the file does not hold token ids.
        BAD_TOKENIZER: the text cannot be tokenized.
    """
    options_set = {"--prompt-ids": ids, "--tokens": file, "--prompt": text}
    names = [name for name, value in options_set.items() if value is not None]
    if len(names) != 1:
        what = f"got {' and '.join(names)}" if names else "got none"
        raise error_for("USAGE", f"One prompt is required, {what}.", "Give --prompt-ids 1,15,27, --tokens FILE or --prompt TEXT.")
    if ids is not None:
        return _ids("--prompt-ids", ids)
    if file is not None:
        if not file.exists() and _IDS.fullmatch(str(file)):
            raise error_for(
                "USAGE", f"--tokens takes a file, got the token ids {str(file)[:40]}.", "Give token ids with --prompt-ids."
            )
        from etfarm.client.submit.token_files import read_tokens

        return read_tokens(file, least=1)
    if tokenizer is None:
        raise error_for(
            "USAGE", "--prompt requires --tokenizer.", "Give --tokenizer tokenizer.json, or token ids with --prompt-ids."
        )
    if not (encoded := tokenizer.encode(text or "")):
        raise error_for("USAGE", "The text of --prompt has no tokens.", "Give a longer text.")
    return encoded


def stop_tokens_of(text: str) -> list[int] | Literal["eos"]:
    """Return the tokens of `--stop-tokens`.

    Raises:
        USAGE: it is neither `eos` nor token ids.
    """
    if text.strip() == "eos":
        return "eos"
    return _ids("--stop-tokens", text) if text.strip() else []


def _open_tokenizer(path: Path | None) -> Tokenizer | None:
    if path is None:
        return None
    from etfarm.client.submit.tokenizer import Tokenizer

    return Tokenizer(path)


def _ids(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.replace(",", " ").split()]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) <= _MAX_DIGITS):
            raise error_for(
                "USAGE", f"{option} {part[:40]!r} is not a token id.", f"Give for example {option} 1,15,27.", value=part[:40]
            )
    if not parts:
        raise error_for("USAGE", f"{option} has no token id.", f"Give for example {option} 1,15,27.")
    return [int(part) for part in parts]
