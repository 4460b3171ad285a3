"""Authentication of calls by the tokens of the `--tokens` file, which is watched, and of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.access.tokens import Credential, LoadedTokens, Unauthenticated
from etfarm.server.rpc.door.token_file import LOCAL, MAX_BYTES, BadTokenFile, read_tokens, sent_key, unknown_token
from etfarm.v1 import token_pb2
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.private import read_secret

log = structlog.get_logger()

POLL_S: Final = 0.5
"""Interval at which the token file is polled. A change applies after two equal polls, so half-written files are not read."""

_SAVE_USES_S: Final = 60.0

Signature = tuple[int, int, int, int] | None


class Authentication:
    """The tokens of one server. Without a token file and tokens in the database, every caller is LOCAL.

    Args:
        file: path of the `--tokens` file.
        table: the tokens of the database.
        changed: path of the file that another process touches after it has changed tokens in the database.
        now: returns the current time in UTC.

    Raises:
        BadTokenFile: the file cannot be used.
    """

    def __init__(self, file: Path | None, table: LoadedTokens, changed: Path, now: Callable[[], datetime]) -> None:
        self._file = file
        self._last_signature = self._loaded_signature = _signature(file)
        self._tokens = read_tokens(file) if file is not None else {}
        self._table = table
        self._marker = changed
        self._marker_signature = _signature(changed)
        self._now = now

    @property
    def asks_for_tokens(self) -> bool:
        """Whether callers need a token."""
        return self._file is not None or not self._table.is_empty

    def authenticate(self, header: str | None) -> Credential:
        """Return the credential of a call's `authorization` header.

        Raises:
            Unauthenticated: the token is missing, unknown, revoked or expired.
        """
        if not self.asks_for_tokens:
            return Credential(b"", "", LOCAL)
        key = sent_key(header)
        if (credential := self._table.find(key)) is not None:
            if self._is_expired(credential):
                raise Unauthenticated(
                    f"The token of {credential.principal.name} has expired.", "Ask the farm's admin for another (ETFARM_TOKEN)."
                )
            self._table.mark_used(credential)
            return credential
        principal = self._tokens.get(key)
        if principal is None:
            raise unknown_token()
        return Credential(key, f"file:{principal.name}", principal)

    def is_valid(self, credential: Credential) -> bool:
        """Return whether calls with the credential may continue."""
        if not credential.key:
            return not self.asks_for_tokens
        if (current := self._table.find(credential.key)) is not None:
            return not self._is_expired(current)
        return self._tokens.get(credential.key) == credential.principal

    def _is_expired(self, credential: Credential) -> bool:
        return credential.expires_at is not None and credential.expires_at <= self._now()

    def from_file(self) -> Iterator[token_pb2.Token]:
        """Yield the tokens of the file, without their secrets."""
        for principal in self._tokens.values():
            yield token_pb2.Token(id=f"file:{principal.name}", principal=principal.name, role=principal.role, from_file=True)

    async def watch(self, end_calls: Callable[[], None]) -> None:
        """Apply changes of the token file, and of other processes, until the task is cancelled.

        Args:
            end_calls: ends calls that may not continue; called at every poll, since tokens expire.
        """
        loop = asyncio.get_running_loop()
        saved = loop.time()
        while True:  # a poll is two stats; change notifications do not work on every file system
            await asyncio.sleep(POLL_S)
            try:
                await self._reload_changed()
                if loop.time() - saved > _SAVE_USES_S:
                    saved = loop.time()
                    await self._table.save_uses()
            except Exception:
                log.exception("the tokens could not be checked")
            end_calls()

    async def close(self) -> None:
        """Write the times at which tokens were last used, at the end of the server."""
        try:
            await self._table.save_uses()
        except Exception:
            log.exception("when tokens were used last could not be written")

    async def _reload_changed(self) -> None:
        signature, marked = await asyncio.to_thread(lambda: (_signature(self._file), _signature(self._marker)))
        if marked != self._marker_signature:
            self._marker_signature = marked
            await self._table.load()
        if signature == self._last_signature and signature != self._loaded_signature and self._file is not None:
            self._loaded_signature = signature
            try:
                self._tokens = await asyncio.to_thread(_read, self._file)
                log.info("the token file was read again", path=str(self._file), tokens=len(self._tokens))
            except BadTokenFile as error:
                log.error("the changed token file cannot be used; the previous tokens stay valid", why=str(error))
        self._last_signature = signature


def _read(path: Path) -> dict[bytes, Principal]:
    """Return the tokens of a changed file. Unlike at startup, the file may be empty, which revokes all its tokens.

    Raises:
        BadTokenFile: the file cannot be used.
    """
    try:
        return read_tokens(path)
    except BadTokenFile as invalid:
        try:
            text = read_secret(path, BadTokenFile, MAX_BYTES + 1).decode(errors="replace")
        except OSError:
            raise invalid from None
        if len(text) > MAX_BYTES or any(line.partition("#")[0].split() for line in text.splitlines()):
            raise
        return {}


def _signature(path: Path | None) -> Signature:
    """Return values that change when a file is written or replaced; None if there is no file."""
    try:
        stat = path.stat() if path is not None else None
    except OSError:
        return None
    return None if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
