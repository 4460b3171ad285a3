"""The error of a wrong command line."""

from __future__ import annotations

from etfarm.wire.errors import UserError


class Usage(UserError):
    """The command line is wrong."""

    reason = "USAGE"
