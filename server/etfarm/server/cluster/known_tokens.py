"""The farm's tokens as a standby knows them: those that the database and its own token file have, and what the leader says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final

import psycopg
import structlog
from psycopg.rows import namedtuple_row

from etfarm.server.access.tokens import Credential, LoadedTokens
from etfarm.server.cluster import lease
from etfarm.server.cluster.member import CONNECT, answer_s
from etfarm.server.parts import now
from etfarm.server.rpc.door.authentication import POLL_S, Authentication
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.postgres.bounded import BoundedAsyncConnection

log = structlog.get_logger()

# A row's xmin grows with each of its changes, so that the sum differs after any; a maximum would miss late commits.
_SIGNATURE: Final = "SELECT count(*), sum(xmin::text::bigint) FROM tokens"
# Only columns that every version has, since a newer one may have migrated the table.
_ROWS: Final = """
SELECT id, principal, role, secret_hash, enrolment, agent_id, expires_at AT TIME ZONE 'UTC' AS expires_at, revoked_at FROM tokens
"""
_FARM: Final = "SELECT id FROM farm"
_RETRY_S: Final = 0.5
_LOG_AGAIN_S: Final = 60.0
_CATCH_UP_S: Final = 3.0


class KnownTokens(LoadedTokens):
    """The tokens of the farm's database, read again within half a second of a change.

    Args:
        url: the database; None for a farm without tokens in it.
    """

    def __init__(self, url: DatabaseUrl | None) -> None:
        super().__init__()
        self._url = url
        self._former: set[bytes] = set()
        self._leader_asks = False
        self._has_seen_refusal = False
        self._has_read = asyncio.Event()
        """Set, and replaced, after each look at the tokens."""
        self.loaded = asyncio.Event()
        """Set once the tokens are known. Until then, the leader is asked about every caller."""
        if url is None:
            self.loaded.set()

    @property
    def is_empty(self) -> bool:
        """Whether callers need no token, as far as this server knows."""
        return self.loaded.is_set() and self._is_empty and not self._leader_asks and not self._has_seen_refusal

    def note_refusal(self) -> None:
        """Record that the leader refuses callers without a token, before the record of its token file is read."""
        self._has_seen_refusal = True

    async def catch_up(self) -> bool:
        """Wait until the tokens have been read once more; return False if the database does not answer in time."""
        if self._url is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                for _ in range(2):  # the first one may have begun before
                    await self._has_read.wait()
                return True
        return False

    def is_former(self, key: bytes) -> bool:
        """Return whether a token was revoked or replaced."""
        return key in self._former

    async def follow(self) -> None:
        """Read the tokens after each change, until the task is cancelled. While the database is unavailable, those known stay."""
        logged_s = -_LOG_AGAIN_S
        while self._url is not None:
            options = CONNECT | {"application_name": "etfarm tokens"}
            try:
                async with await BoundedAsyncConnection.connect(self._url.text, autocommit=True, **options) as session:
                    session.limit = answer_s
                    await self._follow(session)
            except psycopg.Error as error:
                if time.monotonic() - logged_s > _LOG_AGAIN_S:
                    logged_s = time.monotonic()
                    log.warning("the farm's tokens cannot be read; trying again", why=str(error).strip())
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, session: psycopg.AsyncConnection[Any]) -> None:
        read: tuple[Any, ...] | None = None
        while True:
            self._leader_asks = await lease.asks_for_tokens(session)
            try:
                signature = await (await session.execute(_SIGNATURE)).fetchone()
                if signature != read:
                    async with session.cursor(row_factory=namedtuple_row) as cursor:
                        self._replace(await (await cursor.execute(_ROWS)).fetchall())
                    read = signature
            except psycopg.errors.UndefinedTable:  # no server has led yet
                self._replace([])
            if not self.farm_id:
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    self.farm_id = str(((await (await session.execute(_FARM)).fetchone()) or [""])[0])
            self._has_read.set()
            self._has_read = asyncio.Event()
            await asyncio.sleep(POLL_S)

    def _replace(self, rows: list[Any]) -> None:
        former = self._former | self._valid.keys() | {row.secret_hash for row in rows if row.revoked_at is not None}
        self._take(rows)  # the leader is asked about a role that only a newer version knows
        self._former = former - self._valid.keys()
        self.loaded.set()


class StandbyAuthentication(Authentication):
    """Authentication by the tokens that a standby knows.

    Args:
        file: path of the `--tokens` file.
        changed: path of the file that another process touches after it has changed tokens.

    Raises:
        BadTokenFile: the file cannot be used.
    """

    def __init__(self, file: Path | None, known: KnownTokens, changed: Path) -> None:
        super().__init__(file, known, changed, now)
        self._known = known

    @property
    def is_certain(self) -> bool:
        """Whether all tokens are known, but for those of the last moment."""
        return self._known.loaded.is_set()

    def is_valid(self, credential: Credential) -> bool:
        """Return whether calls with the credential may continue."""
        is_by_word = bool(credential.key) and not credential.token_id
        if is_by_word and self._known.find(credential.key) is None:
            # Not read yet, or of a file that only the leader has, which ends what is forwarded to it.
            return not self._known.is_former(credential.key)
        return super().is_valid(credential)
