"""Step 1, command line: options that several commands have, one spelling and one help each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from etfarm.client.cli.app import Usage
from etfarm.client.errors import NotAvailable

Server = Annotated[
    str | None,
    typer.Option("--server", metavar="ADDR", help="HOST:PORT or unix:PATH; else ETFARM_SERVER, else a farm of its own."),
]
TlsCa = Annotated[
    str | None, typer.Option("--tls-ca", metavar="FILE", help="PEM of the authority that signed the server's certificate.")
]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write etfarm.report/1 there, on failure too; - is stdout.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, its first characters, or latest.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="R", help="A recipe's name, name:key=value, or a TOML file. Again for more. [xnnpack_fp32]"),
]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label of the job. Again for more.")]
Name = Annotated[str, typer.Option("--name", metavar="N", help="The job's name.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile again although the farm has done it before.")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="S", min=0.001, help="Seconds one run may take. [600]")]


def refuse(**options: object) -> None:
    """Refuses options that this version knows and cannot do, where they were given.

    Raises:
        NotAvailable: the first of `options`, by its name with underscores, that is neither None nor False nor empty.
    """
    for name, value in options.items():
        if value:
            raise NotAvailable(f"--{name.replace('_', '-')}")


def threads_of(texts: Sequence[str]) -> list[int]:
    """The thread counts of `--threads 1,2 --threads 4`.

    Raises:
        Usage: one is no positive number.
    """
    counts: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 0 < int(part) <= 1024):
            raise Usage(f"--threads {part!r} is no number of threads.", "Give for example --threads 1,4.", value=part)
        if int(part) not in counts:
            counts.append(int(part))
    return counts


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """The labels of `--label K=V`.

    Raises:
        Usage: one is not K=V.
    """
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise Usage(f"--label {text!r} is not K=V.", "Give for example --label team=vision.", value=text)
        labels[key.strip()] = value.strip()
    return labels
