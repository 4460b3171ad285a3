"""TokenService: creation, listing, revocation and rotation of tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from etfarm.server.access.audit import AuditLog
from etfarm.server.access.tokens import TokenTable
from etfarm.server.rpc.door.authentication import Authentication
from etfarm.server.rpc.door.caller import caller, credential
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.server.state.paging import page_size, page_start
from etfarm.v1 import token_pb2, token_pb2_grpc
from etfarm.wire.errors import error_for

PAGE: Final = 100, 1000
"""Default and maximum number of entries on a page."""


class TokenService(token_pb2_grpc.TokenServiceServicer):
    """The servicer of TokenService; see token.proto.

    Args:
        on_members: called after a principal became a member of projects, to refresh the cached members.
    """

    def __init__(
        self, table: TokenTable, authentication: Authentication, audit: AuditLog, on_members: Callable[[], Awaitable[None]]
    ) -> None:
        self._table = table
        self._authentication = authentication
        self._audit = audit
        self._on_members = on_members

    async def Create(self, request: token_pb2.CreateTokenRequest, context: object) -> token_pb2.CreateTokenResponse:
        if not self._authentication.asks_for_tokens and (request.role != ADMIN or request.enrolment):
            raise error_for(
                "BAD_TOKEN_REQUEST",
                "The first token must be an admin's: with it, the server asks every caller for a token.",
                "Create it with `etfarm tokens create NAME --role admin`, then the others with ETFARM_TOKEN set to it.",
            )
        token, secret = await self._table.create(
            request.principal,
            request.role,
            by=caller().name,
            enrolment=request.enrolment,
            projects=list(request.projects),
            lifetime_s=request.lifetime_s if request.HasField("lifetime_s") else None,
        )
        if request.projects:
            await self._on_members()
        return token_pb2.CreateTokenResponse(token=token, secret=secret)

    async def List(self, request: token_pb2.ListTokensRequest, context: object) -> token_pb2.ListTokensResponse:
        size, offset = page_size(request.page_size, *PAGE), page_start(request.page_token)
        tokens = await self._table.list(size + 1, offset)
        more = len(tokens) > size
        listed = tokens[:size] if more else [*tokens, *self._authentication.from_file()]
        return token_pb2.ListTokensResponse(tokens=listed, next_page_token=str(offset + size) if more else "")

    async def Revoke(self, request: token_pb2.RevokeTokenRequest, context: object) -> token_pb2.Token:
        return await self._table.revoke(request.id)

    async def Rotate(self, request: token_pb2.RotateTokenRequest, context: object) -> token_pb2.CreateTokenResponse:
        own = credential().token_id
        chosen = request.id or own
        if chosen.startswith("file:") or not chosen:
            raise error_for(
                "TOKEN_NOT_FOUND",
                "This token is not one of the database's.",
                "Change the server's --tokens file.",
                id=chosen[:80],
            )
        if caller().role != ADMIN and chosen != own:
            raise error_for(
                "TOKEN_NOT_FOUND",
                f"There is no token {chosen[:80]!r} of yours.",
                "Leave the id out to rotate your own.",
                id=chosen[:80],
            )
        token, secret = await self._table.rotate(chosen, key=credential().key if chosen == own else None)
        return token_pb2.CreateTokenResponse(token=token, secret=secret)
