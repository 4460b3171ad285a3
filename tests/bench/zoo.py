"""What etfarm and plain ExecuTorch make of many networks with the same recipes, and whether their outputs agree.

python -m tests.bench.zoo [--only GLOB...] [--recipes NAME...] [--json FILE] [--compile-only] [--markdown]

Needs the extra `zoo`. Each network has random weights and a small configuration. etfarm compiles it and runs it on this machine's
device; plain ExecuTorch, in a process without etfarm, lowers the same module with the same recipe and runs it with its Python
binding. With --compile-only, only etfarm's server compiles the networks, runs them, and compares them with eager PyTorch. Prints
a line of JSON for each network and recipe, and the tables at the end, those that docs/models.md has. With --json, a run that is
stopped goes on where it was. All of it takes hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.farm import FarmProcess
from tests.zoo import catalog
from tests.zoo.comparison import Plain, Row, compile_only, run_both, table

RECIPES: Final = ("xnnpack_fp32", "xnnpack_pt2e_int8_static_per_channel", "portable")


def rows(work: list[tuple[str, str]], *, compiles_only: bool) -> Iterator[Row]:
    """Yield a row for each network and recipe, in the order given."""
    with tempfile.TemporaryDirectory() as folder, Plain(Path(folder)) as plain:
        running = FarmProcess(Path(folder), prewarm=True)
        try:
            with running.start().client() as farm:
                for name, recipe in work:
                    yield compile_only(farm, name, recipe) if compiles_only else run_both(farm, plain, name, recipe)
        finally:
            running.stop()


def order(only: list[str], recipes: list[str], known: list[Row]) -> list[tuple[str, str]]:
    """Return the networks and recipes that have no row yet: recipe by recipe, those first that took least with another one."""
    done = {(row["network"], row["recipe"]) for row in known}
    seconds = {row["network"]: row["etfarm"].get("seconds", 0.0) for row in known}
    chosen = dict.fromkeys(name for pattern in only for name in catalog.networks(pattern))
    names = sorted(chosen, key=lambda name: seconds.get(name, 0.0))
    return [(name, recipe) for recipe in recipes for name in names if (name, recipe) not in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="networks, such as 'torchvision/*'")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help="recipes of ExecuTorch, or portable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to a file, and skip those that it has")
    parser.add_argument("--compile-only", action="store_true", help="neither use a device nor plain ExecuTorch")
    parser.add_argument("--markdown", action="store_true", help="print the file's table only, and run nothing")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    known: list[Row] = []
    if arguments.json is not None and arguments.json.exists():
        known = [json.loads(line) for line in arguments.json.read_text().splitlines()]
    if not arguments.markdown:
        work = order(arguments.only, arguments.recipes, known)
        for row in rows(work, compiles_only=arguments.compile_only):
            known.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json is not None:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    places = {name: place for place, name in enumerate(catalog.networks())}
    print(table(sorted(known, key=lambda row: places.get(row["network"], len(places)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
