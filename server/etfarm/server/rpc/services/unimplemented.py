"""Rpcs that the contract declares and this version does not implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from etfarm.wire.errors import Kind, UserError


class Unimplemented(UserError):
    """An rpc of the contract that this server does not implement."""

    reason = "UNIMPLEMENTED"
    kind = Kind.UNIMPLEMENTED


def unimplemented(rpc: str) -> Callable[[object, object, object], NoReturn]:
    """Return a handler that answers an rpc with UNIMPLEMENTED and the rpc's name."""

    def answer(self: object, request: object, context: object) -> NoReturn:
        raise Unimplemented(f"This server does not have {rpc} yet.", "Update the server.", rpc=rpc)

    return answer
