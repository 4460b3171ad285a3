"""`python -m tests.support.images board|phone`: makes what a machine is started from, unless it is there already."""

from __future__ import annotations

import argparse
import dataclasses

from tests.support.images.board import board_image
from tests.support.images.kept import size_mb
from tests.support.images.phone import phone_image

_MAKERS = {"board": board_image, "phone": phone_image}


def main() -> None:
    """The command; prints one line for each file."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.images", description=__doc__)
    parser.add_argument("image", nargs="+", choices=sorted(_MAKERS))
    for name in parser.parse_args().image:
        for path in dataclasses.astuple(_MAKERS[name]()):
            print(f"{name}: {path} {size_mb(path):.1f} MB")


if __name__ == "__main__":
    main()
