"""Requests of clients of etfarm 0.1, as far as they can be told from those of later versions."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from google.protobuf.unknown_fields import UnknownFieldSet

from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.v1.compile_pb2 import Stage

_WHERE: Final = 3
"""The number of Stage.where in 0.1, a text. It is reserved since."""


def require_later_client(stage: Stage) -> None:
    """Check that a stage was not sent by a client of 0.1, which cannot read the reports of later servers.

    Raises:
        CLIENT_TOO_OLD: the stage has a field that only 0.1 had.
    """
    unknown = UnknownFieldSet(stage)
    if any(unknown[index].field_number == _WHERE for index in range(len(unknown))):
        raise error_for(
            "CLIENT_TOO_OLD",
            f"This client is of etfarm 0.1, and the server is etfarm {version('etfarm')}, whose reports it cannot read.",
            f"Install the server's version: pip install 'etfarm=={version('etfarm')}'.",
            version=version("etfarm"),
        )
