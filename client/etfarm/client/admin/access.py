"""A farm's tokens and audit log. Only admins may use them, except that anyone may rotate their own token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etfarm.client.transport.connection import open_stubs
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import audit_pb2, common_pb2, token_pb2


@dataclass(frozen=True)
class Token:
    """A token without its secret."""

    id: str
    principal: str
    role: str
    """`admin`, `user`, `agent` or `viewer`."""
    state: str
    """`valid`, `expired`, `revoked`, or, for an enrolment token that was exchanged, `used`."""
    kind: str
    """`database`, `file`, or `enrolment`."""
    created_at: datetime | None
    created_by: str
    expires_at: datetime | None
    last_used_at: datetime | None
    agent_id: str


@dataclass(frozen=True)
class AuditEntry:
    """One line of the audit log."""

    number: int
    at: datetime
    principal: str
    role: str
    peer: str
    action: str
    subject: str
    outcome: str
    detail: str


class AccessControl:
    """The tokens and the audit log of a farm."""

    def __init__(self, stubs: Stubs) -> None:
        """Wrap a connection's stubs; use `open_access`."""
        self._stubs = stubs

    async def create_token(
        self,
        principal: str,
        role: str,
        *,
        lifetime_s: float | None = None,
        projects: Sequence[str] = (),
        enrolment: bool = False,
    ) -> tuple[Token, str]:
        """Create a token. Return it and its secret, which cannot be read again."""
        request = token_pb2.CreateTokenRequest(
            principal=principal, role=common_pb2.Role.Value(f"ROLE_{role.upper()}"), lifetime_s=lifetime_s, enrolment=enrolment,
            projects=projects,
        )  # fmt: skip
        created = await self._stubs.tokens.Create(request)
        return _token(created.token), created.secret

    async def tokens(self) -> list[Token]:
        """Return every token, newest first; those of the server's `--tokens` file come last."""
        rows = iterate_rows(self._stubs.tokens.List, token_pb2.ListTokensRequest(), "tokens", server=self._stubs.server)
        return [_token(row) async for row in rows]

    async def revoke_token(self, token: str) -> Token:
        """Revoke a token and end the calls that use it.

        Args:
            token: its id, or the name of a principal with a single usable token.

        Raises:
            EtfarmError: TOKEN_NOT_FOUND, TOKEN_AMBIGUOUS.
        """
        return _token(await self._stubs.tokens.Revoke(token_pb2.RevokeTokenRequest(id=token)))

    async def rotate_token(self, token_id: str = "") -> tuple[Token, str]:
        """Replace a token's secret; without an id, that of the caller's own token. Return the token and its new secret."""
        rotated = await self._stubs.tokens.Rotate(token_pb2.RotateTokenRequest(id=token_id))
        return _token(rotated.token), rotated.secret

    async def audit(self, *, principal: str = "", action: str = "", most: int = 100) -> list[AuditEntry]:
        """Return at most `most` entries of the audit log, newest first."""
        request = audit_pb2.ListAuditEntriesRequest(principal=principal, action=action)
        rows = iterate_rows(self._stubs.audit.List, request, "entries", server=self._stubs.server, limit=most)
        return [_entry(row) async for row in rows]


@asynccontextmanager
async def open_access(server: str | None = None, *, tls_ca: str | Path | None = None) -> AsyncIterator[AccessControl]:
    """Connect to a farm as AsyncFarm does, for its tokens and its audit log.

    Raises:
        EtfarmError: as AsyncFarm.
    """
    async with open_stubs(server, tls_ca) as stubs:
        yield AccessControl(stubs)


def _token(token: token_pb2.Token) -> Token:
    expires_at = _time(token, "expire_time")
    if token.HasField("revoke_time"):
        state = "revoked"
    elif token.enrolment and token.agent_id:
        state = "used"
    else:
        state = "expired" if expires_at is not None and expires_at <= datetime.now(UTC) else "valid"
    return Token(
        token.id, token.principal, _role(token.role), state,
        "file" if token.from_file else "enrolment" if token.enrolment else "database",
        _time(token, "create_time"), token.created_by, expires_at, _time(token, "last_used_time"), token.agent_id,
    )  # fmt: skip


def _entry(entry: audit_pb2.AuditEntry) -> AuditEntry:
    return AuditEntry(
        entry.number, entry.time.ToDatetime(UTC), entry.principal, _role(entry.role) if entry.role else "", entry.peer,
        entry.action, entry.subject, entry.outcome, entry.detail,
    )  # fmt: skip


def _role(role: common_pb2.Role.ValueType) -> str:
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def _time(message: Any, field: str) -> datetime | None:
    return getattr(message, field).ToDatetime(UTC) if message.HasField(field) else None
