"""The settings of the runners' jail."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Final

from etfarm.wire.options import option

_CONFINEMENT: Final = (
    "confinement",
    "A program sees its own folder and its runner, but no network. Where the agent is root, the program has its own user. "
    "Measures that this machine's kernel lacks are left out and logged.",
)


def _users(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ArgumentTypeError(f"{text!r} is not FIRST-LAST, such as 64000-64999")
    return range(int(first), int(last) + 1)


@dataclass(frozen=True)
class JailOptions:
    """Settings of the confinement of runners."""

    # They differ from the users of the server's compile children. Group ids are equal.
    users: range = option(
        "--runner-users",
        "user ids without accounts that programs run as where the agent is root; default: %(default)s",
        default="64000-64999", metavar="FIRST-LAST", read=_users, group=_CONFINEMENT,
    )  # fmt: skip
    required: bool = option(
        "--require-jail", "do not start on a machine that cannot confine programs", default=False, group=_CONFINEMENT
    )
    enabled: bool = True
    """Whether to confine runners at all."""
