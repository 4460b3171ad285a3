"""Tokens in the database: 256 random bits each, stored and looked up by their sha256."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row, func, insert, or_, select, update

from etfarm.server.access.projects import project_not_found
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.identity import farm_id
from etfarm.server.state.sql import insert as insert_or_ignore
from etfarm.v1 import common_pb2, token_pb2
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.errors import Kind, UserError, error_for
from etfarm.wire.farm_proof import hint_of
from etfarm.wire.names import ENROLMENT_PREFIX, TOKEN_PREFIX

ROLE_NAMES: Final = {Role.ROLE_ADMIN: "admin", Role.ROLE_USER: "user", Role.ROLE_AGENT: "agent", Role.ROLE_VIEWER: "viewer"}

TOKENS_CHANGED: Final = "tokens.changed"
"""Name of the file in the data folder that another process touches after it has changed the tokens of a running server."""

MAX_LIFETIME_S: Final = 10 * 366 * 86_400.0

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z", re.ASCII)
_SECRET_BYTES: Final = 32


class Unauthenticated(UserError):
    """A call without a token, or with an unknown one."""

    reason = "UNAUTHENTICATED"
    kind = Kind.UNAUTHENTICATED


class TokenReplaced(Unauthenticated):
    """A token that another call has rotated since the caller authenticated with it."""


@dataclass(frozen=True)
class Credential:
    """The principal that a token authenticates, and the token's validity."""

    key: bytes
    """The sha256 of the secret; empty for the local caller of a server without tokens."""
    token_id: str
    principal: Principal
    enrolment: bool = False
    """Whether the token may only call AgentService.Enroll."""
    spent: bool = False
    """Whether the token is an enrolment token that was already exchanged."""
    expires_at: datetime | None = None


def key_of(secret: str) -> bytes:
    """Return the key under which a secret is stored and looked up. Random secrets need no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def new_secret(*, enrolment: bool = False) -> str:
    """Return a new secret with the prefix that secret scanners recognize."""
    return (ENROLMENT_PREFIX if enrolment else TOKEN_PREFIX) + secrets.token_urlsafe(_SECRET_BYTES)


class LoadedTokens:
    """The tokens of the database as a server has them in memory."""

    def __init__(self) -> None:
        self._valid: dict[bytes, Credential] = {}
        self._hints: dict[bytes, bytes] = {}
        self._is_empty = True
        self.farm_id = ""
        """The farm's id; empty before the tokens are loaded."""

    @property
    def is_empty(self) -> bool:
        """Whether no token was ever created. Revoked tokens count, so revoking the last one does not open the server."""
        return self._is_empty

    def find(self, key: bytes) -> Credential | None:
        """Return the credential of a key, possibly expired; None if the token is unknown or revoked."""
        return self._valid.get(key)

    def key_of_hint(self, hint: bytes) -> bytes | None:
        """Return the key of an agent's own token by its hint in GetProofRequest; None if there is no such token."""
        return self._hints.get(hint)

    async def catch_up(self) -> bool:
        """Return True: what creates a token adds it here."""
        return True

    async def load(self) -> None:
        """Load the tokens after another process has changed them."""

    def mark_used(self, credential: Credential) -> None:
        """Record that a token is used now, on the server that leads."""

    async def save_uses(self) -> None:
        """Write the times of last use to the database, on the server that leads."""

    def _take(self, rows: Sequence[Any]) -> None:
        """Replace the tokens by the rows of the table."""
        valid = {row.secret_hash: _credential(row) for row in rows if row.revoked_at is None}
        self._valid = {key: credential for key, credential in valid.items() if credential is not None}
        self._hints = {hint_of(key): key for key, credential in self._valid.items() if credential.principal.agent_id}
        self._is_empty = not rows


class TokenTable(LoadedTokens):
    """The tokens of the database. A change is durable when its method returns, and applies to all later calls.

    Args:
        now: returns the current time in UTC.
        on_change: called after tokens were added, changed or revoked.
    """

    def __init__(self, database: Database, now: Callable[[], datetime], on_change: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._database = database
        self._now = now
        self.on_change = on_change
        self._used: dict[str, datetime] = {}

    async def load(self) -> None:
        """Load the tokens, including those that another process has written."""
        table = schema.tokens
        rows, self.farm_id = await self._database.read(
            lambda connection: (connection.execute(select(table)).all(), farm_id(connection))
        )
        self._take(rows)
        self.on_change()

    def mark_used(self, credential: Credential) -> None:
        """Record that a token is used now; `save_uses` writes it to the database."""
        self._used[credential.token_id] = self._now().replace(second=0, microsecond=0)

    async def save_uses(self) -> None:
        """Write the times of last use to the database."""
        used, self._used = self._used, {}
        table = schema.tokens

        def write(connection: Connection) -> None:
            for token_id, at in used.items():
                connection.execute(update(table).where(table.c.id == token_id).values(last_used_at=at))

        if used:
            await self._database.write(write)

    async def create(
        self,
        principal: str,
        role: Role.ValueType,
        *,
        by: str,
        lifetime_s: float | None = None,
        enrolment: bool = False,
        projects: Sequence[str] = (),
    ) -> tuple[token_pb2.Token, str]:
        """Create a token; return it with its secret, which is not stored.

        Raises:
            BAD_TOKEN_REQUEST: the name, role or lifetime is not allowed.
            PROJECT_NOT_FOUND: one of `projects` does not exist.
        """
        _validate(principal, role, lifetime_s, enrolment=enrolment, projects=projects)
        at, secret = self._now(), new_secret(enrolment=enrolment)
        row = {
            "id": secrets.token_hex(8), "principal": principal, "role": ROLE_NAMES[role], "secret_hash": key_of(secret),
            "enrolment": enrolment, "created_at": at, "created_by": by,
            "expires_at": None if lifetime_s is None else at + timedelta(seconds=lifetime_s),
        }  # fmt: skip

        def write(connection: Connection) -> Row[Any]:
            for project in projects:
                _add_member(connection, project, principal, at)
            connection.execute(insert(schema.tokens).values(**row))
            return _row(connection, str(row["id"]))

        created = await self._database.write(write, durable=True)
        await self.load()
        return _token(created), secret

    async def list(self, size: int, offset: int) -> list[token_pb2.Token]:
        """Return tokens without their secrets, newest first."""
        table = schema.tokens
        query = select(table).order_by(table.c.created_at.desc(), table.c.id).limit(size).offset(offset)
        return [_token(row) for row in await self._database.read(lambda connection: connection.execute(query).all())]

    async def admins(self) -> Sequence[str]:
        """Return the names of those who have a valid admin's token, sorted."""
        table = schema.tokens.c
        is_valid = table.revoked_at.is_(None) & (table.expires_at.is_(None) | (table.expires_at > self._now()))
        query = select(table.principal).where(table.role == ROLE_NAMES[Role.ROLE_ADMIN], is_valid).distinct()
        return sorted(await self._database.read(lambda connection: connection.execute(query).scalars().all()))

    async def revoke(self, key: str) -> token_pb2.Token:
        """Revoke a token; do nothing if it is already revoked.

        Args:
            key: the token's id, or the name of a principal with a single usable token.

        Raises:
            TOKEN_NOT_FOUND: no token has the id, and no usable one the name.
            TOKEN_AMBIGUOUS: several usable tokens have the name.
        """
        table, at = schema.tokens, self._now()

        def write(connection: Connection) -> Row[Any]:
            token_id = _find_id(connection, key, at)
            is_valid = (table.c.id == token_id) & table.c.revoked_at.is_(None)
            connection.execute(update(table).where(is_valid).values(revoked_at=at))
            return _row(connection, token_id)

        row = await self._database.write(write, durable=True)
        await self.load()
        return _token(row)

    async def revoke_of_agent(self, agent_id: str) -> Sequence[str]:
        """Revoke the tokens that only this agent may use; return their ids."""
        table, at = schema.tokens, self._now()
        of_agent = (table.c.agent_id == agent_id) & table.c.enrolment.is_(False) & table.c.revoked_at.is_(None)

        def write(connection: Connection) -> list[str]:
            ids = connection.execute(select(table.c.id).where(of_agent).order_by(table.c.id)).scalars().all()
            connection.execute(update(table).where(of_agent).values(revoked_at=at))
            return [str(each) for each in ids]

        revoked = await self._database.write(write, durable=True)
        if revoked:
            await self.load()
        return revoked

    async def rotate(self, token_id: str, *, key: bytes | None = None) -> tuple[token_pb2.Token, str]:
        """Replace a token's secret; return the token with its new secret.

        Args:
            key: key that the caller authenticated with, if the caller rotates its own token. It must still be current: otherwise
                a stolen token with a queued call could obtain the new secret.

        Raises:
            TOKEN_NOT_FOUND: no token has the id, or it is revoked or used up.
            TokenReplaced: another call has rotated the token in the meantime.
        """
        table = schema.tokens

        def write(connection: Connection) -> tuple[Row[Any], str]:
            row = _row(connection, token_id)
            if row.revoked_at is not None or (row.enrolment and row.agent_id is not None):
                raise error_for("TOKEN_NOT_FOUND", f"Token {token_id} is revoked or used up.", "Create another.", id=token_id)
            if key is not None and row.secret_hash != key:
                raise TokenReplaced(f"Token {token_id} was rotated meanwhile.", "Set ETFARM_TOKEN to the new one.", id=token_id)
            secret = new_secret(enrolment=row.enrolment)
            connection.execute(update(table).where(table.c.id == token_id).values(secret_hash=key_of(secret)))
            return row, secret

        row, secret = await self._database.write(write, durable=True)
        await self.load()
        return _token(row), secret

    async def enroll(self, enrolment: Credential, agent_id: str, *, is_known: bool) -> str:
        """Exchange an enrolment token for the agent's own token; return the secret of the new token.

        An agent that lost its token enrolls again with a new enrolment token of the same principal, which revokes the lost one.

        Args:
            is_known: whether the farm has devices of this identity.

        Raises:
            NOT_AN_ENROLMENT_TOKEN: the caller's token is not an enrolment token, or was used.
            BAD_TOKEN_REQUEST: the agent's id is not allowed.
            AGENT_BOUND: the identity belongs to another principal, or is known but not bound.
        """
        if not _NAME.match(agent_id):
            raise error_for("BAD_TOKEN_REQUEST", f"agent_id must be a UUID, got {agent_id[:80]!r}.", "Send the id of Hello.")
        at, secret, tokens, agents = self._now(), new_secret(), schema.tokens, schema.agents
        principal = enrolment.principal.name

        def write(connection: Connection) -> None:
            row = connection.execute(select(tokens).where(tokens.c.id == enrolment.token_id)).one_or_none()
            if row is None or not row.enrolment or row.agent_id is not None or row.revoked_at is not None:
                raise error_for(
                    "NOT_AN_ENROLMENT_TOKEN",
                    "The token is not an enrolment token, or was used already.",
                    "Ask an admin for `etfarm tokens create NAME --agent`.",
                )
            bound = connection.execute(
                select(agents.c.principal, agents.c.retired_at).where(agents.c.id == agent_id)
            ).one_or_none()
            is_free = not is_known if bound is None else bound.retired_at is not None or bound.principal == principal
            if not is_free:
                raise error_for(
                    "AGENT_BOUND",
                    f"Agent {agent_id} is registered and does not belong to {principal}.",
                    f"Ask an admin to run `etfarm agents bind {agent_id} {principal}`, or give the agent a new data folder.",
                    agent_id=agent_id,
                )
            former = (tokens.c.agent_id == agent_id) & tokens.c.enrolment.is_(False) & tokens.c.revoked_at.is_(None)
            connection.execute(update(tokens).where(former).values(revoked_at=at))
            connection.execute(update(tokens).where(tokens.c.id == row.id).values(agent_id=agent_id, last_used_at=at))
            connection.execute(
                insert(tokens).values(
                    id=secrets.token_hex(8), principal=principal, role="agent", secret_hash=key_of(secret), enrolment=False,
                    agent_id=agent_id, created_at=at, created_by=principal,
                )
            )  # fmt: skip
            binding = {"principal": principal, "bound_at": at, "bound_by": row.created_by, "retired_at": None}
            new = insert_or_ignore(agents).values(id=agent_id, **binding)
            connection.execute(new.on_conflict_do_update(index_elements=["id"], set_=binding))

        await self._database.write(write, durable=True)
        await self.load()
        return secret


def _validate(
    principal: str, role: Role.ValueType, lifetime_s: float | None, *, enrolment: bool, projects: Sequence[str]
) -> None:
    if not _NAME.match(principal):
        raise error_for(
            "BAD_TOKEN_REQUEST",
            f"The principal's name must be 1 to 64 letters, digits, dots, dashes and underscores, got {principal[:80]!r}.",
        )
    if role not in ROLE_NAMES:
        raise error_for("BAD_TOKEN_REQUEST", f"The role must be one of {', '.join(ROLE_NAMES.values())}.")
    if enrolment and role != Role.ROLE_AGENT:
        raise error_for("BAD_TOKEN_REQUEST", "An enrolment token must have the role agent.")
    if projects and role == Role.ROLE_AGENT:
        raise error_for(
            "BAD_TOKEN_REQUEST",
            "A token with the role agent cannot be a member of a project.",
            "Restrict its devices to projects instead.",
        )
    if lifetime_s is not None and not (math.isfinite(lifetime_s) and 0 < lifetime_s <= MAX_LIFETIME_S):
        raise error_for("BAD_TOKEN_REQUEST", f"lifetime_s must be above 0 and at most {MAX_LIFETIME_S:.0f}, got {lifetime_s}.")


def _add_member(connection: Connection, project: str, principal: str, at: datetime) -> None:
    known = select(func.count()).select_from(schema.projects).where(schema.projects.c.name == project)
    if not connection.execute(known).scalar():
        raise project_not_found(project)
    member = insert_or_ignore(schema.members).values(project=project, principal=principal, added_at=at)
    connection.execute(member.on_conflict_do_nothing())


def _row(connection: Connection, token_id: str) -> Row[Any]:
    row = connection.execute(select(schema.tokens).where(schema.tokens.c.id == token_id)).one_or_none()
    if row is None:
        raise error_for("TOKEN_NOT_FOUND", f"There is no token {token_id[:80]!r}.", "See `etfarm tokens list`.", id=token_id[:80])
    return row


def _find_id(connection: Connection, key: str, now: datetime) -> str:
    """Return the id of the token with an id, or of the only usable one of a principal.

    Raises:
        TOKEN_NOT_FOUND, TOKEN_AMBIGUOUS: see `TokenTable.revoke`.
    """
    table = schema.tokens
    if connection.execute(select(table.c.id).where(table.c.id == key)).first() is not None:
        return key
    is_usable = (
        (table.c.principal == key)
        & table.c.revoked_at.is_(None)
        & or_(table.c.expires_at.is_(None), table.c.expires_at > now)
        & or_(table.c.enrolment.is_(False), table.c.agent_id.is_(None))
    )
    ids = [str(each) for each in connection.execute(select(table.c.id).where(is_usable).order_by(table.c.id)).scalars()]
    if not ids:
        raise error_for(
            "TOKEN_NOT_FOUND",
            f"There is no token with the id {key[:80]!r}, and no usable one of that name.",
            "See `etfarm tokens list`.",
            id=key[:80],
        )
    if len(ids) > 1:
        shown = ", ".join(ids[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
        raise error_for(
            "TOKEN_AMBIGUOUS", f"{key} has {len(ids)} usable tokens: {shown}.", "Give the id of one.", tokens=" ".join(ids[:20])
        )
    return ids[0]


def _role(name: str) -> Role.ValueType:
    return common_pb2.Role.Value(f"ROLE_{name.upper()}")


def _credential(row: Any) -> Credential | None:
    """Return the credential of a row of the table; None if this version does not know its role."""
    if row.role not in ROLE_NAMES.values():
        return None
    agent_id = row.agent_id if row.agent_id and not row.enrolment else ""
    return Credential(
        row.secret_hash, row.id, Principal(name=row.principal, role=_role(row.role), agent_id=agent_id),
        enrolment=row.enrolment, spent=row.enrolment and row.agent_id is not None, expires_at=row.expires_at,
    )  # fmt: skip


def _token(row: Row[Any]) -> token_pb2.Token:
    return token_pb2.Token(
        id=row.id, principal=row.principal, role=_role(row.role), create_time=row.created_at, created_by=row.created_by,
        expire_time=row.expires_at, revoke_time=row.revoked_at, last_used_time=row.last_used_at, agent_id=row.agent_id or "",
        enrolment=row.enrolment,
    )  # fmt: skip
